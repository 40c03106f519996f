"""What a step costs the process that is profiled, beside torch's own tools too."""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from needs import needs
from planted import MS, Planted, bare, replace
from processes import run

from lightning_dist.base.features import FLIGHT_RECORDER
from lightning_dist.base.versions import installed_version, release
from lightning_dist.frameworks.comm_profiler import log_summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import (
    OF_NO_BUCKET,
    ClockRecord,
    EndRecord,
    Phase,
    Span,
    StepRecord,
    from_line,
    to_line,
)
from lightning_dist.profiling.capture.files import RankFile
from lightning_dist.profiling.capture.profile_session import (
    ProfileSession,
    ProfileSessionSettings,
    TorchTracer,
)
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.session.live import LiveProfile, of_one_rank

BUCKETS = 40


class Ended:
    def wait(self) -> None:
        pass


def record(recorder: Recorder) -> None:
    """A step as a reducer tells of it."""
    for bucket in range(BUCKETS):
        recorder.ready(bucket)
        recorder.works(bucket, "encode")()
        see = recorder.launches("all_gather", group="flat", sent=1)
        assert see is not None
        see(Ended())
        recorder.works(bucket, "decode")()
        recorder.note(bucket, recorder.device_clock.now(), (4, 0, 1, "int8"))


