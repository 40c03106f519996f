"""Steps in which ranks wait for each other, with exchanges and without."""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from planted import Planted, changed, phases_of, replace, replaced

from lightning_dist.measurement.microbenchmark import HostClock
from lightning_dist.profiling.analysis.imbalance import find_phase_skew
from lightning_dist.profiling.analysis.parts import PhaseSkew, Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import COLUMNS, step_table
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, PHASES, Phase, StepRecord
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep, StepTimer
from lightning_dist.profiling.report.files import to_json
from lightning_dist.profiling.report.tables import ranks_table
from lightning_dist.profiling.run import Run


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

    def passes(self, begin: int, middle: int, end: int, *, synchronised: bool = True) -> Any:
        """A forward and a backward pass; the step that ended with their begin."""
        cut = self.forward(begin)
        self.backward(middle)
        self.backward_ended(end, synchronised=synchronised)
        return cut


def read(cut: PendingStep | None) -> Step:
    assert cut is not None
    step = cut.read(HostClock())
    return Step(step.begin, step.begin + step.duration, step.phases)


def test_a_step_begins_where_the_one_before_ended() -> None:
    timer = Timer(100)
    assert timer.passes(110, 130, 170) is None
    timer.stepped(180)
    cut = read(timer.forward(195))
    assert (cut.begin, cut.end) == (100, 180)
    assert phases_of(cut) == "between_steps 0-10, forward 10-30, backward 30-70, optimizer 70-80"
    timer.backward(200)
    timer.backward_ended(210, synchronised=True)
    timer.stepped(215)
    cut = read(timer.exclude_interval(300))
    assert (cut.begin, cut.end) == (180, 215)
    assert cut.phases[0] == Phase("between_steps", 0, 15)


def test_accumulated_passes_are_one_step() -> None:
    timer = Timer(0)
    for begin, synchronised in ((10, False), (40, False), (70, True)):
        times = begin, begin + 10, begin + 20
        assert timer.passes(*times, synchronised=synchronised) is None
    timer.stepped(100)
    cut = read(timer.forward(110))
    assert phases_of(cut) == (
        "between_steps 0-10, forward 10-20, backward 20-30, between_steps 30-40, forward 40-50, "
        "backward 50-60, between_steps 60-70, forward 70-80, backward 80-90, optimizer 90-100"
    )


def test_a_step_ends_with_the_last_of_several_optimizers_or_without_one() -> None:
    timer = Timer(0)
    timer.passes(0, 10, 20)
    timer.stepped(25)
    timer.stepped(30)
    cut = read(timer.passes(50, 60, 70))
    assert cut.end == 30
    assert cut.phases[-1] == Phase("optimizer", 20, 30)
    cut = read(timer.forward(90))  # a scaler skipped it
    assert cut.end == 70
    assert cut.phases[-1].name == "backward"


def test_an_optimizer_that_asks_again_has_one_step() -> None:
    """LBFGS, the closure of which is the forward and the backward pass."""
    timer = Timer(0)
    cuts = []
    for begin in (0, 100):
        timer.stepping(begin, exchanged=begin > 0)
        for again in (10, 40):
            at = begin + again
            cuts.append(timer.passes(at, at + 10, at + 20))
        timer.stepped(begin + 70)
    assert [cut is not None for cut in cuts] == [False, False, True, False]
    cut = read(cuts[2])
    assert (cut.begin, cut.end) == (0, 70)
    assert phases_of(cut) == (
        "between_steps 0-10, forward 10-20, backward 20-30, optimizer 30-40, forward 40-50, "
        "backward 50-60, optimizer 60-70"
    )


def test_what_is_set_apart_is_of_no_step() -> None:
    timer = Timer(0)
    timer.passes(5, 10, 20)
    timer.stepped(25)
    assert timer.exclude_interval(1000) is not None  # a validation
    timer.passes(1005, 1010, 1020)
    timer.stepped(1025)
    cut = read(timer.forward(1030))
    assert (cut.begin, cut.end) == (1000, 1025)
    assert timer.exclude_interval(2000) is None


def test_a_forward_pass_without_a_backward_pass() -> None:
    """A loss that is not finite is left out by some loops."""
    timer = Timer(0)
    timer.forward(5)
    timer.passes(20, 30, 40)
    timer.stepped(45)
    cut = read(timer.forward(50))
    names = [phase.name for phase in cut.phases]
    assert names == ["between_steps", "forward", "forward", "backward", "optimizer"]


