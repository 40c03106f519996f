"""Shards of the data, one for each rank, and others when their number changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from lightning_dist.elastic.data.plan import (
    EpochPlan,
    Layout,
    Position,
    full_size,
    layout_for,
)
from lightning_dist.elastic.data.sampling import (
    Cursor,
    ElasticBatchSampler,
    EpochOrder,
    EpochSetter,
)
from lightning_dist.elastic.private import end_persistent_workers
from lightning_dist.elastic.progress import ElasticState, require_same_data
from lightning_dist.elastic.rng import derive_seed
from lightning_dist.settings.run import BatchPolicy


@runtime_checkable
class Shardable(Protocol):
    """Interface of an iterable dataset with which no restart repeats or skips a sample.

    Example::

        class Lines(IterableDataset):
            def __len__(self):
                return 1_000_000

            def __iter__(self):
                return self.iter_shard(epoch=0, start=0, step=1)

            def iter_shard(self, *, epoch, start, step):
                return itertools.islice(open(f"epoch-{epoch}.txt"), start, None, step)
    """

    def __len__(self) -> int:
        """Samples of an epoch, exactly."""
        ...

    def iter_shard(self, *, epoch: int, start: int, step: int) -> Iterator[Any]:
        """Samples ``start``, ``start + step``, ... of an order that only ``epoch`` may change."""
        ...


class ShardedStream(IterableDataset[list[Any]]):
    """Lists of samples, one for every micro-batch of one rank, also in the workers of a loader.

    Args:
        dataset: read by every worker, which keeps its part.
        plan: the micro-batches of the present epoch.
        on_first: called before the first sample is read in the trainer's own process.
    """

    def __init__(
        self,
        dataset: Shardable,
        plan: Callable[[], EpochPlan],
        *,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._plan = plan
        self._on_first = on_first

    def __len__(self) -> int:
        """Passes of the whole epoch."""
        return len(self._plan())

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker that is started afresh: the plan, not the trainer that has it."""
        return {**self.__dict__, "_plan": partial(_given, self._plan()), "_on_first": None}

    def __iter__(self) -> Iterator[list[Any]]:
        worker, plan = get_worker_info(), self._plan()
        worker_id, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is None and self._on_first is not None:
            self._on_first()
        start = plan.layout.share(plan.rank, begin=plan.begin.samples, count=1).start
        drawn = self.dataset.iter_shard(
            epoch=plan.begin.epoch, start=start, step=plan.layout.world_size
        )
        spare: list[Any] | None = None
        for number, index in enumerate(range(plan.first_micro_batch, len(plan))):
            samples = [_next(drawn, self.dataset) for _ in plan.micro_batch_at(index).samples]
            if not samples and spare is None:
                spare = [
                    next(iter(self.dataset.iter_shard(epoch=plan.begin.epoch, start=0, step=1)))
                ]
            if number % workers == worker_id:
                yield samples or list(spare or [])


def _given(plan: EpochPlan) -> EpochPlan:
    return plan


def _next(drawn: Iterator[Any], dataset: Shardable) -> Any:
    try:
        return next(drawn)
    except StopIteration:
        raise ValueError(
            f"An epoch of {type(dataset).__name__} has {len(dataset)} samples by its len(), but "
            "iter_shard ended before that; make len() exact"
        ) from None


class NotExactError(ValueError):
    """A loader whose samples cannot be seen exactly once over restarts; says why."""


@dataclass(frozen=True)
class LoaderFacts:
    """Sizes of an epoch, from its loader.

    Args:
        size: samples of an epoch.
        batch_size: samples of a batch of one rank.
        drop_last: leave out what does not fill a batch.
    """

    size: int
    batch_size: int
    drop_last: bool


def facts_of(loader: Any) -> LoaderFacts:
    """Read the facts.

    Raises:
        NotExactError: this kind of loader is not understood.
    """
    if not isinstance(loader, DataLoader):
        raise NotExactError(
            f"the position in a {type(loader).__name__} is not known; give one DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.dataset, Shardable):
            raise NotExactError(
                f"{type(loader.dataset).__name__} is an iterable dataset that does not define how "
                "it is sharded; give it __len__ and iter_shard(epoch=, start=, step=) "
                "(lightning_dist.elastic.data.sharding.Shardable), or use a map-style dataset"
            )
        if loader.batch_size is None:
            raise NotExactError(
                f"{type(loader.dataset).__name__} makes its batches itself (batch_size=None), so "
                "its samples cannot be counted; let the DataLoader make them"
            )
        return LoaderFacts(len(loader.dataset), loader.batch_size, loader.drop_last)
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches).__name__ != "BatchSampler":
        kind = "no batches" if batches is None else f"batches of {type(batches).__name__}"
        raise NotExactError(
            f"the samples of a loader with {kind} cannot be sharded again when the number of ranks "
            "changes; give the DataLoader batch_size= and a sampler"
        )
    size = EpochOrder(loader.sampler, seed=0).size  # of any seed
    return LoaderFacts(size, batches.batch_size, batches.drop_last)


