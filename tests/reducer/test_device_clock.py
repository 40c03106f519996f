"""Times of work on a GPU, without waiting for it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from planted_gpu import MS, Gpu

from lightning_dist.measurement.device_clock import HostClock, StreamClock, clock_of

US = 1000
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    (planted := Gpu()).install(monkeypatch)
    return planted


def test_on_a_cpu_they_are_past_at_once() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    first, second = clock.now(), clock.now()
    assert clock.are_past([first, second])
    assert list(clock.read([first, second], since=first)) == [first, second]


def test_they_are_when_the_stream_comes_to_them(gpu: Gpu) -> None:
    clock = StreamClock(CUDA, gpu.clock)
    asked = gpu.host
    gpu.work(3)
    begin = clock.now()
    gpu.work(40)
    end = clock.now()
    assert gpu.host - asked < 1 * MS
    assert not clock.are_past([begin])
    gpu.sleep(4)
    assert clock.are_past([begin])
    assert not clock.are_past([begin, end])
    gpu.sleep(40)
    times = clock.read([begin, end], since=begin)
    assert times == [
        pytest.approx(asked + 3 * MS, abs=5 * US),
        pytest.approx(asked + 43 * MS, abs=5 * US),
    ]
    assert times[1] - times[0] == pytest.approx(40 * MS, abs=10)
    assert gpu.synchronised == 1, "once, at the begin"


def test_clocks_that_drift_are_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu := Gpu(rate=1 + 50e-6)).install(monkeypatch)
    clock = StreamClock(CUDA, gpu.clock)
    marks = []
    for _ in range(3600):
        gpu.work(900)
        marks.append((clock.now(), gpu.host + 900 * MS))
        gpu.sleep(1000)
        clock.compare()
    for (before, _), (mark, at) in pairwise(marks):
        (first, read) = clock.read([before, mark], since=before)
        assert read == pytest.approx(at, abs=150 * US), "of a second before: 50 millionths, twice"
        assert read - first == pytest.approx(1000 * MS, abs=100 * US)


def test_within_a_step_they_are_exact_however_old_the_comparison(gpu: Gpu) -> None:
    """Five hours after it a float32 of milliseconds has steps of two."""
    clock = StreamClock(CUDA, gpu.clock)
    gpu.sleep(5 * 3600 * 1000)
    marks = [clock.now()]
    for milliseconds in (1.4, 5.8, 0.8):
        gpu.work(milliseconds)
        marks.append(clock.now())
    gpu.sleep(10)
    times = clock.read(marks, since=marks[0])
    took = [after - before for before, after in pairwise(times)]
    assert took == pytest.approx([1.4 * MS, 5.8 * MS, 0.8 * MS], abs=2 * US)


def test_where_the_device_has_no_time_the_last_comparison_stays(gpu: Gpu) -> None:
    clock = StreamClock(CUDA, gpu.clock)
    gpu.work(500, gpu.streams[0])  # its queue is shared with somebody's
    before = gpu.host
    clock.compare()
    assert gpu.host - before < 0.1 * MS
    mark = clock.now()
    assert clock.read([mark], since=mark) == [pytest.approx(gpu.host, abs=5 * US)]
