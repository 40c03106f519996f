"""A user's loader, made elastic: the same but for whose samples it yields."""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing import forkserver, get_context
from typing import Any

import pytest
import torch
from streaming import Numbers, Rank, Squares, as_list
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.elastic.data.plan import BatchPolicy, EpochPlan, Layout, Position
from lightning_dist.elastic.data.sharding import DataShards, LoaderFacts, NotExactError, facts_of
from lightning_dist.elastic.progress import ElasticState

LAYOUT = Layout(world_size=2, micro_batch=3, accumulate=2, global_batch=10)
SIZE = 27  # two steps and a tail of 7: passes of 3, 2 | 3, 2 | 2, 2 (or 2, 1) samples


class Tagged(DataLoader[Any]):
    """A class of the user's, with something of its own."""

    tag = "mine"


def squares(**options: Any) -> DataLoader[Any]:
    return Tagged(Squares(SIZE), batch_size=3, collate_fn=as_list, **options)


def numbers(**options: Any) -> DataLoader[Any]:
    return Tagged(Numbers(SIZE), batch_size=3, collate_fn=as_list, **options)


def squares_of(rank: Rank) -> list[list[int]]:
    return [[p * p for p in positions] for positions in rank.expected()]


def numbers_of(rank: Rank) -> list[list[int]]:
    first = 1000 * rank.cursor.begin.epoch
    return [[first + p for p in positions] for positions in rank.expected()]


KINDS = pytest.mark.parametrize(
    ("make", "expected"), [(squares, squares_of), (numbers, numbers_of)], ids=["map", "stream"]
)
Make = Callable[..., DataLoader[Any]]
Expected = Callable[[Rank], list[list[int]]]


@KINDS
@pytest.mark.parametrize(("rank", "workers", "stay"), [(0, 0, False), (1, 1, False), (1, 2, True)])
def test_each_rank_gets_its_share(
    make: Make, expected: Expected, rank: int, workers: int, stay: bool
) -> None:
    one = Rank(LAYOUT, rank, SIZE)
    loader = one.shard(make(num_workers=workers, persistent_workers=stay))
    for epoch in range(2):
        one.go_to(epoch)
        assert list(loader) == expected(one)
        assert len(loader) == 6
    one.resume(samples=20, steps=2)
    assert list(loader) == expected(one)
    assert len(expected(one)) == 2


@KINDS
def test_the_users_loader_is_as_it_was(make: Make, expected: Expected) -> None:
    loader = make()
    samples = len(list(loader))
    before = dict(vars(loader))
    list(Rank(LAYOUT, 0, SIZE).shard(loader))
    assert vars(loader) == before
    assert len(list(loader)) == samples


@KINDS
def test_the_rest_of_it_stays(make: Make, expected: Expected) -> None:
    def init(worker: int) -> None:
        raise AssertionError("never started")

    loader = make(num_workers=2, prefetch_factor=5, timeout=7, worker_init_fn=init)
    loader.own = "too"
    copied = Rank(LAYOUT, 0, SIZE).shard(loader)
    assert type(copied) is Tagged
    names = ("tag", "own", "num_workers", "prefetch_factor", "timeout", "worker_init_fn")
    for name in (*names, "collate_fn", "pin_memory", "multiprocessing_context"):
        assert getattr(copied, name) is getattr(loader, name)
    inner: Any = copied.dataset
    assert loader.dataset in (inner, getattr(inner, "dataset", None))


@KINDS
def test_a_loader_in_use_is_not_used_up(make: Make, expected: Expected) -> None:
    loader = make(num_workers=1, persistent_workers=True)
    next(iter(loader))
    one = Rank(LAYOUT, 0, SIZE)
    assert list(one.shard(loader)) == expected(one)


@KINDS
def test_workers_that_are_started_afresh(make: Make, expected: Expected) -> None:
    """They are given everything by pickle, as by ``spawn``, and torch is imported once."""
    afresh = get_context("forkserver")
    afresh.set_forkserver_preload(["torch"])
    one = Rank(LAYOUT, 1, SIZE)
    loader = one.shard(make(num_workers=1, multiprocessing_context=afresh))
    one.go_to(1)
    one.resume(samples=10, steps=1)
    try:
        assert list(loader) == expected(one)
    finally:
        forkserver._forkserver._stop()  # it would stay until this process ends