def test_steps_within_a_forward_pass_end_a_step_each() -> None:
    timer = Timer(0)
    timer.forward(5)
    timer.stepping(20, exchanged=True)
    cut = read(timer.stepped(25))
    assert (cut.begin, cut.end) == (0, 25)
    assert phases_of(cut) == "between_steps 0-5, backward 5-20, optimizer 20-25"
    timer.stepping(40, exchanged=True)
    cut = read(timer.stepped(45))
    assert (cut.begin, cut.end) == (25, 45)
    assert phases_of(cut) == "backward 0-15, optimizer 15-20"
    assert timer.stepped(47) is None  # a second one, after the same gradients
    timer.forward_ended(50)
    assert timer.forward(60) is None
    timer.stepping(70, exchanged=True)
    cut = read(timer.stepped(75))
    assert phases_of(cut).startswith("between_steps 0-15, backward 15-25, ")


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


FOUR = Planted(world_size=4, late_data={2: 40}, meets_in_forward=True)
BUFFERS = Planted(late_data={0: 50}, meets_in_forward=True)
"""Rank 0 is late, and rank 1 waits for it before the forward pass."""


def found(planted: Planted | Run) -> Summary:
    summary = summarize(planted.run() if isinstance(planted, Planted) else planted)
    told = [note for note in summary.notes if "is counted in these phases" in note]
    assert len(told) == bool(summary.phase_skew)
    return summary


def what(planted: Planted | Run) -> list[tuple[str, list[int], int, float]]:
    return [
        (each.phase, [*each.ranks], each.fastest_rank, each.excess_ms)
        for each in found(planted).phase_skew
    ]


@pytest.mark.parametrize(
    "planted",
    [
        Planted(),
        Planted(late={0: 50}),
        Planted(late_data={0: 50}),
        Planted(late_data={0: 50}, codec="ddp", encode=0, decode=0),
        Planted(late_data={0: 50}, transfer=5, backward=400),  # waiting is hidden
        Planted(world_size=4, late={1: 30, 3: 70}, shift={2: -9}),
        Planted(world_size=3, late_data={1: 30}, late={2: 70}),  # nobody waits for rank 1
        Planted(late_data={0: 50}, uncertainty=None),
        Planted(world_size=1, buckets=0),
        Planted(late_data={0: 9}, meets_in_forward=True),  # 8 % of the step
        replace(BUFFERS, buckets=0),  # what is waiting is not known
        replace(BUFFERS, steps=5),  # three steps may be chance
        replace(BUFFERS, steps=0),
    ],
)
def test_waiting_that_exchanges_show_is_no_news(planted: Planted) -> None:
    assert what(planted) == []


def test_waiting_before_the_exchange_is_reported() -> None:
    summary = found(BUFFERS)
    assert summary.ranks[1].wait_ms == pytest.approx(0), "in exchanges"
    assert [*summary.phase_skew] == [
        PhaseSkew("between_steps", [0], 1, 50.0),
        PhaseSkew("forward", [1], 0, 50.0),
    ]


def test_of_many_that_wait_none_is_left_out() -> None:
    assert what(FOUR) == [("between_steps", [2], 0, 40), ("forward", [0, 1, 3], 2, 40)]
    assert "forward (ranks 0, 1, 3: +40.0 ms)" in found(FOUR).notes[0]
    assert "forward (11 of 12 ranks: +40.0 ms)" in found(replace(FOUR, world_size=12)).notes[0]


def test_a_rank_that_waits_longer_than_half_as_long_is_reported_too() -> None:
    planted = replace(FOUR, late_data={0: 40, 1: 10, 2: 25})
    assert what(planted) == [("between_steps", [0, 2], 3, 40), ("forward", [3, 1], 0, 40)]


def test_a_late_rank_may_wait_more_than_those_that_wait_for_it() -> None:
    """As one whose gradients the leader of its node exchanges: it waits for the leader's links."""

    def phases(waited: int) -> list[PhaseSkew]:
        """Rank 1 waits so long for rank 0, whose data take 200 ns longer in every step."""
        table = step_table(Planted(steps=5).run(), range(5))
        values = np.zeros((5, 2, len(COLUMNS)))
        values[..., COLUMNS.index("duration")] = 1000
        values[..., COLUMNS.index("exchange")] = 1
        values[:, 0, COLUMNS.index("between_steps")] = 200
        values[:, 0, COLUMNS.index("waited")] = 4000 / 5
        values[:, 1, COLUMNS.index("waited")] = waited / 5
        waited_for = np.array([[0.0, 4000.0], [waited, 0.0]])
        return find_phase_skew(replace(table, values=values, waited_for=waited_for))

    assert not phases(600)
    assert phases(400)


