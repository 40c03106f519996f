"""Cuts the time of a training loop into steps and phases, from what can be seen of any loop.

Seen are the forward passes of the model, the backward passes and the optimizer; nobody says where a
step begins. A step ends with the last optimizer step before the next forward pass, and what comes
after that, such as loading data, is the begin of the next. Where an optimizer makes its step within
a forward pass, as Lightning's manual optimization does, each of them ends a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.profiling.capture.events import Phase
from lightning_dist.reducer.moments import Moment, Moments


@dataclass(frozen=True)
class Cut:
    """A step, cut out, at moments that may be to come.

    Args:
        phases: names, with begin and end; some of them may have taken no time.
        left_out: begin and end of what lies between phases and is not of the step, as a validation
            between the micro-batches of an accumulation.
    """

    begin: Moment
    end: Moment
    phases: Sequence[tuple[str, Moment, Moment]]
    left_out: Sequence[tuple[Moment, Moment]] = ()

    def read(self, moments: Moments) -> tuple[int, int, tuple[Phase, ...]]:
        """When it began, how long it took, and its phases from its begin on, in nanoseconds.

        What is before a part that is left out is moved to the end of that part: exchanges, which
        come last, stay where they were. Only when ``end`` is past.
        """
        names = [name for name, _, _ in self.phases]
        begin, end = moments.read([self.begin, self.end], since=self.begin)
        begins = moments.read([begin for _, begin, _ in self.phases], since=self.begin)
        ends = moments.read([end for _, _, end in self.phases], since=self.begin)
        sinces = moments.read([since for since, _ in self.left_out], since=self.begin)
        untils = moments.read([until for _, until in self.left_out], since=self.begin)
        left_out = list(zip(sinces, untils, strict=True))

        def moved(time: int) -> int:
            return time + sum(until - since for since, until in left_out if time <= since)

        begin = moved(begin)
        phases = tuple(
            Phase(name, moved(at) - begin, moved(until) - begin)
            for name, at, until in zip(names, begins, ends, strict=True)
            if at < until
        )
        return begin, end - begin, phases


class StepTimer:
    """Is told of events in their order, with their time.

    Args:
        begin: from when on time is counted.
    """

    def __init__(self, begin: Moment) -> None:
        self._begin = begin
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._left_out: list[tuple[Moment, Moment]] = []
        self._apart: Moment | None = None  # until then an evaluation was, of a step or of none
        self._phase, self._since = "data", begin
        self._synchronised: Moment | None = None
        self._stepped: Moment | None = None
        self._is_optimizing = False
        self._passes = 0  # forward, since an optimizer has begun its step

    @property
    def has_means(self) -> bool:
        """Whether gradients have been made means of all ranks since the last step."""
        return self._synchronised is not None

    def forward(self, now: Moment) -> Cut | None:
        """A forward pass of training begins; the step that it follows, if that is over.

        An optimizer that asks for several passes, as LBFGS does of its closure, has one step.
        """
        is_asked_again = self._is_optimizing and self._passes > 0
        self._passes += 1
        cut = None
        if not is_asked_again:
            cut = self.end() if self._apart is None else self._leave_out(self._apart)
        self._enter("forward", now)
        return cut

    def backward(self, now: Moment) -> None:
        """The backward pass begins."""
        self._enter("backward", now)

    def backward_ended(self, now: Moment, *, synchronised: bool) -> None:
        """It has ended; ``synchronised``: with the mean over all ranks."""
        self._enter("optimizer" if synchronised else "data", now)
        if synchronised:
            self._synchronised, self._stepped = now, None

    def stepping(self, now: Moment, *, exchanged: bool) -> None:
        """An optimizer begins its step; ``exchanged``: after gradients have travelled.

        A backward pass that nobody saw ran within the forward pass; ``backward`` has both of them.
        """
        self._is_optimizing, self._passes = True, 0
        self._apart = None
        if exchanged and self._phase == "forward":
            self._phase = "backward"
            self.backward_ended(now, synchronised=True)

    def stepped_within(self) -> Cut | None:
        """The optimizer's step was within a forward pass, which may have another; the step."""
        if self._synchronised is None:
            return None
        cut = self._cut()
        self._phase = "forward"
        return cut

    def forward_ended(self) -> None:
        """What is left of a pass, after a step within it, is of no phase."""
        if self._phase == "forward" and self._since == self._begin:
            self._phase = "data"

    def stepped(self, now: Moment) -> None:
        """An optimizer has made its step."""
        self._is_optimizing = False
        if self._synchronised is not None:
            self._stepped = now

    def restart(self, now: Moment) -> Cut | None:
        """What was since the last event is not of the training; the step that is over, if any.

        Where a pass or a step of an optimizer is to come it may be of the step, as a target that
        the model computes without gradients: then the next event tells.
        """
        if self._phase != "data" and self._stepped is None:
            self._apart = now
            return None
        return self._leave_out(now)

    def end(self) -> Cut | None:
        """The step that is over, if any."""
        return self._cut() if self.has_means else None

    def _leave_out(self, until: Moment) -> Cut | None:
        cut = self.end()
        since = self._since
        if self._left_out and self._left_out[-1][1] == since:
            since, _ = self._left_out.pop()  # another batch of one validation
        if self._spans:
            self._left_out.append((since, until))
        else:
            self._begin = until
        self._phase, self._since, self._apart = "data", until, None
        return cut

    def _enter(self, phase: str, now: Moment) -> None:
        self._spans.append((self._phase, self._since, now))
        self._phase, self._since, self._apart = phase, now, None

    def _cut(self) -> Cut:
        assert self._synchronised is not None
        end = self._synchronised if self._stepped is None else self._stepped
        self._enter("data", end)
        cut = Cut(self._begin, end, self._spans, self._left_out)
        self._begin, self._spans, self._left_out = end, [], []
        self._synchronised = self._stepped = None
        return cut