def shard(
    loader: DataLoader[Any],
    plan: Callable[[], EpochPlan],
    *,
    cursor: Cursor,
    seed: int,
    on_first: Callable[[], None] = lambda: None,
) -> DataLoader[Any]:
    """A copy of ``loader`` that yields one rank's share, from ``cursor`` on.

    Everything else of it stays: its class, dataset, workers, collate function. (Workers of an
    iterable dataset are started anew for every epoch: they have to learn where it begins.) The copy
    draws the seeds of its workers from a generator of its own, so that beginning an epoch changes
    none that the training uses.
    """
    assert cursor.begin.epoch == plan().begin.epoch
    sharded = copy.copy(loader)
    samples = range(plan().size)  # a sampler wants the length of a dataset only
    setter = EpochSetter(samples, cursor, world_size=plan().layout.world_size, rank=plan().rank)
    generator = torch.Generator()
    cursor.follow(lambda epoch: _seed(generator, derive_seed(seed, "workers", epoch, plan().rank)))
    changed: dict[str, Any] = {
        "batch_size": None,
        "drop_last": False,
        "generator": generator,
        "_iterator": None,
    }
    if isinstance(loader.dataset, IterableDataset):
        changed["dataset"] = ShardedStream(
            loader.dataset,  # type: ignore[arg-type]
            plan,
            on_first=on_first,
        )
        changed["batch_sampler"] = None
        changed["persistent_workers"] = False  # they would keep the plan of their first epoch
    else:
        order = EpochOrder(loader.sampler, seed=seed)
        changed["sampler"] = setter
        changed["batch_sampler"] = ElasticBatchSampler(order, plan, on_first=on_first)
    sharded.__dict__.update(changed)  # a loader refuses assignments to these after its __init__
    sharded.__dict__["epoch_setter"] = setter
    return sharded


def _seed(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)


