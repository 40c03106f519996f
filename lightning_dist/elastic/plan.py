"""The passes of one epoch, from wherever it is resumed, on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dist.elastic.layout import Layout


@dataclass(frozen=True)
class Position:
    """How far a training has come, in what every world size understands.

    Args:
        epoch: epochs that have ended.
        samples: samples of this epoch that optimizer steps have used.
        steps: optimizer steps of this epoch.
    """

    epoch: int = 0
    samples: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of one rank.

    Args:
        samples: which samples of the epoch's order this rank takes; may be empty.
        weight: what its loss, a mean over its samples, is multiplied with, so that the mean over
            passes and ranks is the mean over the samples of the step.
        ends_step: whether the optimizer steps after it.
    """

    samples: range
    weight: float
    ends_step: bool


@dataclass(frozen=True)
class EpochPlan:
    """The passes of an epoch: those before ``begin`` are counted, not described.

    Args:
        layout: how steps are dealt.
        rank: whose passes these are.
        begin: where this epoch is resumed; before it are ``begin.steps`` steps of
            ``layout.accumulate`` passes, as far as counting goes.
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
    def first_pass(self) -> int:
        """The number of the first pass that is left."""
        return self.begin.steps * self.layout.accumulate

    def __len__(self) -> int:
        """Passes of the whole epoch, those before ``begin`` included."""
        tail = self.layout.passes_for(self._tail) if self._tail else 0
        return self.first_pass + self._full_steps * self.layout.accumulate + tail

    def pass_at(self, index: int) -> Pass:
        """The pass with this number in the epoch, from ``first_pass`` on."""
        assert self.first_pass <= index < len(self), (index, self.first_pass, len(self))
        step, which = divmod(index - self.first_pass, self.layout.accumulate)
        is_tail = step >= self._full_steps
        if is_tail:
            step, which = self._full_steps, index - len(self) + self.layout.passes_for(self._tail)
        count = self._tail if is_tail else self.layout.global_batch
        passes = self.layout.passes_for(count) if is_tail else self.layout.accumulate
        begin = self.begin.samples + step * self.layout.global_batch
        share = self.layout.share(self.rank, begin=begin, count=count)
        samples = _piece(share, which, of=passes)
        # DDP divides by the ranks, and a trainer by the passes of a full step.
        weight = len(samples) * self.layout.world_size * self.layout.accumulate / count
        return Pass(samples, weight, which + 1 == passes)

    def after(self, passes: int) -> Position:
        """The position when ``passes`` of the epoch are done: that of the last optimizer step."""
        if passes >= len(self):
            done = self._left if self._tail else self._full_steps * self.layout.global_batch
            return Position(self.begin.epoch, self.begin.samples + done, self.steps)
        steps = max(passes - self.first_pass, 0) // self.layout.accumulate
        steps = min(steps, self._full_steps)
        samples = self.begin.samples + steps * self.layout.global_batch
        return Position(self.begin.epoch, samples, self.begin.steps + steps)

    @property
    def used(self) -> int:
        """Samples of the epoch that steps use; ``drop_last`` leaves out the rest."""
        return self.after(len(self)).samples

    def passes_after(self, steps: int) -> int:
        """Passes that the first ``steps`` optimizer steps of the epoch have taken."""
        return len(self) if steps >= self.steps else steps * self.layout.accumulate


def _piece(share: range, which: int, *, of: int) -> range:
    """The ``which``-th of ``of`` runs of ``share``, whose lengths differ by one at most."""
    size, more = divmod(len(share), of)
    begin = which * size + min(which, more)
    return share[begin : begin + size + (which < more)]


def full_size(size: int, *, limit_passes: int | None, layout: Layout) -> int:
    """Samples of an epoch of which ``limit_passes`` passes of ``layout`` are wanted."""
    if limit_passes is None:
        return size
    return min(size, math.ceil(limit_passes / layout.accumulate) * layout.global_batch)
