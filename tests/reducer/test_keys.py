"""Where the randomness of a stochastic codec comes from, and what cannot change it."""

from itertools import product
from typing import Any

import pytest
import torch
from feeding import Fed, backward, compressed, digest, feed
from saving import train
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank

from lightning_dist.codecs import QSGD, BlockCodec, TernGrad
from lightning_dist.reducer.units.tiles import Grid, Tile, UnitKeys

CODEC = QSGD(block_size=64)


def drawn(*names: str, codec: BlockCodec = CODEC, rank: int = 0, step: int = 0) -> UnitKeys:
    """Of whole parameters of three rows of four blocks, one after the other in a unit."""
    (span,) = Grid(3 * 4 * 64, 3, 64).spans(10**6)
    numbers, nothing = span.numbers(torch.device("cpu")), torch.empty(0)
    columns = [slice(4 * i, 4 * i + 4) for i in range(len(names))]
    tiles = [Tile(n, nothing, (), at, numbers) for n, at in zip(names, columns, strict=True)]
    keys = UnitKeys(codec, tiles, rank=rank)
    keys.draw(step)
    return keys


def different(a: Tensor, b: Tensor) -> bool:
    """Not one key in common, in any place."""
    return set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())


@pytest.mark.parametrize(
    "other",
    [
        {"step": 1},
        {"rank": 1},
        {"codec": QSGD(block_size=64, bits=8)},
        {"codec": TernGrad(block_size=64)},
    ],
    ids=["step", "rank", "option", "codec"],
)
def test_keys_depend_on(other: dict[str, Any]) -> None:
    first, second = drawn("weight"), drawn("weight", **other)
    assert first.encode.unique().numel() == first.encode.numel(), "every block has its own"
    assert different(first.encode, second.encode)
    assert different(first.reduce, second.reduce)


def test_keys_depend_on_the_parameter() -> None:
    keys = drawn("weight", "other")
    assert different(keys.encode[:, :4], keys.encode[:, 4:])
    assert different(keys.reduce[:, :4], keys.reduce[:, 4:])


def test_the_mean_is_rounded_with_other_keys_than_what_is_sent() -> None:
    for rank in range(3):
        keys = drawn("weight", rank=rank)
        assert keys.reduce.shape == (1, 4, 1)
        assert different(keys.reduce, keys.encode)


def test_every_owner_rounds_its_own_blocks() -> None:
    of_ranks = [drawn("weight", rank=rank).reduce for rank in range(3)]
    assert torch.stack(of_ranks).unique().numel() == 12


DIVIDED, WHOLE = {"bucket_cap_mb": 0.004}, {"bucket_cap_mb": 25}


def path(rank: Rank, codec: str, buckets: dict[str, float]) -> list[str]:
    digests = []
    with compressed(rank, Fed(), codec, min_compress_numel=256, ddp=buckets) as (model, _):
        for step in range(4):
            gradients = backward(model, feed(rank.rank, step))
            digests.append(digest([gradients[name] for name in sorted(gradients)]))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert (len(sizes) > 1) == (buckets is DIVIDED)
    return digests


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        *product(["qsgd:block_size=64", "terngrad:block_size=64"], [2, 3]),
        ("randomk:ratio=0.25,block_size=64", 2),  # more ranks add in the order of a ring
    ],
)
@on_threads("size")
def test_other_buckets_give_the_same_bits(rank: Rank, codec: str, size: int) -> None:
    whole = path(rank, codec, WHOLE)
    assert path(rank, codec, DIVIDED) == whole
    assert len({*whole}) == 4


@pytest.mark.parametrize("codec", ["qsgd:block_size=64", "terngrad:block_size=64"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_restart_gives_the_same_bits_whatever_the_buckets(codec: str, size: int) -> None:
    """The step is counted over the restart, and that is all of the state there is."""
    whole = train(size, range(4), codec=codec, ddp=DIVIDED)
    state = train(size, range(2), codec=codec, ddp=DIVIDED).state
    assert state == {"version": 1, "world_size": size, "step": 2, "strides": {}, "residuals": {}}
    resumed = train(size, range(2, 4), state, codec=codec, ddp=WHOLE)
    assert resumed.digests == [digests[2:] for digests in whole.digests]
    forgot = train(size, range(2, 4), {**state, "step": 0}, codec=codec, ddp=WHOLE)
    assert forgot.digests != resumed.digests, "else the step does not matter"


def repeated(rank: Rank, codec: str) -> list[Tensor]:
    """Two steps of the same gradients on every rank."""
    with compressed(rank, Fed(), codec, min_compress_numel=256, error_feedback=False) as (model, _):
        return [backward(model, feed(0, 0))["first"] for _ in range(2)]


@on_threads(2)
def test_equal_gradients_are_rounded_otherwise_at_every_step_and_on_every_rank(rank: Rank) -> None:
    """Two ranks: where they round differently the mean lies between two levels."""
    first, second = repeated(rank, "qsgd:bits=2,block_size=64")
    assert not torch.equal(first, second)
    levels = [block.abs().unique().numel() for block in first.flatten().split(64)]
    assert levels == [3] * 30  # 0, half a step, a step


@on_threads(3)
def test_randomk_sends_the_same_places_on_all_ranks(rank: Rank) -> None:
    """And other ones at the next step."""
    steps = repeated(rank, "randomk:ratio=0.25,block_size=64")
    assert len({*of_all(rank, digest(steps))}) == 1
    chosen = [sent.view(-1, 64) != 0 for sent in steps]
    assert all((places.sum(1) == 16).all() for places in chosen)
    assert not torch.equal(*chosen)
