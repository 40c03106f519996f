"""Bytes that are promised before the first step are those that a step sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from feeding import Fed, backward, compressed, feed
from layouts import Layout, flat
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, Codec, after_steps
from lightning_dist.measurement.expected import Expected, expected_traffic, first_compressed_step
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.units import sizes
from lightning_dist.settings import Settings

SHAPES = {
    "weight": (64, 256),
    "bias": (256,),
    "other": (96, 100),
    "large": (256, 300),
    "same": (256, 300),
    "scale": (3,),
}
# Threshold: bytes that the gradients decide are not promised. Of a schedule the last stage counts.
LATE = after_steps(1, "int8")
EVERY = ["dgc:warmup_steps=0" if name == "dgc" else name for name in CODECS]
LAYOUTS = [
    flat(2),
    pytest.param(flat(3), marks=pytest.mark.slow),
    pytest.param(flat(4), marks=pytest.mark.slow),
    Layout([[0, 1], [2, 3]]),
    Layout([[0, 1, 2], [3, 4]], True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_bytes_of_a_step(layout: Layout) -> None:
    codecs: list[str | Codec] = [*EVERY, LATE]

    def body(rank: Rank) -> list[tuple[Expected, Any]]:
        given, found = [feed(rank.rank, step, SHAPES) for step in range(3)], []
        for codec in codecs:
            with compressed(rank, Fed(SHAPES), codec, **layout.form) as (model, reducer):
                expected = expected_traffic(reducer.names, reducer.settings, reducer.network)
                counted = []
                for gradients in given:
                    backward(model, gradients)
                    counted.append(reducer.comm_stats())
            keys = ("raw_bytes", "intra_bytes", "inter_bytes")
            # Of two steps: what powersgd sends alternates.
            last = {key: (counted[2][key] - counted[0][key]) / 2 for key in keys}
            found.append((expected, last))
        return found

    for ranks in run_threads(body, layout.size):
        for codec, (expected, last) in zip(codecs, ranks, strict=True):
            assert expected.raw == pytest.approx(last["raw_bytes"], rel=0.05), codec
            assert expected.since == (1 if codec == LATE else 0)
            if codec == "threshold":
                assert expected.sent is None
                continue
            assert expected.sent is not None
            assert expected.sent.intra == pytest.approx(last["intra_bytes"], rel=0.05), codec
            assert expected.sent.inter == pytest.approx(last["inter_bytes"], rel=0.05), codec


def test_on_accelerators_whole_buckets_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a host all shares of a bucket are padded to the largest."""
    tree, shapes = [[0, 1], [2, 3]], {"weight": (700, 1)}

    def body(rank: Rank) -> tuple[Reducer, Any]:
        with compressed(rank, Fed(shapes), min_compress_numel=0, tree=tree) as (model, reducer):
            backward(model, feed(rank.rank, 0, shapes))
            return reducer, reducer.comm_stats()

    with monkeypatch.context() as whole_buckets:
        whole_buckets.setattr(sizes, "UNIT_ELEMENTS", sizes.WHOLE_BUCKET)
        ranks = run_threads(body, 4)
    for reducer, counted in ranks:
        network = replace(reducer.network, device=torch.device("cuda"))
        expected = expected_traffic(reducer.names, reducer.settings, network)
        assert expected.sent is not None
        assert expected.sent.intra == counted["intra_bytes"]
        assert expected.sent.inter == counted["inter_bytes"]


@pytest.mark.parametrize(
    ("codec", "first"), [("int8", 0), ("none", None), (after_steps(7, "int8"), 7)], ids=str
)
def test_when_compression_begins(codec: Any, first: int | None) -> None:
    policy = Settings.check(codec, min_compress_numel=0).policy
    assert first_compressed_step(policy, {"weight": (8, 8)}) == first


def test_a_model_that_is_too_small_never_begins() -> None:
    assert first_compressed_step(Settings.check("int8").policy, {"weight": (8, 8)}) is None
