"""Which codec a tensor gets under the settings; the combinators alone are in tests/codecs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.codecs import CODECS, BlockCodec, Codec, NoCompression, Uncompressed
from lightning_dist.codecs.memory import ErrorFeedback, MomentumCorrection, NoMemory
from lightning_dist.reducer.plan.slices import ParameterSlice, by_codec, slices_of
from lightning_dist.settings import Settings

# The others look at more than the number of elements, or change with the step.
by_size_alone = [name for name in sorted(CODECS) if name not in ("powersgd", "dgc")]
codecs = st.sampled_from(by_size_alone)
shapes = st.lists(st.integers(1, 100), max_size=4).map(tuple)


def choose(codec: str, shape: tuple[int, ...], step: int = 0, **settings: Any) -> Codec:
    return Settings.check(codec, **settings).policy.for_tensor("p", shape, step=step)


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


@given(codecs, shapes)
def test_zero_compresses_everything(codec: str, shape: tuple[int, ...]) -> None:
    settings = Settings.check(codec, min_compress_numel=0)
    assert settings.policy.for_tensor("p", shape, step=0) is settings.codec


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
    assert type(choose("int8", (5, 2))) is not type(choose("fp16", (5, 2), min_compress_numel=100))


def test_error_feedback_is_on_where_the_codec_needs_it() -> None:
    chosen = {name: type(make().memory("auto")) for name, make in CODECS.items()}
    none = {"none", "fp16", "bf16", "qsgd", "terngrad"}
    expected = {name: NoMemory if name in none else ErrorFeedback for name in CODECS}
    assert chosen == expected | ({"dgc": MomentumCorrection} if "dgc" in CODECS else {})
    assert CODECS["fp16"]().memory(True) == ErrorFeedback()
    assert CODECS["int8"]().memory(False) == NoMemory()
    assert CODECS["none"]().memory(True) == NoMemory()


def test_a_bucket_is_sorted_by_codec() -> None:
    """Offsets count the empty parameters' neighbours, not the empty ones."""
    policy = Settings.check("int8").policy
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
