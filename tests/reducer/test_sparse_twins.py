"""Deep Gradient Compression and Strom's threshold against the papers' loops, written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, digest, feed, residuals
from threads import on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import Threshold
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.settings.exchange import ExchangeSettings

DOUBLE = torch.float64
BLOCK, STEPS = 128, 20
LARGE = ("first", "second")  # the bias stays uncompressed


def given(rank: int, step: int) -> Tensors:
    """Every other step small, so that clipping acts on some steps and not on others."""
    factor = 1.0 if step % 2 else 0.125
    return {name: g.to(DOUBLE) * factor for name, g in feed(rank, step).items()}


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
    module, outputs = Fed(dtype=DOUBLE), []
    with compressed(rank, module, codec, min_compress_numel=256) as (model, reducer):
        for step in range(STEPS):
            outputs.append(backward(model, given(rank.rank, step)))
        v, u = reducer.state.residuals, reducer.state.momenta
        return Run(
            outputs,
            {name: u[name].clone() for name in u},
            {name: v[name].clone() for name in v},
        )


def dgc_by_hand(case: Case, size: int) -> tuple[list[Tensors], list[Twin]]:
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
    """But for the rounding of what is sent to float32."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@cases
@worlds
def test_dgc_is_the_papers_loop(name: str, size: int) -> None:
    case = CASES[name]
    expected, twins = dgc_by_hand(case, size)
    runs = run_threads(lambda rank: ours(rank, case), size)
    assert len({str([digest(found) for found in run.outputs]) for run in runs}) == 1, "replicas"
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


TAU = 1.5
NUMEL = {name: SHAPES[name][0] * SHAPES[name][1] for name in LARGE}


def threshold_by_hand(
    size: int, steps: int, wire: torch.dtype
) -> tuple[list[Tensors], list[Tensors]]:
    """``v = g + e``; where ``|v| > tau``: send v as ``wire`` holds it; keep the rest."""
    owed = [{name: torch.zeros(SHAPES[name], dtype=DOUBLE) for name in LARGE} for _ in range(size)]
    outputs = []
    for step in range(steps):
        fed = [feed(rank, step, dtype=DOUBLE) for rank in range(size)]
        out = {"bias": torch.stack([gradients["bias"] for gradients in fed]).mean(0)}
        for name in LARGE:
            out[name] = torch.zeros(SHAPES[name], dtype=DOUBLE)
            for rank in range(size):
                v = fed[rank][name] + owed[rank][name]
                sent = torch.where(v.abs() > TAU, v.to(wire).to(DOUBLE), 0.0)
                owed[rank][name] = v - sent
                out[name] += sent / size
        outputs.append(out)
    return outputs, owed


@worlds
@pytest.mark.parametrize(("values", "wire"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@on_threads("size")
def test_it_is_the_loop(rank: Rank, size: int, values: str, wire: torch.dtype) -> None:
    codec, steps = f"threshold:unit=absolute,tau={TAU},values={values}", 12
    expected, owed = threshold_by_hand(size, steps, wire)
    with compressed(rank, Fed(dtype=DOUBLE), codec, min_compress_numel=256) as (model, reducer):
        for step in range(steps):
            found = backward(model, feed(rank.rank, step, dtype=DOUBLE))
            for name, wanted in expected[step].items():
                torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)
        kept = residuals(reducer)
    for name in LARGE:
        found = kept[name].view(SHAPES[name])
        torch.testing.assert_close(found, owed[rank.rank][name], rtol=1e-12, atol=1e-12)


def flat(amounts: Sequence[int], rank: int) -> Tensors:
    """Gradients of which the first ``amounts[rank]`` elements of both matrices are large."""
    given = {"bias": torch.zeros(SHAPES["bias"])}
    for name in LARGE:
        values = torch.full((NUMEL[name],), 0.25)
        values[: amounts[rank]] = 2.0 + rank
        given[name] = values.view(SHAPES[name])
    return given


def mean_of(amounts: Sequence[int], name: str) -> Tensor:
    total = torch.zeros(NUMEL[name])
    for rank, amount in enumerate(amounts):
        total[:amount] += (2.0 + rank) / len(amounts)
    return total.view(SHAPES[name])


ALL = 10**6

AMOUNTS: list[tuple[int, ...]] = [
    (0, 5),
    (0, 0),
    (ALL, 0),
    (1, 0),
    (ALL, ALL),
    (0, 0, 0),
    (0, 7, 2),
    (0, ALL, 0),
    (0, 0, 1, 0),
]


@pytest.mark.parametrize("amounts", AMOUNTS, ids=str)
@on_threads("amounts")
def test_any_amount_on_any_rank(rank: Rank, amounts: tuple[int, ...]) -> None:
    """Bytes by hand: 8 for the length, then index and value padded to the longest of all ranks."""
    codec = f"threshold:unit=absolute,tau={TAU}"
    with compressed(rank, Fed(), codec, min_compress_numel=256) as (model, reducer):
        means = backward(model, flat(amounts, rank.rank))
        stats, owed = reducer.comm_stats()["per_codec"]["threshold"], residuals(reducer)
    for name in LARGE:
        torch.testing.assert_close(means[name], mean_of(amounts, name), rtol=1e-6, atol=0)
        small = torch.arange(NUMEL[name]) >= amounts[rank.rank]
        assert torch.equal(owed[name], torch.where(small, 0.25, 0.0))
    longest = max(sum(min(amount, numel) for numel in NUMEL.values()) for amount in amounts)
    assert stats["wire_bytes"] == (rank.size - 1) * (8 + longest * (4 + 2))


@on_threads(2)
def test_nothing_then_something_then_nothing(rank: Rank) -> None:
    """What a step received does not come back in a step without anything."""
    codec = f"threshold:unit=absolute,tau={TAU}"
    with compressed(rank, Fed(), codec, error_feedback=False, min_compress_numel=256) as (m, _):
        steps = [(0, 0), (3, 9), (0, 0), (0, 2)]
        found = [backward(m, flat(amounts, rank.rank))["first"] for amounts in steps]
    nothing, something, nothing_again, little = found
    assert not nothing.any()
    assert torch.equal(something, mean_of((3, 9), "first"))
    assert not nothing_again.any()
    assert torch.equal(little, mean_of((0, 2), "first"))


@on_threads(2)
def test_a_bucket_beyond_int32_is_refused(rank: Rank) -> None:
    """A bucket is as large as its largest parameter, and an int32 sum wraps without a word."""
    bucket = torch.empty(2**31 + 1, device="meta")
    planner = Planner(
        rank.network(),
        ReducerState(),
        ExchangeSettings(error_feedback=False),
    )
    with pytest.raises(ValueError, match="as int32, got 2147483649 elements"):
        planner.units(Threshold(), [ParameterSlice("p", 0, (2**31 + 1,))], bucket)
