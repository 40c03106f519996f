from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from lightning_dist.profiling.recorder import Recorder, cost_of_an_event
from lightning_dist.profiling.records import BucketTimes, Span


def recorder() -> Recorder:
    ticks: Iterator[int] = count(1000)
    return Recorder(lambda: next(ticks))


def test_waiting_is_not_work() -> None:
    taking = recorder()
    over = taking.works(3, "decode")  # 1000
    waited = taking.waits()  # 1001
    waited()  # 1002
    over()  # 1003
    _, spans = taking.take(1000)
    assert spans == (Span("decode", 3, 0, 1), Span("decode", 3, 2, 3))


def test_waiting_outside_of_work_is_nothing() -> None:
    taking = recorder()
    taking.waits()()
    assert taking.take(0) == ((), ())


def test_collectives_are_numbered_on_each_group() -> None:
    taking = recorder()
    taking.is_for(2)
    ends = [
        taking.launched("all_to_all", group=group, sent=10) for group in ("intra", "inter", "intra")
    ]
    ends[1]()  # 1003
    ends[0]()
    ends[2]()
    _, spans = taking.take(1000)
    assert spans == (
        Span("exchange", 2, 0, 4, "all_to_all", "intra", 10, 0),
        Span("exchange", 2, 1, 3, "all_to_all", "inter", 10, 0),
        Span("exchange", 2, 2, 5, "all_to_all", "intra", 10, 1),
    )
    taking.launched("all_gather", group="intra", sent=1)()
    _, (span,) = taking.take(1000)
    assert span.order == 0  # a new step


def test_of_a_pass_that_was_tried_again_the_last_counts() -> None:
    taking = recorder()
    taking.ready(0)  # 1000
    taking.ready(0)  # 1001
    taking.note(BucketTimes(0, 0, 1005, 8, 0, 4, "int8"))
    taking.note(BucketTimes(7, 0, 1005, 8, 0, 4, "int8"))  # never ready
    buckets, _ = taking.take(1000)
    assert buckets == (BucketTimes(0, 1, 5, 8, 0, 4, "int8"),)


def test_one_that_is_off_records_nothing_but_counts_on() -> None:
    taking = recorder()
    taking.is_on = False
    taking.ready(0)
    taking.works(0, "encode")()
    taking.launched("all_gather", group="flat", sent=1)()
    taking.settled([(0, [])])
    assert taking.events == 0
    assert taking.take(0) == ((), ())


def test_an_event_takes_microseconds() -> None:
    assert 10 < cost_of_an_event() < 1_000_000
