"""Buckets of another size, by arithmetic."""

from __future__ import annotations

import random

import pytest
from planted import MS, Planted, replace

from lightning_dist.profiling.capture.events import Phase
from lightning_dist.profiling.whatif.buckets import begin_of_gradients, recut
from lightning_dist.profiling.whatif.candidates import in_buckets, other_buckets
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import Wish, predict
from lightning_dist.profiling.whatif.simulate import Bucket

MB = 2**18
"""Elements."""

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)


def buckets(*sizes: float, each: float = 1.0, begin: float = 0.0) -> list[Bucket]:
    """Of so many MB, ready ``each`` second of MB."""
    found: list[Bucket] = []
    for size in sizes:
        ready = found[-1].ready if found else begin
        found.append(Bucket(ready + size * each, size * MB))
    return found


def sizes(found: list[Bucket]) -> list[float]:
    return [bucket.elements / MB for bucket in found]


@pytest.mark.parametrize(
    ("before", "cap", "after"),
    [
        ([25, 25, 10], 25, [25, 25, 10]),
        ([28, 30, 26, 4], 25, [28, 30, 26, 4]),  # the last parameter went over the cap
        ([60, 3], 25, [25, 35, 3]),
        ([100], 25, [25, 25, 25, 25]),
        ([10, 10, 10, 10, 10], 25, [30, 20]),
        ([1, 25, 25], 25, [26, 25]),  # DDP's first bucket is of 1 MB unless a cap is given
        ([10, 10], 100, [20]),
        ([3], 5, [3]),
    ],
)
def test_what_is_cut_where(before: list[float], cap: float, after: list[float]) -> None:
    assert sizes(recut(buckets(*before), cap, begin=0.0)) == after


def test_gradients_become_ready_evenly_between_the_buckets_of_the_run() -> None:
    # 10 MB from 2 s to 3 s, then 10 MB until 7 s.
    run = [Bucket(3.0, 10 * MB), Bucket(7.0, 10 * MB)]
    found = recut(run, 4, begin=2.0)
    assert sizes(found) == [4, 4, 4, 4, 4]
    assert [each.ready for each in found] == pytest.approx([2.4, 2.8, 3.8, 5.4, 7.0])


def test_nothing_is_lost_and_time_does_not_run_backwards() -> None:
    rng = random.Random(3)
    for _ in range(200):
        run, ready = [], rng.uniform(0, 1)
        begin = ready
        for _ in range(rng.randrange(1, 12)):
            ready += rng.uniform(0, 1)
            run.append(Bucket(ready, rng.uniform(0.01, 60) * MB))
        cap = rng.uniform(0.5, 80)
        found = recut(run, cap, begin=begin)
        assert sum(sizes(found)) == pytest.approx(sum(sizes(run)))
        times = [begin, *(each.ready for each in found)]
        assert times == sorted(times)
        assert times[-1] == run[-1].ready
        assert all(size >= cap * (1 - 1e-9) for size in sizes(found)[:-1])
        assert sizes(recut(found, cap, begin=begin)) == pytest.approx(sizes(found))


def test_the_pass_that_fills_the_buckets_is_the_last_of_those_that_add_up() -> None:
    record = DDP.run().ranks[0].steps[4]
    assert begin_of_gradients(record) == 22 * MS
    twice = replace(record, phases=(Phase("backward", 3, 9), *record.phases))
    assert begin_of_gradients(twice) == 22 * MS
    assert begin_of_gradients(replace(record, phases=())) == record.buckets[0].ready
    assert observe(DDP.run()).begin == pytest.approx(0.022)


def test_one_large_bucket_begins_late() -> None:
    observed = observe(DDP.run())
    (one, *_) = predict(observed, in_buckets([Wish()], [100.0]), costs={}).others
    # ready when all is, after 40 ms of backward pass, and then 16 MB at 100 MB/s
    assert one.bucket_mb == 100
    assert one.exposed_ms == pytest.approx(160)
    assert one.step_ms == pytest.approx(22 + 40 + 160 + 5)
    (small,) = predict(observed, in_buckets([Wish()], [1.0]), costs={}).others
    assert small.step_ms is not None
    assert small.step_ms < observed.step * 1e3
    assert small.sent_mb == pytest.approx(one.sent_mb)


def test_sizes_that_change_nothing_are_not_asked_about() -> None:
    observed = observe(DDP.run())  # 4 buckets of 3.8 MB
    found = other_buckets(observed, like=Wish(), sizes=(3.5, 3.9, 5, 25, 100))
    assert [each.bucket_mb for each in found] == [3.9, 5, 25]
    assert {(each.codec, each.form) for each in found} == {(None, None)}


@pytest.mark.parametrize("size", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bucket_has_a_size(size: float) -> None:
    with pytest.raises(ValueError, match="bucket_mb must be above 0 MB"):
        Wish(bucket_mb=size)
