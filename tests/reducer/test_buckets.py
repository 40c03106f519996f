"""Contracts 4 and 5: buckets and units are transport. They change neither bits nor state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, feed, residuals, step_digest
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import Int8
from lightning_dist.reducer.units import sizes

SHAPES = {
    "a": (40, 48),
    "bias": (40,),
    "b": (33, 50),
    "c": (3, 700),
    "d": (16, 16),
    "scale": (7,),
}


@dataclass
class Result:
    digests: list[str]  # of gradients and residuals after every step
    buckets: tuple[int, int]  # before and after DDP rebuilt them
    residual: Tensors


def run(rank: Rank, *, cap_mb: float, steps: int = 5, codec: str = "int8") -> Result:
    settings = {"min_compress_numel": 200, "error_feedback": True, "ddp": {"bucket_cap_mb": cap_mb}}
    digests = []
    with compressed(rank, Fed(SHAPES), codec, **settings) as (model, reducer):
        for step in range(steps):
            gradients = backward(model, feed(rank.rank, step, SHAPES))
            digests.append(step_digest(gradients, reducer))
        return Result(digests, buckets(model), residuals(reducer))


def buckets(model: DistributedDataParallel) -> tuple[int, int]:
    """How many buckets DDP started with and went on with."""
    facts = model._get_ddp_logging_data()
    assert facts["has_rebuilt_buckets"], "DDP did not rebuild its buckets"
    first, later = facts["bucket_sizes"], facts["rebuilt_bucket_sizes"]
    return len(first.split(",")), len(later.split(","))


@pytest.mark.parametrize("size", [2, 3])
def test_state_and_bits_survive_rebuilt_buckets(size: int) -> None:
    """The residual of each parameter goes on, whichever buckets it travels in."""
    small = run_threads(lambda rank: run(rank, cap_mb=0.004), size)
    assert small[0].buckets[1] > 2
    large = run_threads(lambda rank: run(rank, cap_mb=25), size)
    assert large[0].buckets == (1, 1)
    assert [result.digests for result in small] == [result.digests for result in large]
    assert set(small[0].residual) == {"a", "b", "c", "d"}
    assert all(r.any() for r in small[0].residual.values())


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two blocks of 256 travel together, where usually a megabyte does."""
    monkeypatch.setattr(sizes, "UNIT_ELEMENTS", 512)
    monkeypatch.setattr(sizes, "_LEAST_ROW_ELEMENTS", 1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_do_not_change_bits(size: int, request: pytest.FixtureRequest) -> None:
    whole = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=3), size)
    request.getfixturevalue("tiny_chunks")
    cut = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=3), size)
    assert [result.digests for result in cut] == [result.digests for result in whole]


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize(("size", "codec"), [(2, "int8"), (3, "int8"), (4, "int8"), (3, "fp16")])
def test_many_buckets_and_chunks_do_not_deadlock(size: int, codec: str) -> None:
    """All collectives come in one order on every rank, however the threads are scheduled."""
    ranks = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=7, codec=codec), size)
    assert ranks[0].buckets[1] > 2
    assert all(len(result.digests) == 7 for result in ranks)


@pytest.mark.usefixtures("tiny_chunks")
def test_a_chunk_is_not_larger_than_asked() -> None:
    """Otherwise the tests above say nothing."""

    def body(rank: Rank) -> list[int]:
        module = Fed(SHAPES)
        with compressed(rank, module, Int8(block_size=64), min_compress_numel=0) as (
            model,
            reducer,
        ):
            backward(model, feed(rank.rank, 0, SHAPES))
            groups = reducer._plans.groups()
            return [
                sum(tile.grad.shape[1] for tile in unit.tiles) * 64
                for group in groups
                for unit in group.units
            ]

    sizes = run_threads(body, 2)[0]
    assert len(sizes) >= 7
    assert max(sizes) <= 512


def test_empty_parameters_are_left_alone() -> None:
    """A parameter without elements has no payload and no residual."""

    def body(rank: Rank) -> tuple[list[str], torch.Size]:
        shapes = {"w": (20, 20), "empty": (0, 5)}
        with compressed(rank, Fed(shapes), min_compress_numel=0) as (model, reducer):
            gradients = backward(model, feed(rank.rank, 0, shapes))
            return list(reducer.residuals), gradients["empty"].shape

    assert run_threads(body, 2) == [(["w"], torch.Size([0, 5]))] * 2