def test_late_in_some_steps_only_is_chance() -> None:
    """A single pause in data, after which rank 1 waits before its forward pass."""
    planted = replace(BUFFERS, steps=12)
    quiet, late = replace(planted, late_data={}).run(), planted.run()

    def mixed(steps: set[int]) -> Run:
        run = quiet
        for rank, each in quiet.ranks.items():
            of_rank = {**each.steps, **{step: late.ranks[rank].steps[step] for step in steps}}
            run = replaced(run, rank, steps=of_rank)
        return run

    assert what(mixed({3, 7, 9})) == []
    assert len(what(mixed({2, 4, 6, 8, 10}))) == 2


def moved(run: Run, rank: int, **milliseconds: int) -> Run:
    """A rank that takes longer in phases of every step; its exchanges are as they were."""

    def longer(record: StepRecord) -> StepRecord:
        phases, at = [], 0
        for each in record.phases:
            end = at + each.end - each.begin + 1_000_000 * milliseconds.get(each.name, 0)
            phases.append(replace(each, begin=at, end=end))
            at = end
        return replace(record, phases=phases, duration=at)

    return changed(run, longer, rank)


@pytest.mark.parametrize(
    ("of_0", "of_1", "late"),
    [
        ({"optimizer": 30}, {"between_steps": 30}, "rank 0 (optimizer)"),
        ({"optimizer": 30}, {"forward": 30}, "rank 0 (optimizer)"),
        ({"forward": 30}, {"between_steps": 30}, "rank 1 (between steps)"),
    ],
)
def test_who_is_late_is_who_is_longer_first(
    of_0: dict[str, int], of_1: dict[str, int], late: str
) -> None:
    """After an exchange, which all leave together."""
    run = moved(moved(Planted(late_data={0: 1}).run(), 0, **of_0), 1, **of_1)
    (note,) = [each for each in found(run).notes if each.startswith("ranks differ")]
    assert note.endswith(f"; late: {late}")


def test_without_one_who_waits_elsewhere_nobody_is_said_to_be_late() -> None:
    (note,) = found(moved(Planted(late_data={0: 1}).run(), 1, forward=30)).notes
    assert note.startswith("ranks differ: forward (rank 1: +30.0 ms); waiting in")
    assert note.endswith("is counted in these phases")


def test_who_has_waited_before_an_exchange_is_not_to_blame_in_it() -> None:
    """Rank 1 comes 10 ms late to the exchange, after it has waited 50 ms for rank 0."""
    buffers = replace(BUFFERS, buckets=1)  # what is waited for it is exposed
    summary = found(replace(buffers, late={1: 10}))
    assert summary.straggler is None
    assert summary.unavailable["straggler"] == "ranks differ more outside exchanges"
    assert "Straggler" not in summary.headline
    alone = found(Planted(late={1: 10}, buckets=1))
    assert alone.straggler == 1
    more = found(replace(buffers, late={1: 60}))  # more than what it has waited
    assert more.straggler == 1
    assert more.headline.endswith(" Straggler: rank 1.")


def test_phases_of_the_ranks_are_there_for_all_to_see() -> None:
    summary = found(BUFFERS)
    told = json.loads(to_json(summary.as_dict()))
    assert [each["phases_ms"] for each in told["ranks"]] == [
        {"between_steps": 52, "forward": 20, "backward": 40, "optimizer": 5},
        {"between_steps": 2, "forward": 70, "backward": 40, "optimizer": 5},
    ]
    assert told["phase_skew"][0] == {
        "phase": "between_steps",
        "ranks": [0],
        "fastest_rank": 1,
        "excess_ms": 50,
    }
    table = ranks_table(summary)
    assert tuple(each.key for each in table.columns[6:10]) == PHASES
    assert table.rows[1][6:10] == ("2.00", "70.0", "40.0", "5.00")


def test_a_forward_pass_that_is_in_backward_is_no_zero() -> None:
    def nested(step: StepRecord) -> StepRecord:
        return replace(step, phases=[p for p in step.phases if p.name != "forward"])

    run = changed(Planted().run(), nested)
    assert [each.phases_ms["forward"] for each in summarize(run).ranks] == [None, None]
