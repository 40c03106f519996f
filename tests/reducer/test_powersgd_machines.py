"""PowerSGD on machines that compute differently: reduced precision, ranks that are not equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, feed, mean, residuals
from torch import Tensor
from worlds import Rank, run_threads

SETTINGS = {"min_compress_numel": 256}
REDUCED = ("tf32", "bf16")
products = {"mm": torch.mm, "addmm": torch.addmm}


def short(tensor: Tensor) -> Tensor:
    """As tensor cores round float32, where the setting of the moment lets them."""
    reduced = torch.backends.cuda.matmul.fp32_precision in REDUCED
    return tensor.to(torch.bfloat16).to(tensor.dtype) if reduced else tensor


@pytest.mark.parametrize("form", ["powersgd:rank=2", "powersgd:rank=2,two_phase=true"])
def test_mass_is_conserved_where_the_training_multiplies_in_tf32(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: this test's machine need not have the hardware."""

    def mm(a: Tensor, b: Tensor, **out: Any) -> Tensor:
        return products["mm"](short(a), short(b), **out)

    def addmm(c: Tensor, a: Tensor, b: Tensor, **out: Any) -> Tensor:
        return products["addmm"](c, short(a), short(b), **out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    steps = 10

    def body(rank: Rank) -> tuple[Tensors, Tensors, Tensors]:
        given = [feed(rank.rank, step) for step in range(steps)]
        with compressed(rank, Fed(), form, **SETTINGS) as (model, reducer):
            found = [backward(model, gradients) for gradients in given]
            owed = residuals(reducer)
        names = sorted(owed)
        return (
            {name: torch.stack([each[name] for each in given]).sum(0) for name in names},
            {name: torch.stack([each[name] for each in found]).sum(0) for name in names},
            {name: owed[name].view(SHAPES[name]) for name in names},
        )

    torch.set_float32_matmul_precision("medium")
    try:
        ranks = run_threads(body, 2)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    went_in, came_out, owed = (mean(of) for of in zip(*ranks, strict=True))
    for name, total in went_in.items():
        assert float((came_out[name] + owed[name] - total).abs().max()) < 1e-4, name


@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize(("commit", "told_in"), [("immediate", 100), ("deferred", 101)])
def test_ranks_that_have_drifted_apart_are_reported(tree: Any, commit: str, told_in: int) -> None:
    """The factors of one rank are a little different, as another LAPACK would have them.

    Every 100 steps gradients are compared: in that step, or with the flags of the next one.
    """
    settings = {"tree": tree, "commit": commit, **SETTINGS}

    def body(rank: Rank) -> str:
        with compressed(rank, Fed(), "powersgd:rank=2", **settings) as (model, reducer):
            for step in range(told_in):
                backward(model, feed(rank.rank, step))
                for factor in reducer.state.factors.get("first", ()):
                    factor.mul_(1 + 1e-3 * (rank.rank == 2))
            with pytest.raises(RuntimeError) as caught:
                backward(model, feed(rank.rank, told_in))
            return str(caught.value)

    for message in run_threads(body, 3):
        assert "powersgd" in message
        assert "different gradients" in message
        assert "equal hardware" in message


def test_equal_ranks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by an overflow nor by a new start, in the steps that are compared."""
    monkeypatch.setattr("lightning_dist.reducer.pipeline._COMPARED_EVERY", 2)

    def body(rank: Rank) -> int:
        with compressed(rank, Fed(), "powersgd:rank=2", **SETTINGS) as (model, reducer):
            for step in range(6):
                given = feed(rank.rank, step)
                if step in (2, 4) and rank.rank == 1:
                    given["second"][0, 0] = torch.inf
                backward(model, given)
            reducer.load_state_dict(None)
            backward(model, feed(rank.rank, 6))
            return reducer.step

    assert run_threads(body, 2) == [1, 1]
