"""Deep Gradient Compression against the paper's loop, written out for every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, feed
from torch import Tensor
from worlds import Rank, run_threads

DOUBLE = torch.float64
BLOCK, STEPS = 128, 20
LARGE = ("first", "second")  # the bias stays uncompressed


def given(rank: int, step: int, dtype: torch.dtype = DOUBLE) -> Tensors:
    """Every other step small, so that clipping acts on some steps and not on others."""
    factor = 1.0 if step % 2 else 0.125
    return {name: g.to(dtype) * factor for name, g in feed(rank, step).items()}


@dataclass
class Twin:
    """One rank of algorithm 2 of arXiv 1712.01887; ``k`` elements of every block are sent."""

    momentum: float
    clip: float
    size: int
    u: Tensors = field(default_factory=dict)
    v: Tensors = field(default_factory=dict)

    def send(self, name: str, gradient: Tensor, k: int) -> Tensor:
        g = gradient.flatten()
        most = self.clip / self.size**0.5
        if self.clip and g.norm() > most:
            g = g * (most / g.norm())
        u = self.momentum * self.u.get(name, torch.zeros_like(g)) + g
        v = self.v.get(name, torch.zeros_like(g)) + u
        mask = torch.zeros_like(v, dtype=torch.bool)
        for start in range(0, v.numel(), BLOCK):
            block = v[start : start + BLOCK].abs()
            chosen = sorted(range(len(block)), key=block.tolist().__getitem__)[-k:]
            mask[[start + place for place in chosen]] = True
        self.u[name], self.v[name] = u.masked_fill(mask, 0), v.masked_fill(mask, 0)
        return v.masked_fill(~mask, 0).view(gradient.shape)


@dataclass(frozen=True)
class Case:
    options: str
    momentum: float = 0.9
    clip: float = 0.0
    k_until: Mapping[int, int] = field(default_factory=lambda: {STEPS: 6})  # 5 % of 128, even
    dtype: torch.dtype = DOUBLE

    def k(self, step: int) -> int:
        return next(k for until, k in self.k_until.items() if step < until)


CASES = {
    "paper": Case("ratio=0.05"),
    "other momentum": Case("ratio=0.05,momentum=0.3", momentum=0.3),
    "no momentum": Case("ratio=0.05,momentum=0", momentum=0.0),
    "clipped": Case("ratio=0.05,clip=10.0", clip=10.0),
    # 25 % and 6.25 % for 6 steps each, then 5 %.
    "ramp": Case("ratio=0.05,warmup_steps=12", k_until={6: 32, 12: 8, STEPS: 6}),
    "ramp, clipped": Case(
        "ratio=0.05,warmup_steps=12,clip=10.0",
        clip=10.0,
        k_until={6: 32, 12: 8, STEPS: 6},
    ),
}
cases = pytest.mark.parametrize("name", CASES)
worlds = pytest.mark.parametrize("size", [2, 3])


@dataclass
class Run:
    outputs: list[Tensors]
    u: Tensors
    v: Tensors


def ours(rank: Rank, case: Case) -> Run:
    codec = f"dgc:block_size={BLOCK},values=fp32,{case.options}"
    module, outputs = Fed(dtype=case.dtype), []
    with compressed(rank, module, codec, min_compress_numel=256) as (model, reducer):
        for step in range(STEPS):
            outputs.append(backward(model, given(rank.rank, step, case.dtype)))
        v, u = reducer.state.residuals, reducer.state.momenta
        return Run(
            outputs,
            {name: u[name].clone() for name in u},
            {name: v[name].clone() for name in v},
        )


def by_hand(case: Case, size: int) -> tuple[list[Tensors], list[Twin]]:
    twins = [Twin(case.momentum, case.clip, size) for _ in range(size)]
    outputs = []
    bias = torch.zeros(SHAPES["bias"], dtype=DOUBLE)
    for step in range(STEPS):
        fed = [given(rank, step) for rank in range(size)]
        # Not compressed, but with the same momentum; not clipped.
        bias = case.momentum * bias + sum(gradients["bias"] for gradients in fed) / size
        out = {"bias": bias}
        for name in LARGE:
            sent = [t.send(name, g[name], case.k(step)) for t, g in zip(twins, fed, strict=True)]
            out[name] = torch.stack(sent).sum(0) / size
        outputs.append(out)
    return outputs, twins


def close(found: Tensor, expected: Tensor) -> None:
    """But for the rounding of what is sent to float32, or of all to float32."""
    atol = 1e-6 if found.dtype == DOUBLE else 1e-5
    torch.testing.assert_close(found.to(DOUBLE), expected, rtol=1e-6, atol=atol)


@cases
@worlds
def test_dgc_is_the_papers_loop(name: str, size: int) -> None:
    case = CASES[name]
    expected, twins = by_hand(case, size)
    runs = run_threads(lambda rank: ours(rank, case), size)
    for run, twin in zip(runs, twins, strict=True):
        for found, wanted in zip(run.outputs, expected, strict=True):
            assert found.keys() == wanted.keys() == SHAPES.keys()
            for parameter, value in wanted.items():
                close(found[parameter], value)
        assert set(run.v) == set(LARGE)
        assert set(run.u) == (set(SHAPES) if case.momentum else set())
        for parameter in run.v:
            close(run.v[parameter], twin.v[parameter])
        for parameter in run.u.keys() & set(LARGE):
            close(run.u[parameter], twin.u[parameter])


def test_the_cases_differ() -> None:
    """Otherwise the table above says less than it seems to."""
    last = [by_hand(case, 2)[0][-1]["first"] for case in CASES.values()]
    pairs = [(a, b) for i, a in enumerate(last) for b in last[:i]]
    assert not any(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)


def test_all_ranks_get_the_same_bits() -> None:
    first, *others = run_threads(lambda rank: ours(rank, CASES["ramp, clipped"]), 3)
    for other in others:
        for a, b in zip(other.outputs, first.outputs, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in SHAPES)