@KINDS
def test_the_training_draws_the_same_numbers(make: Make, expected: Expected) -> None:
    loader = Rank(LAYOUT, 0, SIZE).shard(make())
    before = torch.random.get_rng_state()
    list(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_shuffled_samples_are_each_seen_once() -> None:
    ranks = [Rank(LAYOUT, rank, SIZE) for rank in range(2)]
    loaders = [one.shard(squares(shuffle=True)) for one in ranks]
    epochs = []
    for epoch in range(2):
        for one in ranks:
            one.go_to(epoch)
        epochs.append([sample for each in loaders for batch in each for sample in batch])
        assert sorted(epochs[-1]) == [p * p for p in range(SIZE)]
    assert epochs[0] != epochs[1]


def test_a_trainer_finds_a_sampler_to_tell_the_epoch() -> None:
    one = Rank(LAYOUT, 0, SIZE)
    loader = one.shard(squares())
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in (0, 4):
        loader.sampler.set_epoch(epoch)
        assert (one.cursor.begin, loader.sampler.epoch) == (Position(epoch), epoch)


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_loader_says(drop_last: bool) -> None:
    for loader in (squares(drop_last=drop_last), numbers(drop_last=drop_last)):
        assert facts_of(loader) == LoaderFacts(SIZE, 3, drop_last)
    spread = DistributedSampler(Squares(SIZE), num_replicas=4, rank=0)
    assert facts_of(squares(sampler=spread)).size == SIZE


class Unsized(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


class OwnBatches(BatchSampler):
    pass


BATCHES = OwnBatches(SequentialSampler(range(9)), 3, False)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "the position in a list is not known; give one DataLoader"),
        (
            DataLoader(Unsized()),
            "Unsized is an iterable dataset that does not define how it is sharded; give it "
            "__len__ and iter_shard(epoch=, start=, step=) "
            "(lightning_dist.elastic.data.sharding.Shardable), or use a map-style dataset",
        ),
        (
            DataLoader(Numbers(9), batch_size=None),
            "Numbers makes its batches itself (batch_size=None), so its samples cannot be counted; "
            "let the DataLoader make them",
        ),
        (
            DataLoader(Squares(9), batch_size=None),
            "the samples of a loader with no batches cannot be sharded again when the number of "
            "ranks changes; give the DataLoader batch_size= and a sampler",
        ),
        (
            DataLoader(Squares(9), batch_sampler=BATCHES),
            "the samples of a loader with batches of OwnBatches cannot be sharded again when the "
            "number of ranks changes; give the DataLoader batch_size= and a sampler",
        ),
    ],
    ids=["list", "iterable", "own batches of a stream", "no batches", "batch sampler"],
)
def test_loaders_whose_position_is_not_known(loader: Any, message: str) -> None:
    with pytest.raises(NotExactError, match=f"^{re.escape(message)}$"):
        facts_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_torchdata(workers: int) -> None:
    """It is dealt as any loader, over a stream and over a map."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def stateful(dataset: Any) -> DataLoader[Any]:
        return torchdata.StatefulDataLoader(
            dataset, batch_size=3, collate_fn=as_list, num_workers=workers
        )

    one = Rank(LAYOUT, 1, SIZE)
    loader = one.shard(stateful(Numbers(SIZE)))
    assert type(loader) is torchdata.StatefulDataLoader
    for epoch in range(2):
        one.go_to(epoch)
        assert list(loader) == numbers_of(one)
    assert facts_of(stateful(Squares(SIZE))).batch_size == 3


def data_shards_of(
    rank: int,
    *,
    world_size: int,
    begun: Layout | None = None,
    resumed: ElasticState | None = None,
    policy: BatchPolicy = "fixed_global_batch",
) -> DataShards:
    return DataShards(
        policy=policy,
        accumulate=2,
        rank=rank,
        world_size=world_size,
        resumed=resumed,
        path="",
        begun=begun,
        seed=1,
    )


def steps_of(loader: Iterator[list[int]], plan: EpochPlan) -> Iterator[list[int]]:
    """Samples of one rank, step by step, without those that have no weight."""
    step: list[int] = []
    for index in range(plan.first_micro_batch, len(plan)):
        each, batch = plan.micro_batch_at(index), next(loader)
        step += batch if each.weight else []
        if each.ends_step:
            yield step
            step = []


def test_a_loader_that_is_made_anew_keeps_the_global_batch_of_the_run() -> None:
    """Where ranks were lost meanwhile, and with other samples."""
    data_shards = data_shards_of(0, world_size=4)
    data_shards.shard(DataLoader(Squares(64), 3))
    data_shards.reshard(Position(), rank=0, world_size=2)
    data_shards.shard(DataLoader(Squares(80), 3))
    assert data_shards.first == Layout(4, 3, 2, 24)
    assert data_shards.layout == Layout(2, 3, 4, 24)
    assert data_shards.size == 80
    assert data_shards.agreed == {
        "global batch": 24,
        "batch size": 3,
        "micro-batches per step": 4,
        "global batch of the first start": 24,
        "samples of an epoch": 80,
        "seed of their order": 1,
    }


@pytest.mark.parametrize(
    ("now", "ranks", "policy", "is_said"),
    [
        (6, 4, "fixed_global_batch", True),
        (3, 2, "fixed_global_batch", False),  # other ranks alone
        (6, 2, "fixed_global_batch", False),  # the script keeps the global batch itself
        (6, 4, "fixed_micro_batch", False),
    ],
)
def test_a_batch_size_without_effect_is_said(
    now: int, ranks: int, policy: BatchPolicy, is_said: bool
) -> None:
    first = Layout(4, 3, 2, 24)
    state = ElasticState("", 1, first, first, Position(), 0, 0, 64)
    data_shards = data_shards_of(0, world_size=ranks, resumed=state, policy=policy)
    data_shards.shard(DataLoader(Squares(64), now))
    assert (
        "took 3 samples and 2 micro-batches when the run began" in data_shards.left_out
    ) == is_said


@KINDS
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_the_rest_of_an_epoch_is_dealt_to_other_ranks(
    make: Make, expected: Expected, workers: int, before: int, after: int
) -> None:
    """In the second step of an epoch rank 0 is lost, or another one comes."""
    size, batch = 200, before * 2 * 3
    is_map = make is squares

    def dealt(rank: int, **of: Any) -> tuple[DataShards, DataLoader[Any]]:
        data_shards = data_shards_of(rank, **of)
        data_shards.cursor.set_epoch(1)
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        data = Squares(size) if is_map else Numbers(size)
        user = DataLoader(data, 3, shuffle=True if is_map else None, collate_fn=as_list, **options)
        return data_shards, data_shards.shard(user)

    in_order = [sample for each in dealt(0, world_size=1)[1] for sample in each]
    ranks = [dealt(rank, world_size=before) for rank in range(before)]
    iterations = [iter(loader) for _, loader in ranks]
    steps = [
        steps_of(each, data_shards.plan())
        for each, (data_shards, _) in zip(iterations, ranks, strict=True)
    ]
    found = [sorted(chain(*map(next, steps)))]
    for each in iterations:
        next(each)  # of the step that is interrupted

    if after < before:
        ranks, iterations = ranks[-after:], iterations[-after:]
    else:
        ranks.append(dealt(0, world_size=1, begun=ranks[0][0].first))
        iterations.append(iter(ranks[-1][1]))
    for rank, (data_shards, _) in enumerate(ranks):
        data_shards.reshard(Position(1, batch, 1), rank=rank, world_size=after)
    if workers or not is_map:  # what they have fetched ahead is not dealt to them any more
        iterations = [iter(loader) for _, loader in ranks]
    steps = [
        steps_of(each, data_shards.plan())
        for each, (data_shards, _) in zip(iterations, ranks, strict=True)
    ]
    found += [sorted(chain(*of_ranks)) for of_ranks in zip(*steps, strict=True)]
    assert all(next(each, None) is None for each in iterations)
    assert found == [sorted(in_order[at : at + batch]) for at in range(0, size, batch)]
    for data_shards, _ in ranks:
        data_shards.close()
