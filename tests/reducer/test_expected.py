"""Bytes that are promised before the first step are those that a step sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from feeding import Fed, backward, compressed, feed
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, after_steps
from lightning_dist.reducer.expected import Expected, expected_traffic, first_compressed_step
from lightning_dist.settings import Settings

SHAPES = {
    "weight": (64, 256),
    "bias": (256,),
    "other": (96, 100),
    "large": (256, 300),
    "same": (256, 300),
    "scale": (3,),
}
WITHOUT_WARMUP = {"dgc": "dgc:warmup_steps=0"}
FLAT: list[tuple[int, Any]] = [(size, None) for size in (2, 3, 4)]
LEVELS: list[tuple[int, Any]] = [(4, [[0, 1], [2, 3]]), (5, [[0, 1, 2], [3, 4]])]


def measured(codec: Any, size: int, tree: Sequence[Any] | None) -> list[tuple[Expected, Any]]:
    def body(rank: Rank) -> tuple[Expected, Any]:
        leader = size == 5  # of hosts with different numbers of ranks
        with compressed(rank, Fed(SHAPES), codec, tree=tree, leader=leader) as (model, reducer):
            expected = expected_traffic(reducer.names, reducer.settings, reducer.network)
            counted = []
            for step in range(4):
                backward(model, feed(rank.rank, step, SHAPES))
                counted.append(reducer.comm_stats())
            keys = ("raw_bytes", "intra_bytes", "inter_bytes")
            # Of two steps: what powersgd sends alternates.
            return expected, {key: (counted[3][key] - counted[1][key]) / 2 for key in keys}

    return run_threads(body, size)


@pytest.mark.parametrize(("size", "tree"), FLAT + LEVELS, ids=str)
@pytest.mark.parametrize(
    "codec", [WITHOUT_WARMUP.get(name, name) for name in CODECS if name != "threshold"]
)
def test_the_bytes_of_a_step(codec: str, size: int, tree: Sequence[Any] | None) -> None:
    for expected, last in measured(codec, size, tree):
        assert expected.sent is not None
        assert expected.raw == pytest.approx(last["raw_bytes"], rel=0.05)
        assert expected.sent.intra == pytest.approx(last["intra_bytes"], rel=0.05)
        assert expected.sent.inter == pytest.approx(last["inter_bytes"], rel=0.05)


def test_bytes_that_the_gradients_decide_are_not_promised() -> None:
    for expected, _ in measured("threshold", 2, None):
        assert expected.sent is None
        assert expected.raw > 0


def test_the_last_stage_counts() -> None:
    for expected, last in measured(after_steps(2, "int8"), 2, None):
        assert expected.since == 2
        assert expected.sent is not None
        assert expected.sent.total == pytest.approx(
            last["intra_bytes"] + last["inter_bytes"], rel=0.05
        )


@pytest.mark.parametrize(
    ("codec", "first"), [("int8", 0), ("none", None), (after_steps(7, "int8"), 7)], ids=str
)
def test_when_compression_begins(codec: Any, first: int | None) -> None:
    policy = Settings.check(codec, min_compress_numel=0).policy
    assert first_compressed_step(policy, {"weight": (8, 8)}) == first


def test_a_model_that_is_too_small_never_begins() -> None:
    assert first_compressed_step(Settings.check("int8").policy, {"weight": (8, 8)}) is None
