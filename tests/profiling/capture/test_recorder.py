"""Buckets, spans and exchanges of a step, and which steps have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planted import MS, Planted, changed, check_identities, replace, replaced, twice

from lightning_dist.measurement.microbenchmark import HostClock
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.analysis.parts import (
    Interval,
    difference,
    intersection,
    length,
    union,
)
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import BUCKET_COLUMNS, step_table
from lightning_dist.profiling.capture import profile_session as session
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, BucketTimes, Span, StepRecord
from lightning_dist.profiling.capture.profile_session import (
    Governor,
    ProfileSessionSettings,
    cost_of_an_event,
)
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe

DRAWN = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def points(intervals: list[Interval]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


@settings(max_examples=300, deadline=None)
@given(a=DRAWN, b=DRAWN)
@example(a=[(10, 20)], b=[(0, 5), (7, 12), (14, 16), (18, 30)])
@example(a=[(0, 9), (12, 30)], b=[(3, 20), (22, 23)])
def test_they_are_sets_of_points(a: list[Interval], b: list[Interval]) -> None:
    one, other = union(a), union(b)
    assert points(one) == points(a)
    assert points(intersection(one, other)) == points(a) & points(b)
    assert points(difference(one, other)) == points(a) - points(b)
    assert length(one) == len(points(a))
    for each in (one, intersection(one, other), difference(one, other)):
        assert each == union(each)


def recorder() -> Recorder:
    ticks: Iterator[int] = count(1000)
    return Recorder(lambda: next(ticks))


def taken(recorder: Recorder, begin: int) -> tuple[tuple[BucketTimes, ...], tuple[Span, ...]]:
    buckets, spans = recorder.take()
    step = PendingStep(begin, begin, buckets=buckets, spans=spans).read(recorder.device_clock)
    return step.buckets, step.spans


def test_waiting_is_not_work() -> None:
    taking = recorder()
    over = taking.works(3, "decode")  # 1000
    waited = taking.waits()  # 1001
    waited()  # 1002
    over()  # 1003
    _, spans = taken(taking, 1000)
    assert spans == (Span("decode", 3, 0, 1), Span("decode", 3, 2, 3))


def test_waiting_outside_of_work_is_nothing() -> None:
    taking = recorder()
    taking.waits()()
    assert taken(taking, 0) == ((), ())


class Work:
    """A collective that ends when it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails, self._over = fails, threading.Event()

    def end(self) -> Work:
        self._over.set()
        return self

    def wait(self) -> None:
        assert self._over.wait(30)
        if self._fails:
            raise RuntimeError("connection reset by peer")


def launch(taking: Recorder, op: str, group: str, work: Work) -> None:
    see = taking.launches(op, group=group, sent=10)
    assert see is not None
    see(work)


def test_collectives_are_numbered_on_each_group() -> None:
    ticks, ticked = count(1000), threading.Semaphore(0)

    def clock() -> int:
        ticked.release()
        return next(ticks)

    taking = Recorder(clock)
    taking.is_for(2)
    works = [Work() for _ in range(3)]
    for group, work in zip(("intra", "inter", "intra"), works, strict=True):
        launch(taking, "all_to_all", group, work)
    for _ in works:
        assert ticked.acquire(timeout=30)  # of the launch
    for work in works:
        work.end()
        assert ticked.acquire(timeout=30)  # each group has threads of its own
    _, spans = taken(taking, 1000)
    assert spans == (
        Span("exchange", 2, 0, 3, "all_to_all", "intra", 10, 0),
        Span("exchange", 2, 1, 4, "all_to_all", "inter", 10, 0),
        Span("exchange", 2, 2, 5, "all_to_all", "intra", 10, 1),
    )
    launch(taking, "all_gather", "intra", Work().end())
    _, (span,) = taken(taking, 1000)
    assert span.order == 0  # a new step


def test_collectives_of_fsdp_are_of_no_bucket_and_no_sign_of_an_exchange() -> None:
    taking = recorder()
    taking.is_for(2)
    for _ in range(2):
        taking.collective("all_gather", group="intra", sent=10)(None)
    assert not taking.has_exchanged
    _, spans = taken(taking, 1000)
    assert [(each.bucket, each.order, each.blocks) for each in spans] == [
        (OF_NO_BUCKET, 0, True),
        (OF_NO_BUCKET, 1, True),
    ]
    taking.collective("all_gather", group="intra", sent=10)(Work().end())
    _, (span,) = taken(taking, 1000)
    assert (span.order, span.blocks) == (0, False), "a new step, and nobody has waited"
    taking.is_on = False
    taking.collective("all_gather", group="intra", sent=10)(None)
    assert taken(taking, 1000) == ((), ())