def calls_of(call: Callable[[], Any]) -> int:
    """How many functions of Python it takes; unlike its time the same on any machine."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def test_a_detailed_step_costs_about_one_call_a_row() -> None:
    recorder = Recorder()
    record(recorder)
    rows = 4 * BUCKETS

    def write_down() -> None:
        buckets, spans = recorder.take()
        step = PendingStep(0, 1, buckets=buckets, spans=spans).read(recorder.device_clock)
        assert len(step.buckets) + len(step.spans) == rows
        to_line(step)

    assert calls_of(write_down) < 1.5 * rows + 50


class Clock:
    """Shows what it is set to."""

    now = 0

    def __call__(self) -> int:
        return self.now


def step(session: ProfileSession, clock: Clock, seconds: float) -> None:
    """Forward, backward, optimizer, a third each."""
    timer = session.timer
    timer.forward()
    for event in (timer.backward, lambda: timer.backward_ended(synchronised=True)):
        clock.now += round(seconds / 3 * 1e9)
        event()
    clock.now += round(seconds / 3 * 1e9)
    timer.stepped()


def profile(folder: Path | None = None, *, rank: int = 0, **arguments: Any) -> ProfileSession:
    about = Planted(steps=0).run().ranks[rank].metadata
    return ProfileSession(folder, about, settings=ProfileSessionSettings(), **arguments)


def test_lines_are_in_the_file_after_a_second(tmp_path: Path) -> None:
    clock = Clock()
    about = Planted(steps=0).run().ranks[1].metadata
    session = profile(tmp_path, rank=1, clock=clock)
    path = tmp_path / "rank1.jsonl"
    assert from_line(path.read_text()) == about  # at once: it may be killed

    def steps() -> list[int]:
        records = map(from_line, path.read_text().splitlines())
        return [each.step for each in records if isinstance(each, StepRecord)]

    for _ in range(3):
        step(session, clock, 0.6)
    assert steps() == [0, 1]  # the third is over when the next begins
    step(session, clock, 0.6)
    session.end("finished")
    assert steps() == [0, 1, 2, 3]
    ended = from_line(path.read_text().splitlines()[-1])
    assert ended == EndRecord("finished", at=clock.now)
    assert from_line(path.read_text().splitlines()[0]) == about
    session.note(last := ClockRecord(5, 6, 7))
    session.close()
    assert from_line(path.read_text().splitlines()[-1]) == last


def test_what_a_profile_needs_is_counted_in_its_step() -> None:
    clock, told = Clock(), []
    session = profile(on_step=told.append, clock=clock)
    for spent in (7 * MS, 0, 0):
        session.recorder.spent += spent
        step(session, clock, 0.6)
    session.end("finished")
    assert [each.duration for each in told] == [600 * MS] * 3, "kept nowhere, and reported"
    assert told[0].overhead >= 7 * MS
    assert [each.overhead for each in told[1:]] == [0, 0]


def test_a_disk_that_fails_is_reported_and_no_reason_to_stop(tmp_path: Path) -> None:
    clock, told = Clock(), []
    session = profile(tmp_path, rank=1, on_problem=told.append, clock=clock)
    handle = os.open("/dev/full", os.O_WRONLY)
    os.dup2(handle, session._file._file.fileno())
    os.close(handle)
    for _ in range(4):
        step(session, clock, 0.6)
    session.end("finished")
    session.close()
    path = tmp_path / "rank1.jsonl"
    assert told == [f"{path}: No space left on device; further steps of this rank are not saved"]


def test_a_disk_that_is_full_in_the_middle_of_a_line_is_reported(tmp_path: Path) -> None:
    told: list[str] = []
    file = RankFile(tmp_path, rank=0, on_problem=told.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
    try:
        file.write([EndRecord(50 * "x")])
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    path = tmp_path / "rank0.jsonl"
    assert told == [f"{path}: File too large; further steps of this rank are not saved"]
    assert path.read_text() == '{"kind":"end","reason":"xxxxxx'


def test_a_disk_that_fails_at_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    session = profile(tmp_path, rank=1, on_problem=told.append)
    session.end("finished")

    def failing(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    session.close()
    assert told == [f"{tmp_path / 'rank1.jsonl'}: Input/output error; it may be incomplete"]


def test_what_disturbs_a_step_makes_nobody_look_less_often(tmp_path: Path) -> None:
    """The export of a trace took longer than any step."""
    clock, told = Clock(), []

    def begin_step(step: int) -> bool:
        clock.now += 5_000 * MS if step in (3, 4) else 0
        return step in (3, 4)

    session = profile(tmp_path, begin_step=begin_step, on_step=told.append, clock=clock)
    for _ in range(9):
        step(session, clock, 0.6)
    session.end("finished")
    session.close()
    assert [each.detailed for each in told] == [True] * 7
    records = map(from_line, (tmp_path / "rank0.jsonl").read_text().splitlines())
    kept = [each.step for each in records if isinstance(each, StepRecord)]
    assert kept == [each.step for each in told] == [0, 1, 2, 5, 6, 7, 8]


UNEVEN = Planted(slow_steps={1: 4, 3: 9})


def logged(run: Run) -> dict[str, float]:
    """By a profile of rank 0 that is asked once, at the end."""
    live = LiveProfile()
    for step in run.ranks[0].steps.values():
        live.add(step)
    metrics = live.take()
    assert live.take() == {}
    return metrics


def within_the_exchange(step: StepRecord) -> StepRecord:
    """An optimizer of a second model began before the mean was there."""
    end = max(bucket.done for bucket in step.buckets)
    return replace(step, phases=[*step.phases[:-1], Phase("optimizer", end - 5_000_000, end)])


@pytest.mark.parametrize("change", [lambda step: step, within_the_exchange])
def test_what_is_exposed_is_the_same_everywhere(change: Any) -> None:
    of_rank = UNEVEN.run().ranks[0]
    steps = {number: change(step) for number, step in of_rank.steps.items()}
    run = Run({0: replace(of_rank, steps=steps)})
    told, summary = logged(run), summarize(run, warmup_steps=0)
    assert summary.exposed_fraction is not None
    assert told["comm/exposed_ms"] == pytest.approx(summary.exposed_ms)
    assert told["comm/exposed_fraction"] == pytest.approx(summary.exposed_fraction)
    assert told["comm/hidden_ms"] == pytest.approx(summary.hidden_ms)
    assert told["comm/step_ms"] == pytest.approx(summary.step_ms["mean"])


@pytest.mark.parametrize("step", [0, 4])
def test_steps_of_a_window_need_not_have_the_same_metrics(step: int) -> None:
    own = Span("exchange", OF_NO_BUCKET, 0, 6_000_000, "all_gather", "flat", 100, blocks=True)
    told = logged(bare(Planted().run(), only=[step], spans=[own]))
    assert told["comm/exposed_fsdp_ms"] == pytest.approx(1)
    assert told["comm/codec_total_ms"] == pytest.approx(10), "the replaced spans held 12 ms of 72"


def test_stock_ddp_has_no_time_of_a_codec() -> None:
    ddp = Planted(codec="ddp", encode=0, decode=0).run()
    assert "codec_total_ms" not in of_one_rank(ddp.ranks[0].steps[3])
    assert of_one_rank(Planted().run().ranks[0].steps[3])["codec_total_ms"] == pytest.approx(12)


@pytest.mark.parametrize(("steps", "rows"), [(6, 1), (0, 0)])
def test_loggers_hear_nothing_of_a_run_without_steps(steps: int, rows: int, tmp_path: Path) -> None:
    heard: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: heard.append(metrics))
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=steps)
    log_summary(trainer, summarize(Planted(steps=steps).run()), tmp_path, upload="report")
    assert len(heard) == rows


def test_a_trace_that_cannot_be_written_is_reported_and_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    told: list[str] = []
    folder = tmp_path / "taken" / "run-0"
    tracer = TorchTracer(folder, rank=2, wanted=range(1), on_problem=told.append)
    tracer.begin_step(0)
    tracer.begin_step(1)
    tracer.close()
    assert told == [
        f"{folder / 'torch-trace-rank2-step0.json.gz'} was not written: Not a directory"
    ]


def test_the_step_in_which_the_trace_is_written_is_disturbed_too(tmp_path: Path) -> None:
    tracer = TorchTracer(tmp_path, rank=0, wanted=range(1, 3))
    disturbed = [tracer.begin_step(step) for step in range(6)]
    assert disturbed == [False, True, True, True, False, False]
    assert (tmp_path / "torch-trace-rank0-step1.json.gz").is_file()


def test_steps_that_never_come_are_reported(tmp_path: Path) -> None:
    told: list[str] = []
    tracer = TorchTracer(tmp_path, rank=0, wanted=range(100, 103), on_problem=told.append)
    assert not any(tracer.begin_step(step) for step in range(6))
    tracer.close()
    assert told == [
        "torch_profiler=range(100, 103): none of these steps was run; no trace was written"
    ]


RECORDED = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from lightning_dist.profiling.capture.profile_session import dump_flight_record
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(30):
    dist.all_reduce(torch.ones(2))
print(dump_flight_record(Path(sys.argv[1]) / "run-0", rank=3))
dist.destroy_process_group()  # torch's threads may abort a process that ends without
"""


