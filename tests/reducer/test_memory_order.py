"""Parameters that do not lie row by row in memory, such as transposed and channels_last ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeding import Tensors, backward, compressed, feed
from saving import through_a_file
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist.integrations.torch.ddp import attach
from lightning_dist.reducer.plan.slices import strides_in_bucket
from lightning_dist.reducer.reducer import Reducer

SHAPES = {"matrix": (40, 48), "filters": (12, 6, 5, 4)}
DOUBLE = torch.float64
EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
ORDERS = {"matrix": (1, 0), "filters": (0, 2, 3, 1)}  # of dimensions in memory: channels_last


def reordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with dimension ``order[0]`` outermost in memory."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


class Laid(nn.Module):
    """``d loss / d p = given[name of p]``; ``other``: in another order than row by row."""

    def __init__(self, *, other: bool, dtype: torch.dtype = DOUBLE) -> None:
        super().__init__()
        for name, value in feed(99, 0, SHAPES, dtype).items():
            laid = reordered(value, ORDERS[name]) if other else value
            self.register_parameter(name, nn.Parameter(laid))

    def forward(self, given: Tensors) -> Tensor:
        own = dict(self.named_parameters())
        return torch.stack([(own[name] * value).sum() for name, value in given.items()]).sum()


def logical(reducer: Reducer, name: str) -> Tensor:
    """The residual of this rank in the shape of its parameter."""
    parameter = next(p for p, n in reducer.names.items() if n == name)
    found = torch.empty_like(parameter)  # lies in memory as the parameter does
    flat = found.as_strided((found.numel(),), (1,))
    flat.copy_(reducer.residuals[name])
    return found


def test_a_transposed_gradient_of_rank_1_leaves_no_error() -> None:
    """The power iteration finds it in two steps, however it lies in memory."""

    def body(rank: Rank, other: bool) -> float:
        ones = {name: torch.ones(shape, dtype=DOUBLE) for name, shape in SHAPES.items()}
        column = torch.arange(40, dtype=DOUBLE).sin()
        ones["matrix"] = column.view(-1, 1) * torch.arange(48, dtype=DOUBLE).cos()
        with compressed(rank, Laid(other=other), "powersgd:rank=1") as (model, reducer):
            for _ in range(2):
                backward(model, ones)
            return float(logical(reducer, "matrix").norm() / ones["matrix"].norm())

    for other in (False, True):
        assert max(run_threads(lambda rank, o=other: body(rank, o), 2)) < 1e-12, other


@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize("form", ["powersgd:rank=2", "powersgd:rank=2,two_phase=true"])
def test_powersgd_does_the_same_in_every_order(form: str, tree: Any, dtype: torch.dtype) -> None:
    def body(rank: Rank, other: bool) -> list[Tensors]:
        with compressed(rank, Laid(other=other, dtype=dtype), form, tree=tree) as (model, _):
            return [backward(model, feed(rank.rank, s, SHAPES, dtype)) for s in range(4)]

    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == DOUBLE else {"rtol": 0.05, "atol": 0.02}
    rows, others = (run_threads(lambda rank, o=o: body(rank, o), 3) for o in (False, True))
    for row, other in zip(rows[0], others[0], strict=True):
        for name in SHAPES:
            torch.testing.assert_close(other[name], row[name], **close)


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "dgc:ratio=0.1,block_size=128"])
def test_a_checkpoint_of_another_order_is_refused(codec: str) -> None:
    """What is owed would reach other elements."""

    def body(rank: Rank, other: bool, state: Any) -> Any:
        with compressed(rank, Laid(other=other), codec, **EVERYTHING) as (model, reducer):
            if state is None:
                backward(model, feed(rank.rank, 0, SHAPES, DOUBLE))
                return reducer.state_dict()
            reducer.load_state_dict(state)
        return None

    for first in (False, True):
        wrote = through_a_file(run_threads(lambda r, o=first: body(r, o, None), 2)[0])
        run_threads(lambda r, o=first, s=wrote: body(r, o, s), 2)
        with pytest.raises(ValueError, match="must be that of the run whose state"):
            run_threads(lambda r, o=not first, s=wrote: body(r, o, s), 2)


def test_a_new_memory_format_between_two_fits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """What is owed lies as the parameter did, and would reach other elements."""

    def body(rank: Rank) -> None:
        with compressed(rank, Laid(other=False), **EVERYTHING) as (model, old):
            backward(model, feed(rank.rank, 0, SHAPES, DOUBLE))
        new = rank.ddp(Laid(other=True))
        new.module.matrix.data = new.module.matrix.data.contiguous()  # type: ignore[union-attr]
        reducer = attach(new, old.settings, continue_from=old)
        try:
            assert reducer.residuals["matrix"].any()
            assert not reducer.residuals["filters"].any()
        finally:
            reducer.close()

    run_threads(body, 2)
    assert caplog.text.count("The memory format of filters has changed since the last fit") == 1


def test_strides_are_those_of_the_bucket() -> None:
    """DDP copies gradients of parameters with gaps or overlaps row by row."""
    matrix = torch.zeros(6, 4)
    assert strides_in_bucket(matrix) is None
    assert strides_in_bucket(matrix.t()) == (1, 4)
    assert strides_in_bucket(torch.zeros(6, 8)[:, ::2]) is None
    assert strides_in_bucket(torch.zeros(9).as_strided((3, 3), (2, 2))) is None
    assert strides_in_bucket(torch.zeros(6, 4, dtype=torch.complex64).t()) == (2, 8, 1)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert strides_in_bucket(image) == (60, 1, 15, 3)
