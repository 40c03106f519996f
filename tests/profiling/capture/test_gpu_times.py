"""Times of collectives and of work on a GPU, each recorded when it comes; nothing waits."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from planted import Planted
from planted_gpu import MS, Collective, Gpu

from lightning_dist.measurement.microbenchmark import StreamClock
from lightning_dist.profiling.analysis.breakdown import exposed_in
from lightning_dist.profiling.analysis.parts import length
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.profile_session import ProfileSession, ProfileSessionSettings
from lightning_dist.profiling.capture.recorder import ThreadCompletionWatcher
from lightning_dist.profiling.run import read_run

PATIENCE = 10


class Work:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.seen = threading.Event()

    def end(self) -> bool:
        """Whether that was seen soon."""
        self._over.set()
        return self.seen.wait(PATIENCE)

    def wait(self) -> None:
        assert self._over.wait(3 * PATIENCE)


@pytest.fixture
def watcher() -> Iterator[ThreadCompletionWatcher]:
    watching = ThreadCompletionWatcher(time.monotonic_ns)
    yield watching
    watching.close()


def launched(watcher: ThreadCompletionWatcher, group: str) -> Work:
    work = Work()
    watcher.watch(work, lambda end: work.seen.set(), group=group)
    return work


def test_groups_do_not_wait_for_each_other(watcher: ThreadCompletionWatcher) -> None:
    across, within, control = (launched(watcher, name) for name in ("inter", "intra", "control"))
    assert within.end()
    assert control.end()
    assert not across.seen.is_set()
    assert not watcher.drain(0)
    assert across.end()
    assert watcher.drain(PATIENCE)


def test_a_short_one_does_not_wait_for_the_long_one_before_it(
    watcher: ThreadCompletionWatcher,
) -> None:
    """gloo has two of a group under way at once."""
    long, *others = [launched(watcher, "flat") for _ in range(5)]
    assert all(each.end() for each in others)
    assert not long.seen.is_set()
    assert long.end()


def test_no_more_threads_than_collectives_under_way() -> None:
    before = threading.active_count()
    watcher = ThreadCompletionWatcher(time.monotonic_ns)
    alone = launched(watcher, "control")
    assert threading.active_count() == before + 1
    works = [launched(watcher, "flat") for _ in range(40)]
    assert threading.active_count() == before + 3
    assert all(each.end() for each in (alone, *works))
    watcher.close()


NEAR = 0.01 * MS

FORWARD, BUCKETS, OF_BUCKET, EXCHANGE, OPTIMIZER = 20, 3, 10, 25, 5

EXPOSED = EXCHANGE * BUCKETS - OF_BUCKET * (BUCKETS - 1)  # one after the other on the link

STEP = FORWARD + BUCKETS * OF_BUCKET + EXPOSED + OPTIMIZER


@dataclass
class Training:
    """The host asks for a step in next to no time; the GPU takes :data:`STEP` for it."""

    patch: pytest.MonkeyPatch
    folder: Path
    gpu: Gpu = field(default_factory=Gpu)
    begun: list[int] = field(default_factory=list)
    told: list[StepRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpu.install(self.patch)
        self.patch.setattr(time, "sleep", lambda seconds: self.gpu.sleep(1e3 * seconds))
        self.session = ProfileSession(
            self.folder,
            Planted(steps=0).run().ranks[0].metadata,
            settings=ProfileSessionSettings(max_overhead=1.0),
            device_clock=StreamClock(torch.device("cuda", 0), self.gpu.clock),
            begin_step=lambda step: bool(self.begun.append(step)),
            on_step=self.told.append,
            on_problem=self.problems.append,
            clock=self.gpu.clock,
        )

    def step(self, *, held_up: float = 0) -> None:
        timer, gpu, recorder = self.session.timer, self.gpu, self.session.recorder
        timer.forward()
        gpu.work(FORWARD)
        timer.forward_ended()
        timer.backward()
        link, works = gpu.main.until, []
        for bucket in range(BUCKETS):
            gpu.work(OF_BUCKET)
            recorder.ready(bucket)
            recorder.is_for(bucket)
            see = recorder.launches("all_reduce", group="flat", sent=8, mean=(8, 0, 8, "ddp"))
            until = max(link, gpu.main.until) + EXCHANGE * MS
            work = cast(dist.Work, Collective(gpu, (until - gpu.main.until) / MS, held_up=held_up))
            link = until
            works.append(work)
            if see is not None:
                see(work)
        for work in works:
            work.wait()
        timer.backward_ended(synchronised=True)
        timer.stepping()
        gpu.work(OPTIMIZER)
        timer.stepped()
        gpu.sleep(0.1)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Training:
    return Training(monkeypatch, tmp_path)


def test_steps_are_known_when_the_gpu_has_made_them(training: Training) -> None:
    for _ in range(4):
        training.step()
    assert training.begun == [1, 2, 3], "the fourth ends when the next begins"
    assert training.told == [], "the GPU is in the first"
    assert training.gpu.synchronised == 1, "before the training"
    training.gpu.sleep(2.5 * STEP)
    training.step()
    assert [each.step for each in training.told] == [0, 1]
    training.session.end("finished")
    assert [each.step for each in training.told] == [0, 1, 2, 3, 4]
    assert training.gpu.synchronised == 1
    assert training.problems == []


def test_its_times_are_those_of_the_gpu(training: Training, tmp_path: Path) -> None:
    for _ in range(4):
        training.step()
    training.session.end("finished")
    training.session.close()
    for record in training.told[1:]:  # in the first is what came before
        assert record.duration == pytest.approx(STEP * MS, abs=NEAR)
        lengths = {each.name: each.end - each.begin for each in record.phases}
        of_backward = STEP - FORWARD - OPTIMIZER
        expected = {"forward": FORWARD, "backward": of_backward, "optimizer": OPTIMIZER}
        for name, milliseconds in expected.items():
            assert lengths[name] == pytest.approx(milliseconds * MS, abs=NEAR)
        assert length(exposed_in(record)) == pytest.approx(EXPOSED * MS, abs=NEAR)
        assert len(record.buckets) == BUCKETS
        for number, (bucket, span) in enumerate(zip(record.buckets, record.spans, strict=True)):
            ready = FORWARD + (number + 1) * OF_BUCKET
            done = FORWARD + OF_BUCKET + (number + 1) * EXCHANGE
            assert bucket.ready == pytest.approx(ready * MS, abs=NEAR)
            assert bucket.done == pytest.approx(done * MS, abs=NEAR)
            assert (span.begin, span.end) == (bucket.ready, bucket.done)
    ends = [each.begin + each.duration for each in training.told]
    for end, following in zip(ends, training.told[1:], strict=False):
        assert following.begin == pytest.approx(end, abs=NEAR)
    assert read_run(tmp_path).ranks[0].steps[3] == training.told[3]


def test_a_mark_that_comes_after_its_step_is_waited_for(training: Training) -> None:
    """It is set in one of torch's streams, and others use them too."""
    training.step(held_up=500)
    training.gpu.sleep(2 * STEP)
    training.step()
    assert training.told == []
    training.session.end("finished")
    assert [each.step for each in training.told] == [0, 1]


