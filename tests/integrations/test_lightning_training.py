"""`Trainer(strategy=...)` on two ranks: automatic optimisation and DDP's own arguments."""

from __future__ import annotations

import pytest
from results import (
    Results,
    mean_loss,
    pick,
    require_compressed,
    require_equal,
    require_replicas,
)

TRAINED = 16 * 32 + 32 + 32 * 16  # elements of `Regression`
HOOK = "lightning_dist_hook"


def test_codec_none_is_bit_identical_to_ddp(two: Results) -> None:
    ranks = two("none_equals_ddp")
    for facts in ranks:
        assert HOOK in facts["ours"]["ddp"]["comm_hook"]
        assert facts["ddp"]["ddp"]["comm_hook"] is None
        assert facts["ours"]["ddp"]["rebuilt_bucket_sizes"].count(",") >= 1, "several buckets"
        assert facts["ours"]["digests"] == facts["ddp"]["digests"]
        require_equal(facts["ours"]["parameters"], facts["ddp"]["parameters"])
        stats = facts["ours"]["stats"]
        assert stats["steps"] == 8
        assert stats["wire_bytes"] == stats["raw_bytes"] == 8 * 4 * TRAINED
    require_replicas(pick(ranks, "ours"))


@pytest.mark.parametrize(
    ("codec", "wire_bytes"),
    [
        ("fp16", 2 * TRAINED),
        ("bf16", 2 * TRAINED),
        # Two weights of 2 blocks of 256, each with a scale of 2 bytes, and a bias with a block of
        # its own size, in planes that are padded to 8 bytes.
        ("int8", 4 * 256 + 8 + 32 + 8),
        ("int8 without memory", 4 * 256 + 8 + 32 + 8),
    ],
)
def test_lossy_codecs_train_as_ddp_does(two: Results, codec: str, wire_bytes: int) -> None:
    """Every codec learns what plain DDP learns, with the bytes it promises."""
    ranks, plain = pick(two("codecs_train"), codec), pick(two("codecs_train"), "ddp")
    require_replicas(ranks)
    require_compressed(ranks, steps=16)
    for facts in ranks:
        assert facts["stats"]["last_step"]["wire_bytes"] == wire_bytes
        assert facts["stats"]["raw_bytes"] == 16 * 4 * TRAINED
        assert len(facts["residuals"]) == (3 if codec == "int8" else 0)
        assert facts["digests"][0] != plain[0]["digests"][0], "not compressed at all"
    last, first = slice(-4, None), slice(0, 4)
    assert mean_loss(ranks, last) < 0.5 * mean_loss(ranks, first)
    assert mean_loss(ranks, last) == pytest.approx(mean_loss(plain, last), rel=0.02)


def test_accumulation_communicates_on_optimizer_steps_only(two: Results) -> None:
    ranks = two("accumulation")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        assert facts["int8"]["optimizer_steps"] == 4
        assert len(facts["int8"]["digests"]) == 8
    require_compressed(pick(ranks, "int8"), steps=4)
    require_replicas(pick(ranks, "int8"))


def test_the_last_batches_of_an_epoch_step_however_few(two: Results) -> None:
    """3 batches by twos and 2 epochs: 4 steps, two of them on one batch."""
    ranks = pick(two("accumulation"), "odd")
    assert ranks[0]["optimizer_steps"] == 4
    require_compressed(ranks, steps=4)
    require_replicas(ranks)


def test_clipping_sees_the_mean_gradient(two: Results) -> None:
    """The norm before clipping is the same on all ranks and as under DDP, the norm after is the
    limit."""
    ranks = two("clipping")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        assert facts["int8"]["before"] == ranks[0]["int8"]["before"]
        assert facts["int8"]["before"] == pytest.approx(facts["ddp"]["before"], rel=0.01)
        assert min(facts["int8"]["before"]) > 0.3
        assert facts["int8"]["after"] == pytest.approx([0.05] * 8, rel=1e-3)
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


@pytest.mark.parametrize(
    ("variant", "fact"),
    [
        ("small buckets", {"rebuilt_bucket_sizes": "2048, 2176"}),
        ("views", {"rebuilt_bucket_sizes": "2048, 2176", "gradient_as_bucket_view": 1}),
        ("static graph", {"rebuilt_bucket_sizes": "2048, 2176", "static_graph": 1}),
        ("find unused", {}),
        ("batched copy", {"rebuilt_bucket_sizes": "2048, 2176"}),
    ],
)
def test_ddp_arguments_take_effect_and_change_no_bit(
    two: Results, variant: str, fact: dict[str, object]
) -> None:
    ranks = two("ddp_arguments")
    for facts in ranks:
        assert facts[variant]["ddp"] | fact == facts[variant]["ddp"]
        assert facts["default"]["ddp"]["rebuilt_bucket_sizes"] == str(4 * TRAINED)
        assert facts[variant]["digests"] == facts["default"]["digests"]
        require_equal(facts[variant]["residuals"], facts["default"]["residuals"])
    require_compressed(pick(ranks, variant), steps=8)
    require_replicas(pick(ranks, variant))


def test_start_step_delays_compression(two: Results) -> None:
    """3 of 8 steps travel uncompressed."""
    ranks = two("start_step")
    for facts in ranks:
        per_codec = facts["stats"]["per_codec"]
        assert per_codec["none"]["wire_bytes"] == 3 * 4 * TRAINED
        assert per_codec["int8"]["raw_bytes"] == 5 * 4 * TRAINED
    require_compressed(ranks, steps=8)
    require_replicas(ranks)
