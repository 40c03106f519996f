"""bfloat16, and float16 with a real GradScaler."""

from __future__ import annotations

import itertools

import pytest
import torch
from results import (
    Results,
    mean_loss,
    pick,
    require_compressed,
    require_equal,
    require_replicas,
)

RUNS = ("ddp", "none", "int8")
OVERFLOW_AT = 3


@pytest.mark.parametrize(
    ("precision", "itemsize", "residual"),
    [
        ("bf16-mixed", 4, torch.float32),
        ("bf16-true", 2, torch.float32),
        ("16-true", 2, torch.float32),
        ("64-true", 8, torch.float64),
    ],
)
def test_precisions(two: Results, precision: str, itemsize: int, residual: torch.dtype) -> None:
    """Gradients come in the dtype that DDP gives them; residuals are float32 or more."""
    facts_of = {name: pick(two("precisions"), f"{precision} {name}") for name in RUNS}
    for plain, none, int8 in zip(*facts_of.values(), strict=True):
        require_equal(none["parameters"], plain["parameters"])
        assert {p.dtype.itemsize for p in int8["parameters"].values()} == {itemsize}
        assert {r.dtype for r in int8["residuals"].values()} == {residual}
        numel = sum(p.numel() for p in int8["parameters"].values())
        assert int8["stats"]["raw_bytes"] == 8 * itemsize * numel
        assert int8["losses"] == pytest.approx(plain["losses"], rel=0.02)
    ranks = facts_of["int8"]
    assert mean_loss(ranks, slice(4, 8)) < 0.9 * mean_loss(ranks, slice(0, 4))
    require_compressed(ranks, steps=8)
    require_replicas(ranks)


@pytest.mark.parametrize("codec", ["int8", "bf16 with memory"])
def test_an_overflow_on_one_rank_leaves_no_trace(two: Results, codec: str) -> None:
    """The step is skipped on both ranks, the scale halves, residuals stay, training goes on."""
    ranks = pick(two("overflow"), codec)
    for facts in ranks:
        states = facts["states"]
        before, at = states[OVERFLOW_AT - 1], states[OVERFLOW_AT]
        assert facts["scales"] == [2.0**10] * OVERFLOW_AT + [2.0**9] * (8 - OVERFLOW_AT)
        require_equal(at["parameters"], before["parameters"])
        require_equal(at["residuals"], before["residuals"])
        assert any(residual.any() for residual in at["residuals"].values())
        for state in states:
            for value in itertools.chain(state["parameters"].values(), state["residuals"].values()):
                assert value.isfinite().all()
        stood = [earlier == later for earlier, later in itertools.pairwise(facts["digests"])]
        assert stood == [batch == OVERFLOW_AT for batch in range(1, 8)]
    require_compressed(ranks, steps=8)
    require_replicas(ranks)


def test_residuals_are_unscaled(two: Results) -> None:
    """A scale that doubles at every step gives the bits that a constant scale gives."""
    ranks = two("growing_scale")
    for facts in ranks:
        growing, constant = facts["growing"], facts["constant"]
        assert growing["scales"] == [2.0 ** (11 + step) for step in range(8)]
        assert set(constant["scales"]) == {2.0**10}
        assert all(residual.any() for residual in constant["residuals"].values())
        require_equal(growing["residuals"], constant["residuals"])
        require_equal(growing["parameters"], constant["parameters"])
    require_compressed(pick(ranks, "growing"), steps=8)
    require_replicas(pick(ranks, "growing"))
