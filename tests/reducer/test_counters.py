"""Contract 6: every byte is counted. The expected numbers are worked out by hand here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from feeding import FakeBucket, Fed, backward, compressed, feed
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import CommStats
from lightning_dist.settings import Settings

WEIGHT, BIAS = 64 * 256, 256  # 64 blocks; 1-D, so that int8 leaves it uncompressed
SHAPES = {"weight": (64, 256), "bias": (256,)}
ITEM = 4


def ring(nbytes: int, size: int) -> int:
    return 2 * (size - 1) * nbytes // size


def int8_wire(size: int) -> int:
    """Rows of whole blocks, each of 256 codes and a 2-byte scale, scales padded to 8 bytes."""
    rows = 1 if size == 2 else size  # two ranks swap whole payloads, more own a shard each
    blocks = -(-64 // rows)
    row = -(-2 * blocks // 8) * 8 + 256 * blocks
    shard = -(-BIAS // rows) * ITEM
    row_of_bias = -(-shard // 8) * 8
    rounds = 1 if size == 2 else 2
    return rounds * (size - 1) * (row + row_of_bias)


WIRE = {
    "none": lambda size: ring((WEIGHT + BIAS) * ITEM, size),
    "fp16": lambda size: ring((WEIGHT + BIAS) * 2, size),
    "bf16": lambda size: ring((WEIGHT + BIAS) * 2, size),
    "int8": int8_wire,
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", WIRE)
def test_bytes_of_a_step_equal_the_formulas(codec: str, size: int) -> None:
    def body(rank: Rank) -> Mapping[str, Any]:
        with compressed(rank, Fed(SHAPES), codec) as (model, reducer):
            for step in range(2):
                backward(model, feed(rank.rank, step, SHAPES))
            return reducer.comm_stats()

    raw, wire = ring(WEIGHT * ITEM, size) + ring(BIAS * ITEM, size), WIRE[codec](size)
    for stats in run_threads(body, size):
        assert stats["steps"] == 2
        last = stats["last_step"]
        assert abs(last["raw_bytes"] - raw) <= 1  # rounded for each group or for both
        assert last["wire_bytes"] == wire
        assert stats["wire_bytes"] == 2 * wire
        assert stats["ratio"] == stats["raw_bytes"] / stats["wire_bytes"]
        assert last["intra_bytes"] == wire, "threads are on one host"
        assert last["inter_bytes"] == 0


def test_int8_sends_about_a_quarter() -> None:
    def body(rank: Rank) -> Mapping[str, Any]:
        with compressed(rank, Fed({"w": (64, 256)})) as (model, reducer):
            backward(model, feed(rank.rank, 0, {"w": (64, 256)}))
            return reducer.comm_stats()

    for stats in run_threads(body, 2):
        assert stats["ratio"] == pytest.approx(4 / (1 + 2 / 256))
        assert stats["ratio"] == pytest.approx(3.97, abs=0.005)


def test_codecs_are_counted_separately() -> None:
    """Small tensors beside int8 show up as `none`; the parts add up to the whole."""

    def body(rank: Rank) -> Mapping[str, Any]:
        with compressed(rank, Fed(SHAPES), start_step=1) as (model, reducer):
            for step in range(3):
                backward(model, feed(rank.rank, step, SHAPES))
            return reducer.comm_stats()

    for stats in run_threads(body, 2):
        parts = stats["per_codec"]
        assert set(parts) == {"none", "int8"}
        assert parts["int8"]["raw_bytes"] == 2 * WEIGHT * ITEM
        assert parts["none"]["raw_bytes"] == (WEIGHT + BIAS) * ITEM + 2 * BIAS * ITEM
        for key in ("raw_bytes", "wire_bytes", "intra_bytes", "inter_bytes"):
            assert sum(part[key] for part in parts.values()) == stats[key]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_bytes_that_leave_the_host_are_counted_separately(ranks_per_host: int) -> None:
    """Two-shot on 2 hosts x 2: two thirds of the shards leave, the ring at its last rank only."""

    def body(rank: Rank) -> Mapping[str, Any]:
        weight = torch.zeros(64, 256)
        names: dict[Tensor, str] = {weight: "weight"}
        reducer = Reducer(names, settings=Settings.check("int8"), network=rank.network())
        try:
            DDPBuckets(reducer).reduce(FakeBucket(torch.zeros(WEIGHT), [weight])).wait()
            return reducer.comm_stats()
        finally:
            reducer.close()

    row = 16 * 2 + 16 * 256
    for rank, stats in enumerate(run_threads(body, 4, ranks_per_host=ranks_per_host)):
        alone = ranks_per_host == 1
        ring_leaves = alone or rank % 2 == 1
        assert stats["inter_bytes"] == (3 if alone else 2) * row + 3 * row * ring_leaves
        assert stats["intra_bytes"] == 6 * row - stats["inter_bytes"]


def test_before_the_first_step_there_is_nothing() -> None:
    stats = CommStats().as_mapping()
    assert (stats["steps"], stats["wire_bytes"], stats["ratio"]) == (0, 0, 1.0)
