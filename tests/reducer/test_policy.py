"""Which codec a tensor gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.codecs import CODECS, NoCompression, Uncompressed
from lightning_dist.reducer.policy import Slot, choose_codec, compression_is_on
from lightning_dist.settings import Settings

codecs = st.sampled_from(sorted(CODECS))
slots = st.builds(Slot, st.just("p"), st.just(0), st.integers(1, 10**6), st.integers(0, 4))


def choose(codec: str, numel: int, ndim: int, step: int = 0, **settings: Any) -> str:
    slot = Slot("p", 0, numel, ndim)
    return choose_codec(Settings.check(codec, **settings), slot, step=step).name


@pytest.mark.parametrize(
    ("numel", "ndim", "chosen"),
    [(4096, 2, "int8"), (4095, 2, "none"), (10**6, 1, "none"), (10**6, 4, "int8"), (1, 0, "none")],
)
def test_int8_leaves_small_and_1d_tensors(numel: int, ndim: int, chosen: str) -> None:
    assert choose("int8", numel, ndim) == chosen


@given(codecs, slots, st.integers(0, 10**6))
def test_the_size_that_is_asked_for_decides(codec: str, slot: Slot, least: int) -> None:
    settings = Settings.check(codec, min_compress_numel=least)
    large = slot.numel >= least and slot.ndim >= 2
    expected = codec if large or least == 0 else "none"
    assert choose_codec(settings, slot, step=0).name == expected


@given(codecs, slots)
def test_zero_compresses_everything(codec: str, slot: Slot) -> None:
    settings = Settings.check(codec, min_compress_numel=0)
    assert choose_codec(settings, slot, step=0) is settings.codec


@given(slots)
def test_casts_compress_everything_by_default(slot: Slot) -> None:
    for codec in ("fp16", "bf16"):
        assert choose_codec(Settings.check(codec), slot, step=0).name == codec


@given(codecs, slots, st.integers(0, 20), st.integers(0, 20))
def test_before_the_start_step_all_is_as_in_ddp(
    codec: str, slot: Slot, start: int, step: int
) -> None:
    """One allreduce a bucket, and not the two-shot exchange that small tensors get later."""
    settings = Settings.check(codec, start_step=start)
    assert compression_is_on(settings, step=step) == (step >= start)
    if step < start:
        assert choose_codec(settings, slot, step=step) == NoCompression()
    else:
        assert choose_codec(settings, slot, step=step) == choose_codec(settings, slot, step=10**9)


def test_small_tensors_travel_as_their_neighbours_do() -> None:
    """Beside a block codec they are added by us, in rank order; beside a cast by the ring."""
    small = Slot("p", 0, 10, 2)
    beside_int8 = choose_codec(Settings.check("int8"), small, step=0)
    beside_fp16 = choose_codec(Settings.check("fp16", min_compress_numel=100), small, step=0)
    assert beside_int8 == Uncompressed()
    assert beside_fp16 == NoCompression()
    assert type(beside_fp16) is not type(beside_int8)


def test_error_feedback_is_on_where_the_codec_needs_it() -> None:
    chosen = {codec: Settings.check(codec).error_feedback for codec in CODECS}
    assert chosen == {"none": False, "fp16": False, "bf16": False, "int8": True}
    assert Settings.check("fp16", error_feedback=True).error_feedback
    assert not Settings.check("int8", error_feedback=False).error_feedback