def test_one_that_fails_is_no_transfer_and_those_behind_it_are_seen() -> None:
    taking = recorder()
    launch(taking, "all_gather", "flat", Work(fails=True).end())
    launch(taking, "all_gather", "flat", Work().end())
    _, (span,) = taken(taking, 1000)
    assert span.order == 1


def test_one_that_ends_after_its_step_is_in_no_other() -> None:
    taking = recorder()
    launch(taking, "all_gather", "flat", late := Work())
    assert taken(taking, 1000) == ((), ())
    launch(taking, "all_gather", "flat", Work().end())
    late.end()
    _, spans = taken(taking, 1000)
    assert [span.begin for span in spans] == [1]


def test_the_mean_of_a_bucket_is_there_when_its_collective_has_ended() -> None:
    taking = recorder()
    taking.ready(4)  # 1000
    taking.is_for(4)
    see = taking.launches("all_reduce", group="flat", sent=10, mean=(8, 0, 8, "ddp"))  # 1001
    assert see is not None
    see(Work().end())  # seen at 1002
    ((bucket,), (span,)) = taken(taking, 1000)
    assert bucket == BucketTimes(4, 0, 2, 8, 0, 8, "ddp")
    assert span.end == 2


def test_a_mean_that_is_seen_late_is_of_the_pass_that_launched_it() -> None:
    """A thread that waits for a collective may come when the next pass is under way."""
    taking = recorder()
    works = []
    for _ in range(2):
        taking.ready(4)  # 1000, 1002
        taking.is_for(4)
        mean = 8, 0, 8, "ddp"
        see = taking.launches("all_reduce", group="flat", sent=10, mean=mean)  # 1001, 1003
        assert see is not None
        see(work := Work())
        works.append(work)
    for work in works:
        work.end()
    buckets, _ = taken(taking, 1000)
    assert [bucket.ready for bucket in buckets] == [0, 2]


def test_of_a_pass_that_was_tried_again_the_last_counts() -> None:
    taking = recorder()
    taking.ready(0)  # 1000
    taking.ready(0)  # 1001
    taking.note(0, 1005, (8, 0, 4, "int8"))
    taking.note(7, 1005, (8, 0, 4, "int8"))  # never ready
    buckets, _ = taken(taking, 1000)
    assert buckets == (BucketTimes(0, 1, 5, 8, 0, 4, "int8"),)


def test_all_passes_of_a_step_count() -> None:
    taking = recorder()
    for done in (1001, 1009):
        for index in (0, 1):
            taking.ready(index)  # 1000, 1001; 1002, 1003
        for index in (0, 1):
            taking.note(index, done + index, (8, 0, 4, "int8"))
    buckets, _ = taken(taking, 1000)
    assert [(each.index, each.done) for each in buckets] == [(0, 1), (1, 2), (0, 9), (1, 10)]
    assert sum(each.raw for each in buckets) == 32


def test_one_that_is_off_records_nothing_but_counts_on() -> None:
    taking = recorder()
    taking.is_on = False
    taking.ready(0)
    taking.works(0, "encode")()
    assert taking.launches("all_gather", group="flat", sent=1) is None
    taking.finished([(0, [])])
    assert taking.cost(1.0) == 0
    assert taken(taking, 0) == ((), ())


def test_the_cost_of_an_event_is_that_of_one_look_at_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 10 < cost_of_an_event() < 2_000_000  # a busy machine
    now = 0

    def slow() -> int:
        nonlocal now
        now += 50_000
        return now

    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    assert cost_of_an_event(HostClock(slow)) == 50_000
    assert now == 1000 * 50_000


MILLISECOND = 1_000_000


