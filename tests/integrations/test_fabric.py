"""`Fabric(strategy="compressed_ddp")` on two ranks."""

from __future__ import annotations

import pytest
import torch
from results import Results, pick, require_compressed, require_equal, require_replicas

WEIGHT, BIAS = 16 * 256, 256  # elements; the bias stays uncompressed


def test_fabric_trains_replicas_with_the_bytes_of_int8(two: Results) -> None:
    ranks = two("fabric_trains")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        stats = facts["int8"]["stats"]
        assert stats["raw_bytes"] == 8 * 4 * (2 * WEIGHT + BIAS)
        assert stats["per_codec"]["int8"]["wire_bytes"] == 8 * 2 * (WEIGHT + 16 * 2)
        assert stats["per_codec"]["none"]["wire_bytes"] == 8 * 4 * BIAS
        for name, value in facts["ddp"]["parameters"].items():
            torch.testing.assert_close(facts["int8"]["parameters"][name], value, rtol=0, atol=1e-2)
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_no_backward_sync_accumulates(two: Results) -> None:
    """8 batches by twos: 4 steps on the wire."""
    ranks = two("fabric_accumulates")
    require_compressed(ranks, steps=4)
    require_replicas(ranks)


def test_a_compiled_module_trains_as_an_eager_one(two: Results) -> None:
    ranks = two("fabric_compiled")
    for facts in ranks:
        expected = list(facts["eager"]["parameters"].values())
        found = list(facts["compiled"]["parameters"].values())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert list(facts["compiled"]["residuals"]) == ["0.weight", "2.weight"]
    require_compressed(pick(ranks, "compiled"), steps=8)
    require_replicas(pick(ranks, "compiled"))


def test_residuals_are_unscaled(two: Results) -> None:
    """A GradScaler whose scale doubles at every step gives the bits of a constant one."""
    ranks = two("fabric_scaler")
    for facts in ranks:
        assert (facts["constant"]["scale"], facts["growing"]["scale"]) == (2.0**10, 2.0**18)
        require_equal(facts["growing"]["residuals"], facts["constant"]["residuals"])
        require_equal(facts["growing"]["parameters"], facts["constant"]["parameters"])
    require_compressed(pick(ranks, "growing"), steps=8)
    require_replicas(pick(ranks, "growing"))


def test_fabric_save_and_load_carry_the_residuals(two: Results) -> None:
    """4 + 4 steps with a load between are 8 steps, bit for bit."""
    ranks = two("fabric_resumes")
    for facts in ranks:
        assert facts["keys"] == ["lightning_dist", "model", "optimizer"]
        assert facts["rest"] == []
        assert facts["resumed"]["digests"] == facts["whole"]["digests"][4:]
        require_equal(facts["resumed"]["residuals"], facts["whole"]["residuals"])
    require_compressed(pick(ranks, "resumed"), steps=4)
    require_replicas(pick(ranks, "resumed"))


def test_another_number_of_ranks_keeps_the_mean_residual(two: Results, three: Results) -> None:
    """What is owed to the model is the mean over ranks."""
    before = [facts["half"]["residuals"] for facts in two("fabric_resumes")]
    after = [facts["start"]["residuals"] for facts in three("fabric_two_to_three")]
    assert before[0].keys() == after[0].keys() != set()
    for name in before[0]:
        owed = torch.stack([each[name] for each in before]).mean(0)
        assert owed.any()
        found = torch.stack([each[name] for each in after]).mean(0)
        torch.testing.assert_close(found, owed, rtol=1e-6, atol=1e-9)
    require_replicas(pick(three("fabric_two_to_three"), "resumed"))


def test_a_plain_checkpoint_leaves_no_residual(two: Results) -> None:
    """As in Lightning: what was owed belonged to the weights that the load replaced."""
    for facts in two("fabric_other_files"):
        assert any(residual.any() for residual in facts["before"]["residuals"].values())
        assert not any(residual.any() for residual in facts["restored"]["residuals"].values())
        assert facts["restored"]["step"] == 0


@pytest.mark.parametrize("load", ["looked into", "other module"])
def test_a_load_that_restores_nothing_of_ours_changes_no_residual(two: Results, load: str) -> None:
    for facts in two("fabric_other_files"):
        require_equal(facts[load]["residuals"], facts["before"]["residuals"])


def test_every_module_has_a_reducer_of_its_own(two: Results) -> None:
    for facts in two("fabric_two_modules"):
        assert facts["wire_bytes"] == [pytest.approx(WEIGHT + 16 * 2)] * 2
