"""What only shows when ranks meet is refused by all of them, with the reason, and nobody hangs."""

from __future__ import annotations

from results import Results, pick, require_compressed, require_replicas

SOON = 20  # seconds; a hang would last for the timeout of the group, 30


def test_ranks_with_different_codecs_are_named(two: Results) -> None:
    ranks = two("different_settings")
    for facts in ranks:
        assert (
            "codec: 'Int8(block_size=256)' on rank 0; 'BF16()' on rank 1"
            in facts["codec"]["message"]
        )
        assert facts["codec"]["seconds"] < SOON
        assert "start_step: 0 on rank 0; 1 on rank 1" in facts["start_step"]["message"]
        assert "codec" not in facts["start_step"]["message"]
    require_compressed(pick(ranks, "afterwards"), steps=8)
    require_replicas(pick(ranks, "afterwards"))


def test_compression_that_would_begin_after_the_training(two: Results) -> None:
    """8 steps. A trial run is no training, and nobody knows the steps of manual optimization."""
    told = "Compression must start before training ends, got step {} as its first"
    for facts in two("compression_after_the_end"):
        messages = {name: fit["message"] for name, fit in facts.items()}
        assert messages.pop("start_step").startswith(told.format(8))
        assert messages.pop("after_steps") == (
            f"{told.format(9)} (start_step, warmup or after_steps) and a training of 8 steps; set "
            "it lower, or use strategy='ddp'"
        )
        assert messages.pop("freeze_step") == (
            "OneBitAdam compresses nothing before its freeze_step, which must come before the "
            "training ends, got freeze_step=8 and 8 steps; 15 to 25 % of them is usual"
        )
        assert set(messages.values()) == {""}
        assert max(fit["seconds"] for fit in facts.values()) < SOON


def test_a_model_without_trainable_parameters(two: Results) -> None:
    for facts in two("nothing_to_train"):
        assert "must have a parameter with requires_grad=True" in facts["message"]


def test_a_sparse_embedding_is_named(two: Results) -> None:
    for facts in two("sparse_gradients"):
        assert "'table' was made with sparse=True" in facts["message"]