def run(
    governor: Governor, *, cost: float, steps: int, of: int = 10 * MILLISECOND, first: int = 0
) -> float:
    """Share of the last half of the steps that the profiler took."""
    shares = []
    for step in range(first, first + steps):
        wanted = governor.wants(step)
        if wanted:
            governor.spent(cost, of=of)
        shares.append(cost / of if wanted else 0.0)
    half = shares[steps // 2 :]
    return sum(half) / len(half)


@pytest.mark.parametrize("cost", [0.01, 0.3, 1.0, 4.0, 30.0])
def test_the_mean_cost_stays_within_the_budget(cost: float) -> None:
    assert run(Governor(0.01), cost=cost * MILLISECOND, steps=20_000) <= 0.0102


def test_a_profiler_that_is_cheap_looks_at_every_step() -> None:
    governor = Governor(0.01)
    run(governor, cost=0.05 * MILLISECOND, steps=100)
    assert governor.period == 1


def test_it_looks_again_when_steps_take_longer() -> None:
    governor = Governor(0.01)
    run(governor, cost=1.0 * MILLISECOND, steps=2000)
    assert governor.period >= 8
    run(governor, cost=1.0 * MILLISECOND, steps=20_000, of=1000 * MILLISECOND, first=2000)
    assert governor.period == 1


def test_ranks_that_decide_for_themselves_have_steps_in_common() -> None:
    quick, slow = Governor(0.01), Governor(0.01)
    seen: list[set[int]] = [set(), set()]
    for step in range(4000):
        for governor, cost, steps in ((quick, 0.3, seen[0]), (slow, 2.5, seen[1])):
            if governor.wants(step):
                governor.spent(cost * MILLISECOND, of=10 * MILLISECOND)
                steps.add(step)
    assert quick.period < slow.period
    late = {step for step in seen[1] if step > 2000}
    assert late
    assert late <= seen[0]


@pytest.mark.parametrize("every", [2, 3, 4, 10, 64, 89])
@pytest.mark.parametrize("period", [2, 8, 64])
def test_what_happens_every_so_many_steps_is_seen_as_often(period: int, every: int) -> None:
    """An accumulation, a validation, a logger: always or never would be wrong by a factor."""
    governor = Governor(0.01)
    governor.period = period
    steps = [step for step in range(100 * period * every) if governor.wants(step)]
    assert len(steps) == pytest.approx(100 * every, rel=0.03)
    assert sum(step % every == 0 for step in steps) == pytest.approx(100, abs=10)


@pytest.mark.parametrize("budget", [0, -0.1, 1.5])
def test_a_budget_out_of_range(budget: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 1; got {budget}"):
        ProfileSessionSettings(max_overhead=budget)


ONCE = Planted(steps=6).run()
TWICE = twice(ONCE)


def test_all_of_it_counts_and_the_parts_add_up() -> None:
    for one, two in zip(analyse(ONCE, 3), analyse(TWICE, 3), strict=True):
        check_identities(two)
        assert two.ns["exposed"] == 2 * one.ns["exposed"] > 0
        assert two.ns["hidden"] == 2 * one.ns["hidden"] > 0
        assert two.parts["exposed_wait"] == 2 * one.parts["exposed_wait"]
    once, both = summarize(ONCE), summarize(TWICE)
    assert both.traffic.raw_bytes == 2 * once.traffic.raw_bytes
    assert both.traffic.wire_gbps == pytest.approx(once.traffic.wire_gbps)


def test_a_bucket_is_counted_once_for_every_pass() -> None:
    single, double = (step_table(run, [3]).buckets for run in (ONCE, TWICE))
    assert len(single) == len(double) == 4
    for index, (_, once_count, sums) in single.items():
        _, twice_count, twice_sums = double[index]
        assert (once_count, twice_count) == (2, 4), "once on each rank"
        one, two = (dict(zip(BUCKET_COLUMNS, of, strict=True)) for of in (sums, twice_sums))
        for name in set(BUCKET_COLUMNS) - {"ready_ms"}:
            assert two[name] == 2 * one[name], name
        assert two["exposed_ms"] == 0 or two["exposed_ms"] > MS


def test_nothing_is_predicted_of_it() -> None:
    with pytest.raises(ValueError, match="its steps exchange gradients several times"):
        observe(TWICE)


def note_of(run: Run) -> str:
    found = [each for each in summarize(run).notes if "no_sync" in each]
    assert len(found) <= 1
    return "".join(found)


def without_optimizer(run: Run, every: int, *ranks: int) -> Run:
    """In all steps but one of so many."""

    def without(step: StepRecord) -> StepRecord:
        phases = [phase for phase in step.phases if phase.name != "optimizer"]
        return step if step.step % every == 0 else replace(step, phases=phases)

    return changed(run, without, *ranks)


def test_exchanges_that_could_be_spared_are_reported() -> None:
    several = note_of(TWICE)
    assert several.startswith("gradients are exchanged 2 times in a step of an optimizer: ")
    often = without_optimizer(Planted(steps=32).run(), every=3)
    assert note_of(often).startswith("an optimizer stepped after 33% of the gradient exchanges")


def test_steps_that_a_scaler_skips_and_loops_without_optimizers_are_no_such_exchanges() -> None:
    run = Planted(steps=32).run()
    assert note_of(run) == ""
    assert note_of(without_optimizer(run, every=10**6)) == ""  # 0 is left out: none has one
    rare = run.ranks[0].steps[20]
    phases = [phase for phase in rare.phases if phase.name != "optimizer"]
    of_rank = {**run.ranks[0].steps, 20: replace(rare, phases=phases)}
    assert note_of(replaced(run, 0, steps=of_rank)) == ""
