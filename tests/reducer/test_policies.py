"""Which codec a tensor gets under the settings, and codecs that choose among codecs."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from feeding import Fed, backward, compressed, digest, feed
from hypothesis import given
from hypothesis import strategies as st
from saving import lost, totals
from threads import of_all, on_threads
from worlds import Rank, run_threads

from lightning_dist.codecs import (
    CODECS,
    BlockCodec,
    Codec,
    NoCompression,
    Uncompressed,
    after_steps,
    by_name,
    by_size,
    warmup,
)
from lightning_dist.kernels import inductor
from lightning_dist.reducer.plan import flat as flat_plan
from lightning_dist.reducer.plan.slices import ParameterSlice, by_codec, slices_of
from lightning_dist.settings.exchange import ExchangeSettings

# The others look at more than the number of elements, or change with the step.
by_size_alone = [name for name in sorted(CODECS) if name not in ("powersgd", "dgc")]

codecs = st.sampled_from(by_size_alone)

shapes = st.lists(st.integers(1, 100), max_size=4).map(tuple)


def choose(codec: str, shape: tuple[int, ...], step: int = 0, **settings: Any) -> Codec:
    return ExchangeSettings(codec, **settings).policy.for_tensor("p", shape, step=step)


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((64, 64), "int8"),
        ((4095, 1), "none"),
        ((10**6,), "none"),
        ((10, 10, 100, 100), "int8"),
        ((), "none"),
    ],
)
def test_int8_leaves_small_and_1d_tensors(shape: tuple[int, ...], chosen: str) -> None:
    assert choose("int8", shape).name == chosen


@given(codecs, shapes, st.integers(0, 10**6))
def test_the_size_that_is_asked_for_decides(codec: str, shape: tuple[int, ...], least: int) -> None:
    large = math.prod(shape) >= least and len(shape) >= 2
    expected = codec if large or least == 0 else "none"
    assert choose(codec, shape, min_compress_numel=least).name == expected


@given(shapes)
def test_casts_compress_everything_by_default(shape: tuple[int, ...]) -> None:
    for codec in ("fp16", "bf16"):
        assert choose(codec, shape).name == codec


@given(codecs, shapes, st.integers(0, 20), st.integers(0, 20))
def test_before_the_start_step_all_is_as_in_ddp(
    codec: str, shape: tuple[int, ...], start: int, step: int
) -> None:
    """One allreduce a bucket, and not the two-shot exchange that small tensors get later."""
    chosen = choose(codec, shape, step, start_step=start)
    if step < start:
        assert chosen == NoCompression()
    else:
        assert chosen == choose(codec, shape, 10**9, start_step=start)


def test_small_tensors_travel_as_their_neighbours_do() -> None:
    """Beside a block codec they are added by us, in rank order; beside a cast by the ring."""
    assert choose("int8", (5, 2)) == Uncompressed()
    assert choose("fp16", (5, 2), min_compress_numel=100) == NoCompression()


def test_a_bucket_is_sorted_by_codec() -> None:
    """Offsets count the empty parameters' neighbours, not the empty ones."""
    policy = ExchangeSettings("int8").policy
    shapes = [(64, 64), (3,), (0, 5), (128, 64)]
    parameters = [torch.zeros(shape) for shape in shapes]
    names = ["a", "b", "empty", "c"]
    found = by_codec(
        policy,
        slices_of(names, parameters),
        dict(zip(names, shapes, strict=True)),
        step=0,
    )
    assert found == {
        CODECS["int8"](): [ParameterSlice("a", 0, (64, 64)), ParameterSlice("c", 4099, (128, 64))],
        Uncompressed(): [ParameterSlice("b", 4096, (3,))],
    }
    assert all(isinstance(codec, BlockCodec) for codec in found)


FIRST, BIAS, SECOND = 40 * 48, 40, 33 * 50
STEPS = 6
ONLY_LARGE = {"min_compress_numel": 256}
Elements = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    codec: Codec
    uses: Mapping[int, Elements]  # from this step on: elements a codec takes, by its name
    least: int | None = 256  # min_compress_numel

    def at(self, step: int) -> Elements:
        return self.uses[max(first for first in self.uses if first <= step)]