class Remembered:
    """A loader with a state that knows where it was some batches ago.

    Trainers fetch batches ahead, and optimizers step after several: what a checkpoint wants is the
    position after the last batch that a step has used.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``, which goes on among as many
            ranks; asked for its state after every batch.
        back: how many batches it may be asked to go back.
    """

    def __init__(self, loader: Any, *, back: int) -> None:
        self._loader = loader
        self._back = back
        self._states: dict[int, Any] = {}

    def __len__(self) -> int:
        """Length of the loader, which may not have one."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._states.clear()
        for number, batch in enumerate(self._loader, start=1):
            self._states[number] = self._loader.state_dict()
            self._states.pop(number - self._back - 1, None)
            yield batch

    def close(self) -> None:
        """No more batches are wanted."""
        end_persistent_workers(self._loader)

    def state_after(self, batches: int) -> Any:
        """The state when ``batches`` of this iteration had been taken; None for none."""
        assert batches == 0 or batches in self._states, (batches, sorted(self._states))
        return self._states.get(batches)


class DataShards:
    """This rank's share of every epoch.

    Args:
        policy: see :func:`~lightning_dist.elastic.data.plan.layout_for`.
        accumulate: micro-batches per optimizer step, as the script says.
        rank: this one, among those that take samples of their own.
        world_size: how many they are. The ranks of a tensor-parallel group count as one.
        resumed: state of a checkpoint; None for a fresh start.
        path: of that checkpoint.
        begun: the layout of a start that left no checkpoint; its global batch is kept too, if the
            script still asks for the same batches.
        seed: of the order.
    """

    def __init__(
        self,
        *,
        policy: BatchPolicy,
        accumulate: int,
        rank: int,
        world_size: int,
        resumed: ElasticState | None,
        path: str,
        begun: Layout | None,
        seed: int,
    ) -> None:
        self.policy, self._accumulate, self._seed = policy, accumulate, seed
        self.rank, self.world_size = rank, world_size
        self.resumed, self._path, self._begun = resumed, path, begun
        self.cursor = Cursor()
        if resumed is not None:
            self.cursor.begin = resumed.position
        self.facts: LoaderFacts | None = None
        self.first: Layout | None = None
        self.layout: Layout | None = None
        """The layout of now; None where samples are not counted."""
        self._epoch_size = 0
        self._sharded: DataLoader[Any] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the position in the data is known by samples."""
        return self.facts is not None

    @property
    def size(self) -> int | None:
        """Samples of an epoch, as the dataset has them."""
        return None if self.facts is None else self.facts.size

    def limit(self, first: Layout, facts: LoaderFacts) -> int | None:
        """Micro-batches of an epoch that are wanted, in the first layout of the run; None: all."""
        return None

    def accept(self, first: Layout, now: Layout) -> None:
        """Go on in the layout ``now``; raise ValueError where the script cannot have it."""

    def shard(self, loader: Any, *, on_first: Callable[[], None] = lambda: None) -> DataLoader[Any]:
        """This rank's share of the user's ``loader``.

        Args:
            on_first: called before the first batch of an epoch is drawn in this process.

        Raises:
            NotExactError: its samples cannot be sharded.
            ValueError: they are not those of the checkpoint.
        """
        facts = facts_of(loader)
        if self.resumed is not None and not self.is_sharded:  # a loader of a later epoch may differ
            require_same_data(self.resumed, size=facts.size, path=self._path)
        self.facts = facts
        script = self._script_layout()
        self.first = self.first or self._first_layout(script)
        self.layout = layout_for(self.policy, self.first, script=script)
        passes = self.limit(self.first, facts)
        self._epoch_size = full_size(facts.size, limit=passes, layout=self.first)
        self.accept(self.first, self.layout)
        self._sharded = shard(
            loader, self.plan, cursor=self.cursor, seed=self._seed, on_first=on_first
        )
        return self._sharded

    def reshard(self, position: Position, *, rank: int, world_size: int) -> None:
        """Shard what is left of the present epoch over other ranks, from ``position`` on.

        An iteration over a map-style dataset without workers goes on with it. Any other has fetched
        batches ahead: begin a new one, which leaves out those of other ranks now.

        Args:
            rank: of this process among the ``world_size`` that go on.

        Raises:
            ValueError: more ranks than samples in a global batch.
        """
        assert position.epoch == self.cursor.begin.epoch, "a new epoch starts at its first sample"
        assert self.first is not None, "no loader is sharded"
        self.rank, self.world_size = rank, world_size
        self.layout = layout_for(self.policy, self.first, script=self._script_layout())
        self.cursor.go_to(position)
        self.accept(self.first, self.layout)

    def close(self) -> None:
        """No more batches are wanted: end the workers that the loader keeps."""
        end_persistent_workers(self._sharded)

    def _first_layout(self, script: Layout) -> Layout:
        if self.resumed is not None:
            return self.resumed.first
        begun = self._begun
        asked = script.micro_batch, script.accumulate
        if begun is None or (begun.micro_batch, begun.accumulate) != asked:
            return script
        return begun

    @property
    def agreed(self) -> dict[str, Any]:
        """Facts that are equal on all ranks, or they would wait for each other in vain."""
        first, now = self.layouts
        return {
            "global batch": now.global_batch,
            "batch size": now.micro_batch,
            "micro-batches per step": now.accumulate,
            "global batch of the first start": first.global_batch,
            "samples of an epoch": self._epoch_size,
            "seed of their order": self._seed,
        }

    @property
    def left_out(self) -> str:
        """Warning about a batch size of the script that has no effect; empty if it has one."""
        script, now = self._script_layout(), self.layout
        if self.resumed is None or now is None or script.global_batch == now.global_batch:
            return ""
        first = self.resumed.first
        asked, before = (
            f"{layout.micro_batch} samples and {layout.accumulate} micro-batches"
            for layout in (script, first)
        )
        if asked == before:  # other ranks alone
            return ""
        return (
            f"The script takes {asked} per rank and step now and took {before} when the run began: "
            f"batch_policy='fixed_global_batch' keeps its global batch of {now.global_batch}. For "
            "another one begin a new run in another folder, or set "
            "batch_policy='fixed_micro_batch'"
        )

    def _script_layout(self) -> Layout:
        return Layout.of_script(
            world_size=self.world_size,
            micro_batch=1 if self.facts is None else self.facts.batch_size,
            accumulate=self._accumulate,
        )

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the run's first start and of now.

        Samples are counted as batches where nobody knows.
        """
        if self.first is not None and self.layout is not None:
            return self.first, self.layout
        now = self._script_layout()
        return (now if self.resumed is None else self.resumed.first), now

    def plan(self) -> EpochPlan:
        """The micro-batches of the present epoch on this rank."""
        assert self.facts is not None
        assert self.layout is not None
        return EpochPlan(
            self.layout,
            self.rank,
            self.cursor.begin,
            self._epoch_size,
            drop_last=self.facts.drop_last,
        )
