from __future__ import annotations

from typing import Any, NamedTuple

from lightning_dist.measurement.device_clock import HostClock
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, Phase
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep, StepTimer


class Step(NamedTuple):
    begin: int
    end: int
    phases: tuple[Phase, ...]


class Timer:
    """A :class:`StepTimer` that is told of events with their times; each returns a step, if any."""

    def __init__(self, begin: int) -> None:
        self._now, self._cuts = begin, list[PendingStep]()
        self._recorder = Recorder()
        self._timer = StepTimer(lambda: self._now, self._recorder, self._cuts.append)

    def __getattr__(self, event: str) -> Any:
        def happens(at: int, *, exchanged: bool = False, **arguments: Any) -> PendingStep | None:
            self._now = at
            if exchanged:
                self._recorder.launches("all_reduce", group="flat", sent=1)
            getattr(self._timer, event)(**arguments)
            self._recorder.drop()
            return self._cuts.pop() if self._cuts else None

        return happens


def read(cut: PendingStep | None) -> Step:
    assert cut is not None
    step = cut.read(HostClock())
    return Step(step.begin, step.begin + step.duration, step.phases)


def test_a_step_begins_where_the_one_before_ended() -> None:
    timer = Timer(100)
    assert timer.forward(110) is None
    timer.backward(130)
    timer.backward_ended(170, synchronised=True)
    timer.stepped(180)
    assert read(timer.forward(195)) == Step(
        100,
        180,
        (
            Phase("between_steps", 0, 10),
            Phase("forward", 10, 30),
            Phase("backward", 30, 70),
            Phase("optimizer", 70, 80),
        ),
    )
    timer.backward(200)
    timer.backward_ended(210, synchronised=True)
    timer.stepped(215)
    cut = read(timer.exclude_interval(300))
    assert (cut.begin, cut.end) == (180, 215)
    assert cut.phases[0] == Phase("between_steps", 0, 15)


def test_accumulated_passes_are_one_step() -> None:
    timer = Timer(0)
    for begin, synchronised in ((10, False), (40, False), (70, True)):
        assert timer.forward(begin) is None
        timer.backward(begin + 10)
        timer.backward_ended(begin + 20, synchronised=synchronised)
    timer.stepped(100)
    cut = read(timer.forward(110))
    assert [(phase.name, phase.begin, phase.end) for phase in cut.phases] == [
        ("between_steps", 0, 10),
        ("forward", 10, 20),
        ("backward", 20, 30),
        ("between_steps", 30, 40),
        ("forward", 40, 50),
        ("backward", 50, 60),
        ("between_steps", 60, 70),
        ("forward", 70, 80),
        ("backward", 80, 90),
        ("optimizer", 90, 100),
    ]


def test_several_optimizers_end_the_step_with_the_last() -> None:
    timer = Timer(0)
    timer.forward(0)
    timer.backward(10)
    timer.backward_ended(20, synchronised=True)
    timer.stepped(25)
    timer.stepped(30)
    cut = read(timer.forward(50))
    assert cut.end == 30
    assert cut.phases[-1] == Phase("optimizer", 20, 30)


def test_a_step_that_a_scaler_skipped_has_no_optimizer() -> None:
    timer = Timer(0)
    timer.forward(0)
    timer.backward(10)
    timer.backward_ended(20, synchronised=True)
    cut = read(timer.forward(50))
    assert cut.end == 20
    assert cut.phases[-1].name == "backward"


def test_an_optimizer_that_asks_again_has_one_step() -> None:
    """LBFGS, the closure of which is the forward and the backward pass."""
    timer = Timer(0)
    cuts = []
    for begin in (0, 100):
        timer.stepping(begin, exchanged=begin > 0)
        for again in (10, 40):
            cuts.append(timer.forward(begin + again))
            timer.backward(begin + again + 10)
            timer.backward_ended(begin + again + 20, synchronised=True)
        timer.stepped(begin + 70)
    assert [cut is not None for cut in cuts] == [False, False, True, False]
    cut = read(cuts[2])
    assert (cut.begin, cut.end) == (0, 70)
    assert [(each.name, each.begin, each.end) for each in cut.phases] == [
        ("between_steps", 0, 10),
        ("forward", 10, 20),
        ("backward", 20, 30),
        ("optimizer", 30, 40),
        ("forward", 40, 50),
        ("backward", 50, 60),
        ("optimizer", 60, 70),
    ]


def test_what_is_set_apart_is_of_no_step() -> None:
    timer = Timer(0)
    timer.forward(5)
    timer.backward(10)
    timer.backward_ended(20, synchronised=True)
    timer.stepped(25)
    assert timer.exclude_interval(1000) is not None  # a validation
    timer.forward(1005)
    timer.backward(1010)
    timer.backward_ended(1020, synchronised=True)
    timer.stepped(1025)
    cut = read(timer.forward(1030))
    assert (cut.begin, cut.end) == (1000, 1025)
    assert timer.exclude_interval(2000) is None


def test_a_forward_pass_without_a_backward_pass() -> None:
    """A loss that is not finite is left out by some loops."""
    timer = Timer(0)
    timer.forward(5)
    timer.forward(20)
    timer.backward(30)
    timer.backward_ended(40, synchronised=True)
    timer.stepped(45)
    cut = read(timer.forward(50))
    assert [phase.name for phase in cut.phases] == [
        *("between_steps", "forward", "forward", "backward", "optimizer")
    ]


def test_steps_within_a_forward_pass_end_a_step_each() -> None:
    timer = Timer(0)
    timer.forward(5)
    timer.stepping(20, exchanged=True)
    cut = read(timer.stepped(25))
    assert cut == Step(
        0, 25, (Phase("between_steps", 0, 5), Phase("backward", 5, 20), Phase("optimizer", 20, 25))
    )
    timer.stepping(40, exchanged=True)
    assert read(timer.stepped(45)) == Step(
        25, 45, (Phase("backward", 0, 15), Phase("optimizer", 15, 20))
    )
    assert timer.stepped(47) is None  # a second one, after the same gradients
    timer.forward_ended(50)
    assert timer.forward(60) is None
    timer.stepping(70, exchanged=True)
    cut = read(timer.stepped(75))
    assert cut.phases[:2] == (Phase("between_steps", 0, 15), Phase("backward", 15, 25))


def test_a_backward_pass_that_was_not_seen_ends_with_the_step_of_an_optimizer() -> None:
    """What the model gives back is no tensor, nor a container of some."""
    timer = Timer(0)
    timer.forward(5)
    timer.forward_ended(10)
    timer.stepping(20, exchanged=True)
    timer.stepped(25)
    timer.stepping(25, exchanged=True)
    timer.stepped(30)
    cut = read(timer.forward(40))
    assert (cut.begin, cut.end) == (0, 30)


def test_spans_are_moved_with_what_is_around_them() -> None:
    """A validation took 60 to 80; a span before the step is of what belongs to none."""
    row = ("all_gather", "intra", 1, 0, True)
    spans = [("exchange", OF_NO_BUCKET, at, at + 5, *row) for at in (0, 20, 90)]
    step = PendingStep(10, 100, excluded=[(60, 80)], spans=spans).read(HostClock())
    assert [(each.begin, each.end) for each in step.spans] == [(10, 15), (60, 65)]
    assert all(each.blocks for each in step.spans)
