"""Complex parameters: a bucket holds their gradients as pairs of real numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeding import EVERY_CODEC, FakeBucket, Tensors, backward, compressed, digest, mean, residuals
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist import OneBitAdam
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings

SHAPES = {"complex": (24, 32), "real": (40, 48), "transposed": (18, 20), "vector": (7,)}
EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def feed(rank: int, step: int, dtype: torch.dtype = torch.complex64) -> Tensors:
    """Gradients; all but ``real`` are complex."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in SHAPES.items()}
    return found | {"real": found["real"].real.contiguous()}


class Mixed(nn.Module):
    """``d loss / d p = feed[name of p]``."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        for name, value in feed(99, 0, dtype).items():
            value = value.t().contiguous().t() if name == "transposed" else value
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, given: Tensors) -> Tensor:
        own = dict(self.named_parameters())
        return torch.stack([(real(own[n]) * real(value)).sum() for n, value in given.items()]).sum()


def digests(rank: Rank, model: nn.Module) -> list[str]:
    found = [backward(model, feed(rank.rank, step)) for step in range(4)]
    return [digest(real(g) for _, g in sorted(gradients.items())) for gradients in found]


@pytest.mark.parametrize("size", [2, 3])
def test_none_is_bit_identical_to_ddp(size: int) -> None:
    ddp = {"bucket_cap_mb": 0.004}

    def ours(rank: Rank) -> list[str]:
        with compressed(rank, Mixed(), "none", ddp=ddp) as (model, _):
            return digests(rank, model)

    plain = run_threads(lambda rank: digests(rank, rank.ddp(Mixed(), **ddp)), size)
    assert run_threads(ours, size) == plain


def test_replicas_are_bit_identical() -> None:
    def body(rank: Rank) -> list[list[str]]:
        found = []
        for codec in EVERY_CODEC:
            with compressed(rank, Mixed(), codec, min_compress_numel=0) as (model, _):
                found.append(digests(rank, model))
        return found

    for codec, first, *others in zip(EVERY_CODEC, *run_threads(body, 3), strict=True):
        assert others == [first] * 2, codec
        assert len(set(first)) == 4, codec


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2"])
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
def test_mass_is_conserved(codec: str, tree: list[list[int]] | None) -> None:
    steps, dtype = 20, torch.complex128

    def body(rank: Rank) -> tuple[Tensors, Tensors]:
        """What went in less what came out, and what is owed for it."""
        lost = {name: torch.zeros_like(real(g)) for name, g in feed(0, 0, dtype).items()}
        with compressed(rank, Mixed(dtype), codec, tree=tree, **EVERYTHING) as (model, reducer):
            for step in range(steps):
                given = feed(rank.rank, step, dtype)
                left = backward(model, given)
                lost = {n: total + real(given[n]) - real(left[n]) for n, total in lost.items()}
            state = reducer.state_dict()
        return lost, {} if state is None else state["residuals"]

    ranks = run_threads(body, 3)
    owed = ranks[0][1]
    for name, lost in mean([lost for lost, _ in ranks]).items():
        if name not in owed:  # powersgd leaves vectors alone
            assert float(lost.abs().max()) < 1e-12
            continue
        # What is kept lies as the parameter does in memory.
        lost = lost.transpose(0, 1).contiguous() if name == "transposed" else lost
        assert float((owed[name].mean(0) - lost.flatten()).abs().max()) < 1e-11, name


def test_a_resumed_run_repeats_the_uninterrupted_one() -> None:
    def body(rank: Rank, state: Any, steps: range) -> tuple[list[str], Any]:
        with compressed(rank, Mixed(), **EVERYTHING) as (model, reducer):
            reducer.load_state_dict(state)
            found = [backward(model, feed(rank.rank, step)) for step in steps]
            assert residuals(reducer)["complex"].numel() == 2 * 24 * 32
            return [digest(map(real, gradients.values())) for gradients in found], (
                reducer.state_dict()
            )

    whole = run_threads(lambda rank: body(rank, None, range(4)), 2)
    state = run_threads(lambda rank: body(rank, None, range(2)), 2)[0][1]
    resumed = run_threads(lambda rank: body(rank, state, range(2, 4)), 2)
    assert [found for found, _ in resumed] == [found[2:] for found, _ in whole]


def test_one_bit_adam_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"real parameters.*complex64.*AdamW"):
        OneBitAdam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], freeze_step=1)


def test_parameters_that_do_not_fill_their_bucket_fail_the_step() -> None:
    """However a bucket came to be laid out: an element without a parameter would not be reduced."""

    def body(rank: Rank) -> str:
        parameter = torch.zeros(64)
        settings = Settings.check("int8", min_compress_numel=0)
        reducer = Reducer({parameter: "short"}, settings=settings, network=rank.network())
        try:
            future = DDPBuckets(reducer).reduce(FakeBucket(torch.zeros(65), [parameter]))
            with pytest.raises(RuntimeError, match=r"65 elements.*64"):
                future.wait()
            return "failed"
        finally:
            reducer.close()

    assert run_threads(body, 2) == ["failed"] * 2
