"""Residuals in Lightning checkpoints: resume, other strategies, other numbers of ranks."""

from __future__ import annotations

import torch
from results import Facts, Results, pick, require_compressed, require_equal, require_replicas

KEY = "lightning_dist"
WEIGHTS = ["net.0.weight", "net.2.weight"]  # the bias is smaller than min_compress_numel


def _mean(ranks: list[Facts]) -> dict[str, torch.Tensor]:
    names = ranks[0]["residuals"]
    return {name: torch.stack([f["residuals"][name] for f in ranks]).mean(0) for name in names}


def test_a_checkpoint_holds_every_ranks_residuals_in_plain_values(two: Results) -> None:
    ranks = pick(two("resume"), "half")
    state = torch.load(two.folder / "half.ckpt", weights_only=True)[KEY]
    assert sorted(state) == ["residuals", "step", "strides", "version", "world_size"]
    assert (state["step"], state["world_size"]) == (4, 2)
    assert sorted(state["residuals"]) == WEIGHTS
    for rank, facts in enumerate(ranks):
        mine = {name: rows[rank] for name, rows in state["residuals"].items()}
        require_equal(mine, facts["residuals"])
        assert all(residual.any() for residual in mine.values())
    assert not torch.equal(ranks[0]["residuals"][WEIGHTS[0]], ranks[1]["residuals"][WEIGHTS[0]])


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(two: Results) -> None:
    ranks = two("resume")
    for facts in ranks:
        assert facts["resumed"]["digests"] == facts["whole"]["digests"][4:]
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])
        require_equal(facts["resumed"]["residuals"], facts["whole"]["residuals"])
        for index, whole in facts["optimizer"]["whole"].items():
            require_equal(facts["optimizer"]["resumed"][index], whole)
    require_compressed(pick(ranks, "resumed"), steps=4)
    require_replicas(pick(ranks, "resumed"))


def test_without_the_residuals_it_would_not(two: Results) -> None:
    """Shows that the test above can fail."""
    whole, stripped = pick(two("resume"), "whole"), two("without_residuals")
    require_replicas(stripped)
    assert stripped[0]["digests"][-1] != whole[0]["digests"][-1]


def test_a_checkpoint_of_ours_loads_under_plain_ddp(two: Results) -> None:
    ranks = pick(two("ours_under_ddp"), "resumed")
    assert KEY in torch.load(two.folder / "ours.ckpt", weights_only=True)
    require_replicas(ranks)
    assert ranks[0]["optimizer_steps"] == 8
    assert KEY not in torch.load(two.folder / "ddp.ckpt", weights_only=True)


def test_a_plain_checkpoint_loads_under_ours_without_residuals(two: Results) -> None:
    """Not even what the strategy still owed from a fit before it."""
    ranks = two("ddp_under_ours")
    for facts in ranks:
        assert any(residual.any() for residual in facts["before"]["residuals"].values())
        assert not any(residual.any() for residual in facts["start"].values())
        assert facts["step"] == 0
        assert sorted(facts["resumed"]["residuals"]) == WEIGHTS
    require_compressed(pick(ranks, "resumed"), steps=4)
    require_replicas(pick(ranks, "resumed"))


def test_weights_alone_have_no_residuals_and_a_save_after_the_fit_has(two: Results) -> None:
    ranks = two("weights_only")
    assert KEY not in ranks[0]["keys"]
    assert "state_dict" in ranks[0]["keys"]
    assert ranks[0]["validated"] == ranks[1]["validated"] < 1
    for rank, facts in enumerate(ranks):
        saved = {name: rows[rank] for name, rows in facts["after"]["residuals"].items()}
        require_equal(saved, facts["fit"]["residuals"])


def test_another_number_of_ranks_starts_from_the_mean_residual(
    two: Results, three: Results
) -> None:
    """What is owed to the model is the mean over ranks: 2 -> 3 and 2 -> 1 conserve it."""
    owed = _mean(pick(two("resume"), "half"))
    for name in ("two_to_three", "two_to_one"):
        ranks = three(name)
        started = _mean([{"residuals": facts["start"]} for facts in ranks])
        assert started.keys() == owed.keys()
        for parameter, residual in owed.items():
            torch.testing.assert_close(started[parameter], residual, rtol=1e-6, atol=0.0)
        assert all(facts["step"] == 4 for facts in ranks)
        require_replicas(pick(ranks, "resumed"))
    require_compressed(pick(three("two_to_three"), "resumed"), steps=4)
    saved = torch.load(three.folder / "three.ckpt", weights_only=True)[KEY]
    assert saved["world_size"] == 3


def test_three_ranks_resume_bit_for_bit_too(three: Results) -> None:
    """Two rounds on the wire, and owners that carry the second rounding."""
    ranks = three("resume_three")
    for facts in ranks:
        assert facts["resumed"]["digests"] == facts["whole"]["digests"][4:]
        require_equal(facts["resumed"]["residuals"], facts["whole"]["residuals"])
    require_compressed(pick(ranks, "resumed"), steps=4)
    require_replicas(pick(ranks, "resumed"))
