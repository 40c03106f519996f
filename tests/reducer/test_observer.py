"""What is measured while a reducer works: collectives, bytes, what codecs cost, times on a GPU."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from feeding import EVERY_CODEC, Fed, backward, compressed, feed, step_digest
from layouts import FORMS, Layout, flat
from planted_gpu import MS, Gpu
from threads import on_threads
from torch import nn
from worlds import Rank, run_threads

from lightning_dist import compress_ddp
from lightning_dist.codecs import Int8
from lightning_dist.measurement import CANDIDATES, calibration, exposure
from lightning_dist.measurement.calibration import calibrate
from lightning_dist.measurement.microbenchmark import CodecWork, HostClock, StreamClock, clock_of
from lightning_dist.ranks.channel import PendingWork
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import Observer, Phase
from lightning_dist.reducer.units.base import CodecGroup

SETTINGS = {"min_compress_numel": 256}


@dataclass
class Story(Observer):
    """Everything that was told, with what was going on."""

    open: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    under_way: list[PendingWork] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    finished_steps: list[list[int]] = field(default_factory=list)
    codecs: set[str] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)

    def ready(self, bucket: int) -> None:
        self.buckets.append(bucket)

    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        self.threads.add(threading.get_ident())
        return self._begin(f"{phase} {bucket}")

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[PendingWork], None]:
        self.collectives.append((group, op, sent))
        return self.under_way.append

    def waits(self) -> Callable[[], None]:
        self.threads.add(threading.get_ident())
        return self._begin("waits")

    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        self.finished_steps.append([index for index, _ in buckets])
        self.codecs |= {group.codec.name for _, groups in buckets for group in groups}

    def _begin(self, what: str) -> Callable[[], None]:
        self.open[what] += 1

        def end() -> None:
            self.open[what] -= 1

        return end


CASES = [
    (flat(3), EVERY_CODEC),
    *((layout, ("int8", "none", "threshold")) for layout in (flat(2), *FORMS)),
]


@pytest.mark.parametrize(("layout", "codecs"), CASES, ids=str)
@on_threads("layout")
def test_every_collective_and_every_byte(rank: Rank, layout: Layout, codecs: Sequence[str]) -> None:
    def step(model: nn.Module, reducer: Reducer, number: int) -> str:
        return step_digest(backward(model, feed(rank.rank, number)), reducer)

    for codec in codecs:
        form, story = {**layout.form, **SETTINGS}, Story()
        with compressed(rank, Fed(), codec, **form) as (model, reducer):
            reducer.observe(story)
            digests = [step(model, reducer, number) for number in range(3)]
            wire = reducer.comm_stats()["wire_bytes"]
            reducer.detach(story)
            digests.append(step(model, reducer, 3))
        with compressed(rank, Fed(), codec, **form) as (model, reducer):
            assert digests == [step(model, reducer, number) for number in range(4)], codec
        assert sum(sent for group, _, sent in story.collectives if group != "control") == wire
        assert +story.open == Counter()  # all that began has ended
        assert len(story.under_way) == len(story.collectives)
        for work in story.under_way:
            work.wait()  # a second one who waits does no harm
        assert story.buckets == [0, 0, 0]
        assert story.finished_steps == [[0]] * 3
        assert codec.partition(":")[0] in story.codecs
        assert len(story.threads) == 1  # not that of the backward pass


@on_threads(2)
def test_an_observer_that_is_attached_while_another_one_ends_stays(rank: Rank) -> None:
    """The training's thread attaches it while the reducer's takes the other one off."""
    with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
        late = Story()

        class Ends(Observer):
            @property
            def done(self) -> bool:  # type: ignore[override]
                reducer.detach(late)
                reducer.observe(late)
                return True

        reducer.observe(Ends())
        backward(model, feed(rank.rank, 0))
        backward(model, feed(rank.rank, 1))
        reducer.detach(late)
        assert len(late.finished_steps) == 1


STEPS = 30


def train(rank: Rank) -> None:
    torch.manual_seed(0)
    model = rank.ddp(nn.Linear(64, 64))
    handle = compress_ddp(model, "int8", groups=rank.groups(), min_compress_numel=0)
    inputs = torch.ones(2, 64)
    for _ in range(STEPS):
        model(inputs).sum().backward()
    handle.close()


@pytest.mark.parametrize(
    ("bytes_per_second", "said"), [(1e12, 1), (1e3, 0)], ids=["fast link", "slow link"]
)
def test_it_is_said_once_where_the_link_is_fast(
    bytes_per_second: float,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(exposure, "measure_link", lambda network: bytes_per_second)
    with caplog.at_level(logging.WARNING):
        run_threads(train, 2)
    assert caplog.text.count("Compression costs more than it saves") == said
    assert caplog.text.count("or ranks wait for one that is late") == said
    assert caplog.text.count("CommProfiler()") == said


SECOND = 1_000_000_000


def test_every_candidate_has_a_cost_and_bytes() -> None:
    threads = torch.get_num_threads()
    costs = calibrate(units=1, rounds=1)
    assert tuple(costs) == CANDIDATES
    assert torch.get_num_threads() == threads
    for name, cost in costs.items():
        assert cost.name == name
        assert cost.encode > 0
        assert cost.decoding(1) >= 0
        assert cost.decoding(4) >= cost.decoding(1)
        assert cost.source == "measured alone on this machine now, not compiled"
    assert costs["int8"].wire == Int8().wire_bytes(1 << 20) / (1 << 20)
    assert [costs[name].wire for name in ("none", "fp16")] == [4.0, 2.0]
    assert costs["none"].decoding(1) == 0  # added up in the bucket itself
    assert costs["powersgd"].wire == 4 * 4 / 1024
    assert costs["powersgd"].assumption
    assert {name for name, cost in costs.items() if cost.assumption} == {"powersgd"}


def test_options_count() -> None:
    costs = calibrate(["topk:ratio=0.1", "topk"], units=1, rounds=1)
    assert costs["topk:ratio=0.1"].wire == pytest.approx(10 * costs["topk"].wire, rel=0.05)


def test_bytes_that_depend_on_the_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="depend on the gradient, got 'threshold'"):
        calibrate(["threshold"])


def test_a_codec_that_alternates_costs_the_mean_of_both() -> None:
    now = 0

    class Alternating(CodecWork):
        def __init__(self) -> None:
            self.step = 0

        def prepare(self) -> None:
            self.step += 1

        def encode(self) -> None:
            nonlocal now
            now += SECOND if self.step % 2 else 3 * SECOND

        def decode(self) -> None:
            nonlocal now
            now += 5 * SECOND

        def exchange(self) -> None:
            nonlocal now
            now += 7 * SECOND  # not of the codec

    clock = HostClock(lambda: now)
    assert calibration._seconds(Alternating(), rounds=3, clock=clock) == (2.0, 5.0)


def test_on_a_gpu_it_is_the_time_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for the work, which takes it next to no time."""
    (gpu := Gpu()).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.work(cycles / 2e6))

    class Asked(CodecWork):
        def __init__(self) -> None:
            pass

        def prepare(self) -> None:
            gpu.work(30)

        def encode(self) -> None:
            gpu.work(0.25)

        def decode(self) -> None:
            for _ in range(7):
                gpu.sleep(2)  # to launch a kernel takes longer than the kernel
                gpu.work(1)

        def exchange(self) -> None:
            gpu.work(11)  # not of the codec

    clock = StreamClock(torch.device("cuda", 0), gpu.clock)
    encode, decode = calibration._seconds(Asked(), rounds=3, clock=clock)
    assert encode == pytest.approx(0.25e-3, rel=0.01)
    assert decode == pytest.approx(7e-3, rel=0.01)


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