CASES = {
    "by_name": Case(
        by_name("int8", {r"second$": "int4:block_size=64", "second": "fp16"}),
        {0: {"int8": FIRST, "int4": SECOND, "none": BIAS}},
    ),
    "by_name, to none": Case(
        by_name("topk:ratio=0.1,block_size=128", {"^first": "none"}),
        {0: {"topk": SECOND, "none": FIRST + BIAS}},
    ),
    "by_size": Case(
        by_size("int8", min_numel=1700),
        {0: {"int8": FIRST, "none": BIAS + SECOND}},
        least=None,
    ),
    "by_size, whatever min_compress_numel": Case(
        by_size("int8", min_numel=100), {0: {"int8": FIRST + SECOND, "none": BIAS}}, least=1700
    ),
    "by_size, in a rule": Case(
        by_name("int8", {"second": by_size("int4", min_numel=100)}),
        {0: {"int4": SECOND, "none": FIRST + BIAS}},
        least=None,  # int8's own limit is 4096
    ),
    "by_size, everything": Case(
        by_size("bf16", min_numel=0), {0: {"bf16": FIRST + BIAS + SECOND}}, least=None
    ),
    "warmup": Case(
        warmup({0: "none", 2: "int8", 4: "topk:ratio=0.1,block_size=128"}),
        {
            0: {"none": FIRST + BIAS + SECOND},
            2: {"int8": FIRST + SECOND, "none": BIAS},
            4: {"topk": FIRST + SECOND, "none": BIAS},
        },
    ),
    "after_steps": Case(
        after_steps(3, "sign:block_size=64", before="bf16"),
        {0: {"bf16": FIRST + SECOND, "none": BIAS}, 3: {"sign": FIRST + SECOND, "none": BIAS}},
    ),
    "nested": Case(
        warmup({0: "fp16", 1: by_name("int8", {"second": after_steps(4, "powersgd:rank=2")})}),
        {
            0: {"fp16": FIRST + SECOND, "none": BIAS},
            1: {"int8": FIRST, "none": BIAS + SECOND},
            5: {"int8": FIRST, "powersgd": SECOND, "none": BIAS},  # 4 of its own steps later
        },
    ),
}


def raw(stats: Mapping[str, Any]) -> dict[str, float]:
    return {name: count["raw_bytes"] for name, count in stats["per_codec"].items()}


@pytest.mark.parametrize("name", CASES)
@on_threads(2)
def test_the_counters_show_which_codec_was_used_when(rank: Rank, name: str) -> None:
    """In elements, of two ranks, for which a ring sends every byte of a gradient once."""
    case, before = CASES[name], dict[str, float]()
    with compressed(rank, Fed(), case.codec, min_compress_numel=case.least) as (model, reducer):
        for step in range(STEPS):
            gradients = backward(model, feed(rank.rank, step))
            assert len({*of_all(rank, digest(gradients))}) == 1, "replicas"
            after = raw(reducer.comm_stats())
            used = {codec: (after[codec] - before.get(codec, 0)) / 4 for codec in after}
            assert {codec: of for codec, of in used.items() if of} == case.at(step)
            before = after


TOPK, POWERSGD = "topk:ratio=0.1,block_size=128", "powersgd:rank=2"

CHANGES: dict[str, dict[int, str]] = {
    "int8, topk": {0: "int8", 3: TOPK},
    "topk, int4": {0: TOPK, 3: "int4:block_size=64"},
    "powersgd, int8": {0: POWERSGD, 3: "int8"},
    "threshold, powersgd": {0: "threshold:tau=1.5", 3: POWERSGD},
    "randomk, sign": {0: "randomk:ratio=0.25,block_size=64", 3: "sign:block_size=64"},
    "topk, none, topk": {0: TOPK, 2: "none", 4: TOPK},
    "powersgd, int8, powersgd": {0: POWERSGD, 2: "int8", 4: POWERSGD},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_the_residual_of_one_stage_goes_on_in_the_next(name: str, size: int) -> None:
    """sum of outputs + mean residual == sum of mean inputs, over all phases; replicas identical."""
    policy = warmup(CHANGES[name])
    ranks = run_threads(lambda rank: totals(rank, policy, STEPS, **ONLY_LARGE), size)
    assert all(each.digests == ranks[0].digests for each in ranks)
    assert ranks[0].owed.keys() == {"first", "second"}
    for held in ranks[0].owed.values():
        assert held.norm() > 1e-3, "else nothing was lost that could be owed"
    assert lost(ranks) < 1e-9 * size


def test_the_kernels_of_all_stages_are_fused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leaf that can be fused, once a dtype; none while gradients travel."""
    asked: list[str] = []

    def fused_passes(variant: inductor.Variant) -> Mapping[str, Callable[..., None]]:
        asked.append(variant.passes.codec.name)
        return {}

    monkeypatch.setattr(flat_plan, "fused_passes", fused_passes)
    policy = warmup({0: "none", 2: "int8", 4: by_name("bf16", {"second": TOPK, "first": "sign"})})

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        with compressed(rank, Fed(), policy, compile_kernels=True, **ONLY_LARGE) as (model, _):
            rank.barrier.wait()
            before = sorted(asked)
            rank.barrier.wait()
            for step in range(STEPS):
                backward(model, feed(rank.rank, step))
            rank.barrier.wait()
            return before, sorted(asked)

    leaves: Iterable[str] = ("bf16", "int8", "sign", "topk")
    for before, after in run_threads(body, 2):
        assert before == sorted([*leaves, *leaves])
        assert after == before
