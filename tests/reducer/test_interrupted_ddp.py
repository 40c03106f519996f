"""A real backward pass that raises in the middle, on all ranks."""

from __future__ import annotations

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.integrations.torch.ddp import attach


class _Failing(torch.autograd.Function):
    """Identity whose backward raises when it is asked to."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise MemoryError("out of memory in the middle of the backward pass")
        return grad, None


class Halfway(nn.Module):
    """``Fed`` whose backward fails, on demand, after the first bucket has been handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.fed, self.fails = Fed(), False

    def forward(self, given: Tensors) -> Tensor:
        last = _Failing.apply(self.fed({"first": given["first"]}), self.fails)
        return last + self.fed({name: given[name] for name in ("second", "bias")})


SETTINGS = {"min_compress_numel": 256, "commit": "deferred", "ddp": {"bucket_cap_mb": 0.004}}


def train(model: nn.Module, rank: Rank, steps: range) -> list[str]:
    return [digest(dict(sorted(backward(model, feed(rank.rank, s)).items()))) for s in steps]


def test_a_real_backward_that_raises_then_a_new_ddp() -> None:
    """DDP itself takes no further step after that; a new DDP goes on with the old residuals."""

    def uninterrupted(rank: Rank) -> list[str]:
        with compressed(rank, Halfway(), **SETTINGS) as (model, _):
            return train(model, rank, range(5))

    def body(rank: Rank) -> list[str]:
        module = Halfway()
        with compressed(rank, module, **SETTINGS) as (model, old):
            digests = train(model, rank, range(3))
            module.fails = True
            with pytest.raises(MemoryError):
                backward(model, feed(rank.rank, 77))
            module.fails = False
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                model(feed(rank.rank, 3))
        # A copy of the module: on the old one the old DDP's hooks fire for as long as it is alive.
        copy = Halfway()
        copy.load_state_dict(module.state_dict())
        new = DistributedDataParallel(copy, process_group=rank.group("new"), bucket_cap_mb=0.004)
        groups = [rank.group("new payload"), rank.group("new flags")]
        reducer = attach(new, old.settings, continue_from=old, groups=groups)
        try:
            return digests + train(new, rank, range(3, 5))
        finally:
            reducer.close()

    assert run_threads(body, 2) == run_threads(uninterrupted, 2)