_KEPT = 30 if release(installed_version("torch")) >= (2, 11) else 0


@needs(FLIGHT_RECORDER)
@pytest.mark.parametrize(("size", "kept"), [(None, _KEPT), ("20", 20), ("0", 0)])
def test_what_torch_keeps_is_written(
    size: str | None,
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_python: list[str],
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environment = {} if size is None else {"TORCH_FR_BUFFER_SIZE": size}
    done = run([*quick_python, "-c", RECORDED, tmp_path], limit=100, **environment)
    path = tmp_path / "run-0" / "flight-rank3.json"
    last = done.require_success().output.splitlines()[-1]
    assert last == (str(path) if kept else "None")
    entries = json.loads(path.read_text())["entries"] if kept else []
    assert [each["profiling_name"] for each in entries] == ["gloo:all_reduce"] * kept
    assert path.exists() == bool(kept)


BEGIN = """
import ctypes, os, signal, sys
from lightning_dist.profiling.session import live as sigterm
sigterm._PATIENCE = 0.2
def tell(*words):
    print(*words, flush=True)
def end():
    os.kill(os.getpid(), signal.SIGTERM)
"""
CASES = {
    "raises": """
with sigterm.sigterm_raises():
    end()
    tell("went on")
""",
    "closing": """
with sigterm.sigterm_raises() as state:
    tell(state.came)
    state.closing()
    end()
    tell("went on", state.came)
tell(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
    "stuck": """
import threading
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
waits = f"/proc/self/task/{os.getpid()}/syscall"
def end_when_it_waits():
    while hex(ctypes.addressof(mutex)) not in open(waits).read():
        os.sched_yield()
    end()
with sigterm.sigterm_raises(lambda: tell("the report is made")):
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=end_when_it_waits).start()
    libc.pthread_mutex_lock(mutex)  # for ever; a signal does not interrupt it
tell("went on")
""",
    "handler of its own": """
signal.signal(signal.SIGTERM, lambda *_: tell("its own"))
with sigterm.sigterm_raises():
    end()
    tell("went on")
""",
}


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("raises", 143, ""),
        ("closing", 0, "False\nwent on True\nTrue\n"),
        ("stuck", 143, "the report is made\n"),
        ("handler of its own", 0, "its own\nwent on\n"),
    ],
)
def test_sigterm(case: str, code: int, told: str, tmp_path: Path, quick_python: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + CASES[case])
    done = run([*quick_python, script], limit=60)
    assert (done.returncode, done.output) == (code, told)
