"""Division of a global batch over ranks, and the micro-batches of an epoch on one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dist.settings.run import BatchPolicy


@dataclass(frozen=True)
class Layout:
    """Number of samples of an optimizer step per rank and micro-batch.

    Args:
        world_size: ranks that take samples of their own; of a tensor-parallel group one.
        micro_batch: samples that a rank takes in one forward and backward pass, at most.
        accumulate: micro-batches per optimizer step.
        global_batch: samples per optimizer step, of all ranks together.
    """

    world_size: int
    micro_batch: int
    accumulate: int
    global_batch: int

    @classmethod
    def of_script(cls, *, world_size: int, micro_batch: int, accumulate: int) -> Layout:
        """Layout of a script that sets a batch size per rank and micro-batches per step."""
        return cls(world_size, micro_batch, accumulate, world_size * micro_batch * accumulate)

    def share(self, rank: int, *, begin: int, count: int) -> range:
        """Samples of ``begin .. begin + count`` that a rank takes: every world_size-th.

        Sample ``p`` goes to rank ``p % world_size``, so the shares of a step differ by one sample
        at most and the ranks take turns in having more.
        """
        first = begin + (rank - begin) % self.world_size
        return range(first, max(first, begin + count), self.world_size)

    def micro_batches_for(self, count: int) -> int:
        """Passes that a step of ``count`` samples takes; the same on every rank."""
        largest = math.ceil(count / self.world_size)
        return max(1, math.ceil(largest / self.micro_batch))


def layout_for(policy: BatchPolicy, first: Layout, *, script: Layout) -> Layout:
    """The layout for the ranks of ``script`` in a run that began with the layout ``first``.

    Args:
        policy: ``"fixed_global_batch"`` keeps the global batch and changes the micro-batches per
            step; the others do what the script says, and the global batch grows with the ranks.
        script: what the script asks for now.

    Raises:
        ValueError: more ranks than samples in a global batch.
    """
    if policy != "fixed_global_batch":
        return script
    world_size, micro_batch = script.world_size, script.micro_batch
    if world_size > first.global_batch:
        raise ValueError(
            f"batch_policy='fixed_global_batch' shards a global batch of {first.global_batch} "
            f"samples over at most as many ranks; got {world_size} ranks. Start fewer, or use "
            "batch_policy='scale_lr'"
        )
    accumulate = math.ceil(math.ceil(first.global_batch / world_size) / micro_batch)
    return Layout(world_size, micro_batch, accumulate, first.global_batch)


def lr_factor(policy: BatchPolicy, *, before: Layout, now: Layout) -> float:
    """Factor of the learning rate when the layout changes.

    Linear scaling: Goyal et al. 2017, arXiv 1706.02677. Square root: Krizhevsky 2014,
    arXiv 1404.5997.
    """
    ratio = now.global_batch / before.global_batch
    return {"scale_lr": ratio, "scale_lr:sqrt": math.sqrt(ratio)}.get(policy, 1.0)


@dataclass(frozen=True)
class Position:
    """Position of training, independent of the world size.

    Args:
        epoch: epochs that have ended.
        samples: samples of this epoch that optimizer steps have used.
        steps: optimizer steps of this epoch.
    """

    epoch: int = 0
    samples: int = 0
    steps: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    Args:
        samples: which samples of the epoch's order this rank takes; may be empty.
        weight: what its loss, a mean over its samples, is multiplied with, so that the mean over
            micro-batches and ranks is the mean over the samples of the step.
        begins_step: whether it is the first of a step, which may be one that is repeated.
        ends_step: whether the optimizer steps after it.
    """

    samples: range
    weight: float
    begins_step: bool
    ends_step: bool


@dataclass(frozen=True)
class EpochPlan:
    """The micro-batches of an epoch: those before ``begin`` are counted, not described.

    Args:
        layout: the shards of each step.
        rank: whose micro-batches these are.
        begin: where this epoch is resumed; before it are ``begin.steps`` steps of
            ``layout.accumulate`` micro-batches, as far as counting goes.
        size: samples of the epoch.
        drop_last: leave out the samples that do not fill a global batch.
    """

    layout: Layout
    rank: int
    begin: Position
    size: int
    drop_last: bool = False

    @property
    def _left(self) -> int:
        return max(self.size - self.begin.samples, 0)

    @property
    def _full_steps(self) -> int:
        return self._left // self.layout.global_batch

    @property
    def _tail(self) -> int:
        """Samples of the last, smaller step."""
        return 0 if self.drop_last else self._left % self.layout.global_batch

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole epoch."""
        return self.begin.steps + self._full_steps + (self._tail > 0)

    @property
    def first_micro_batch(self) -> int:
        """The number of the first micro-batch that is left."""
        return self.begin.steps * self.layout.accumulate

    def __len__(self) -> int:
        """Passes of the whole epoch, those before ``begin`` included."""
        tail = self.layout.micro_batches_for(self._tail) if self._tail else 0
        return self.first_micro_batch + self._full_steps * self.layout.accumulate + tail

    def micro_batch_at(self, index: int) -> MicroBatch:
        """The micro-batch with this number in the epoch, from ``first_micro_batch`` on."""
        assert self.first_micro_batch <= index < len(self), (
            index,
            self.first_micro_batch,
            len(self),
        )
        step, part = divmod(index - self.first_micro_batch, self.layout.accumulate)
        count, passes = self.layout.global_batch, self.layout.accumulate
        if step >= self._full_steps:
            count, passes = self._tail, self.layout.micro_batches_for(self._tail)
            step, part = self._full_steps, index - len(self) + passes
        begin = self.begin.samples + step * self.layout.global_batch
        share = self.layout.share(self.rank, begin=begin, count=count)
        samples = _piece(share, part, of=passes)
        # DDP divides by the ranks, and a trainer by the micro-batches of a full step.
        weight = len(samples) * self.layout.world_size * self.layout.accumulate / count
        return MicroBatch(samples, weight, part == 0, part + 1 == passes)

    def after(self, passes: int) -> Position:
        """The position when ``passes`` of the epoch are done: that of the last optimizer step."""
        if passes >= len(self):
            done = self._left if self._tail else self._full_steps * self.layout.global_batch
            return Position(self.begin.epoch, self.begin.samples + done, self.steps)
        steps = max(passes - self.first_micro_batch, 0) // self.layout.accumulate
        steps = min(steps, self._full_steps)
        samples = self.begin.samples + steps * self.layout.global_batch
        return Position(self.begin.epoch, samples, self.begin.steps + steps)

    @property
    def used(self) -> int:
        """Samples of the epoch that steps use; ``drop_last`` leaves out the rest."""
        return self.after(len(self)).samples

    def micro_batches_after(self, steps: int) -> int:
        """Passes that the first ``steps`` optimizer steps of the epoch have taken."""
        return len(self) if steps >= self.steps else steps * self.layout.accumulate


def _piece(share: range, part: int, *, of: int) -> range:
    """The ``part``-th of ``of`` runs of ``share``, whose lengths differ by one at most."""
    size, more = divmod(len(share), of)
    begin = part * size + min(part, more)
    return share[begin : begin + size + (part < more)]


def full_size(size: int, *, limit: int | None, layout: Layout) -> int:
    """Samples of an epoch of which ``limit`` micro-batches of ``layout`` are wanted."""
    if limit is None:
        return size
    return min(size, math.ceil(limit / layout.accumulate) * layout.global_batch)