def test_a_gpu_that_fails_loses_the_last_steps_and_says_so(
    training: Training, tmp_path: Path
) -> None:
    for _ in range(3):
        training.step()
    training.gpu.sleep(1.5 * STEP)
    training.step()
    training.gpu.fails = True
    training.session.end("RuntimeError: CUDA error")
    training.session.close()
    assert training.problems == [
        "steps from 1 on are not in the profile: CUDA error: device-side assert triggered"
    ]
    of_rank = read_run(tmp_path).ranks[0]
    assert list(of_rank.steps) == [0]
    assert of_rank.end is not None


def test_a_gpu_that_hangs_is_waited_for_two_seconds(training: Training) -> None:
    training.step()
    training.step()
    training.gpu.work(3_600_000)
    training.step()
    begin = training.gpu.host
    training.session.end("KeyboardInterrupt: ")
    assert training.gpu.host - begin < 2_100 * MS
    assert [each.step for each in training.told] == [0, 1]
    assert training.problems == [
        "steps from 2 on are not in the profile: the device did not complete them within 2 s"
    ]


def test_at_the_end_of_all_ranks_one_that_is_behind_is_waited_for_longer(
    training: Training,
) -> None:
    """On a slow network two steps may take many seconds."""
    training.step()
    training.gpu.work(30_000)
    training.step()
    training.step()
    training.session.end("finished", timeout=60)
    assert [each.step for each in training.told] == [0, 1, 2]
    assert training.problems == []
