"""Bytes that are kept and sent: formulas, what is promised, reserved and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from feeding import FakeBucket, Fed, backward, compressed, digest, feed, held, residuals
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, after_steps, resolve_codec
from lightning_dist.codecs.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.measurement.expected import expected_traffic, first_compressed_step
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import CommStats
from lightning_dist.reducer.units import sizes
from lightning_dist.settings import Settings

Wish = bool | Literal["auto"]
TABLE: list[tuple[str, Wish, Memory]] = [
    ("none", "auto", NoMemory()),
    ("none", True, NoMemory()),
    ("fp16", "auto", NoMemory()),
    ("fp16", True, ErrorFeedback()),
    ("bf16", "auto", NoMemory()),
    ("int8", "auto", ErrorFeedback()),
    ("int8", False, NoMemory()),
    ("int4", "auto", ErrorFeedback()),
    ("fp8", "auto", ErrorFeedback()),
    ("sign", "auto", ErrorFeedback()),
    ("qsgd", "auto", NoMemory()),
    ("terngrad", "auto", NoMemory()),
    ("topk", "auto", ErrorFeedback()),
    ("topk", False, NoMemory()),
    ("randomk", "auto", ErrorFeedback()),
    ("randomk:unbiased=true", "auto", NoMemory()),
    ("threshold", "auto", ErrorFeedback()),
    ("powersgd", "auto", ErrorFeedback()),
    ("powersgd", False, NoMemory()),
    ("dgc", "auto", MomentumCorrection(0.9)),
    ("dgc:momentum=0.5", "auto", MomentumCorrection(0.5)),
    ("dgc:momentum=0.5", True, MomentumCorrection(0.5)),
    ("dgc:momentum=0", "auto", ErrorFeedback()),
]


@pytest.mark.parametrize(("codec", "wish", "expected"), TABLE)
def test_the_memory_of_a_codec(codec: str, wish: Wish, expected: Memory) -> None:
    assert resolve_codec(codec).memory(wish) == expected


def test_every_codec_is_in_the_table() -> None:
    assert {name.partition(":")[0] for name, wish, _ in TABLE if wish == "auto"} == {*CODECS}


WITH_STATE = ["int8", "dgc:ratio=0.1,block_size=128", "threshold:tau=1.5", "qsgd:block_size=64"]


@pytest.mark.parametrize(
    "layout",
    [
        flat(2),
        flat(3),
        Layout(PAIRS),
        Layout(UNEVEN),
        pytest.param(Layout(HOSTS_OF_FOUR), marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_threads("layout")
def test_the_first_step_allocates_no_residual(rank: Rank, layout: Layout) -> None:
    for codec in WITH_STATE:
        with compressed(rank, Fed(), codec, min_compress_numel=0, **layout.form) as (m, red):
            before = {name: of.shape for name, of in residuals(red).items()}
            nbytes = red.memory()["residual_bytes"]
            backward(m, feed(rank.rank, 0))
            assert {name: of.shape for name, of in residuals(red).items()} == before
            assert red.memory()["residual_bytes"] == nbytes
            assert bool(before) is not codec.startswith("qsgd")


@on_threads(2)
def test_those_of_later_phases_wait_for_them(rank: Rank) -> None:
    with compressed(rank, Fed(), min_compress_numel=0, start_step=1) as (model, reducer):
        for step in range(2):
            assert reducer.memory()["residual_bytes"] == 0
            backward(model, feed(rank.rank, step))
        assert reducer.memory()["residual_bytes"] > 0


@pytest.mark.parametrize("layout", [flat(2), Layout(PAIRS)], ids=str)
@on_threads("layout")
def test_a_state_that_is_loaded_is_in_its_place(rank: Rank, layout: Layout) -> None:
    settings: dict[str, Any] = {"min_compress_numel": 0, **layout.form}
    with compressed(rank, Fed(), **settings) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        state = of_all(rank, reducer.state_dict())[0]
        kept, nbytes = digest(held(reducer)), reducer.memory()["residual_bytes"]
    with compressed(rank, Fed(), **settings) as (model, reducer):
        reducer.load_state_dict(state)
        assert reducer.memory()["residual_bytes"] == nbytes
        assert digest(held(reducer)) == kept


EVERY_SIZE = {
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
@on_threads("layout")
def test_the_bytes_of_a_step(rank: Rank, layout: Layout) -> None:
    for codec in (*EVERY, LATE):
        with compressed(rank, Fed(EVERY_SIZE), codec, **layout.form) as (model, reducer):
            expected = expected_traffic(reducer.names, reducer.settings, reducer.network)
            counted = []
            for step in range(3):
                backward(model, feed(rank.rank, step, EVERY_SIZE))
                counted.append(reducer.comm_stats())
        keys = ("raw_bytes", "intra_bytes", "inter_bytes")
        # Of two steps: what powersgd sends alternates.
        last = {key: (counted[2][key] - counted[0][key]) / 2 for key in keys}
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
@on_threads("size")
def test_bytes_of_a_step_equal_the_formulas(rank: Rank, codec: str, size: int) -> None:
    raw, wire = ring(WEIGHT * ITEM, size) + ring(BIAS * ITEM, size), WIRE[codec](size)
    with compressed(rank, Fed(SHAPES), codec) as (model, reducer):
        for step in range(2):
            backward(model, feed(rank.rank, step, SHAPES))
        stats = reducer.comm_stats()
    assert stats["steps"] == 2
    last = stats["last_step"]
    assert abs(last["raw_bytes"] - raw) <= 1  # rounded for each group or for both
    assert last["wire_bytes"] == wire
    assert stats["wire_bytes"] == 2 * wire
    assert stats["ratio"] == stats["raw_bytes"] / stats["wire_bytes"]
    assert last["intra_bytes"] == wire, "threads are on one host"
    assert last["inter_bytes"] == 0


@on_threads(2)
def test_codecs_are_counted_separately(rank: Rank) -> None:
    """Small tensors beside int8 show up as `none`; the parts add up to the whole."""
    with compressed(rank, Fed(SHAPES), start_step=1) as (model, reducer):
        for step in range(3):
            backward(model, feed(rank.rank, step, SHAPES))
        stats = reducer.comm_stats()
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
