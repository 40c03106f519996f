"""Signals and notices: one checkpoint, a clean end, and what is said where it cannot be written."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import Fault, Job, run_jobs
from elastic_runs import FailAt, committed, fit, hash_of
from lightning.fabric.plugins.environments import SLURMEnvironment
from processes import Finished, run

from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.elastic.process.lifecycle import EXIT_UNSAVED
from lightning_dist.elastic.process.watchdog import EXIT_STUCK
from lightning_dist.frameworks.lightning.elastic.loops import Preempted, requeue

MAIN = """
import signal, sys, os, threading
from pathlib import Path
from elastic_runs import FailAt, fit
what, folder = sys.argv[1], Path(sys.argv[2])
def stick():
    os.kill(os.getpid(), signal.SIGTERM)
    os.read(os.pipe()[0], 1)
if what == "stuck":
    fit(folder, FailAt("on_after_backward", 7, stick), elastic={"grace_period": 0.3})
elif what == "slow":
    from lightning_dist.checkpoint.disk.writer import Writer
    from lightning_dist.elastic.process.watchdog import Watchdog
    beats, enough, do, beat = [], threading.Event(), Writer.do, Watchdog.heartbeat
    def noted(self):
        beats.append(1)
        if len(beats) == 5:  # a quarter of hang_timeout each
            enough.set()
        beat(self)
    def slow(self, *arguments):
        enough.wait(60)
        do(self, *arguments)
    def hold():
        beats.clear()
        Writer.do, Watchdog.heartbeat = slow, noted
    trainer, _ = fit(folder, FailAt("on_train_epoch_end", 12, hold), max_epochs=1,
                     elastic={"hang_timeout": 5.0})
    print("all saved after", len(beats), "beats", enough.is_set())
else:
    from lightning_dist.elastic.process.watchdog import Watchdog
    dogs, start = [], Watchdog.start
    Watchdog.start = lambda self: (dogs.append(self), start(self))
    def hang():
        dogs[0]._hang_timeout = 0.3  # the start may take longer
        dogs[0].heartbeat()
        os.read(os.pipe()[0], 1)
    fit(folder, FailAt("on_after_backward", 7, hang), elastic={"hang_timeout": 60.0})
"""
Start = Callable[..., Finished]


@pytest.fixture(scope="module")
def start(quick_python: list[str]) -> Start:
    def start(what: str, folder: Path, **environment: str) -> Finished:
        return run([*quick_python, "-c", MAIN, what, folder], limit=90, **environment)

    return start


@pytest.fixture(scope="module")
def signalled(quick_python: list[str]) -> Start:
    def start(framework: str, folder: Path, steps: dict[str, int], **environment: str) -> Finished:
        command = [*quick_python, "-c", SIGNALLED, framework, folder, json.dumps(steps)]
        return run(command, limit=90, **environment)

    return start


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``scontrol`` of job 17 was asked for."""
    asked, scontrol = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return asked


def test_slurm_is_asked_for_another_start(signalled: Start, tmp_path: Path, asked: Path) -> None:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0"}
    steps, path = {"requeue": 7}, os.environ["PATH"]
    signalled("trainer", tmp_path / "run", steps, PATH=path, **slurm).require_success()
    assert asked.read_text() == "requeue 17\n"
    assert max(committed(tmp_path / "run" / "account")) == 8


def test_a_job_that_is_cancelled_is_not_started_again(asked: Path) -> None:
    requeue(SLURMEnvironment(), ["SIGTERM", ""])
    assert not asked.exists()
    requeue(SLURMEnvironment(), ["SIGTERM", "preemption notice"])
    assert asked.read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("what", "why"), [("stuck", "SIGTERM, and the grace period is over"), ("hang", "no progress")]
)
def test_a_process_that_cannot_stop_is_ended(
    what: str, why: str, start: Start, tmp_path: Path
) -> None:
    done = start(what, tmp_path / "run")
    assert done.returncode == EXIT_STUCK
    assert f"watchdog: {why}" in done.output
    assert "in fail" in done.output, "where it hung"


def test_the_last_checkpoint_may_take_longer_than_a_batch(start: Start, tmp_path: Path) -> None:
    done = start("slow", tmp_path / "run").require_success()
    assert "beats True" in done.output
    assert list((tmp_path / "run" / "ckpt").glob("*step=12.ckpt"))


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_notice_of_the_cloud(in_thread: bool, tmp_path: Path) -> None:
    """Which a training in a thread hears of too."""
    _, reference = fit(tmp_path / "reference", max_epochs=1)
    noticed, codes = threading.Event(), []

    def preempted() -> bool:
        noticed.set()
        return True

    def train() -> None:
        settings = {"preemption_check": preempted, "preemption_poll_interval": 0.01}
        waits = FailAt("on_train_batch_start", 3, lambda: noticed.wait(30) and None)
        try:
            fit(tmp_path / "run", waits, max_epochs=1, elastic=settings)
        except Preempted as error:
            codes.append(error.code)

    if in_thread:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(60)
    else:
        train()
    assert codes == [0]
    _, module = fit(tmp_path / "run", max_epochs=1)
    assert hash_of(module) == hash_of(reference)


def test_handlers_and_wakeups_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(tmp_path, max_epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


SIGNALLED = """
import json, logging, resource, sys, threading
from functools import partial
from pathlib import Path
from elastic_jobs import KINDS, limit_files_of_writer
from elastic_runs import FailAt, fit
from loop_runs import train
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.elastic.process.lifecycle import PreemptionListener
saving = {"on_error": "warn", "writer": "process", "snapshot": "sync"}
framework, folder, steps = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
def space_after_a_failure():
    on_failed = Checkpointer._on_failed
    def mended(self, event):
        limit_files_of_writer(resource.RLIM_INFINITY)
        on_failed(self, event)
    Checkpointer._on_failed = mended
heard, give = threading.Event(), PreemptionListener.give
def told(self, reason):
    give(self, reason)
    heard.set()
def tell(kind):  # and wait until the thread of signals has taken note of it
    PreemptionListener.give = told
    KINDS[kind]()
    assert heard.wait(60)
kinds = KINDS | {kind: partial(tell, kind) for kind in ("terminate", "requeue")}
actions = {at: kinds[kind] for kind, at in steps.items() if kind in kinds}
def strike(place, step):
    if place == "after_backward" and step in actions:
        actions[step]()
logging.basicConfig(level=logging.INFO)
if "space" in steps:
    space_after_a_failure()
if framework == "trainer":
    hooks = [FailAt("on_after_backward", at, action) for at, action in actions.items()]
    fit(folder, *hooks, elastic={**saving, "every_n_train_steps": 4})
else:
    train(folder, "plain", strike=strike, saving=saving, elastic={"every_n_train_steps": 4})
"""


# What happens at which step of each start, and the newest step at the end.
UNSAVED_STEPS: dict[str, tuple[list[dict[str, int]], int | None]] = {
    "without any checkpoint": ([{"full_disk": 0, "terminate": 7}], None),
    "with an earlier checkpoint": ([{"full_disk": 5, "terminate": 7}], 4),
    "with that of an earlier start": ([{"terminate": 3}, {"full_disk": 4, "terminate": 7}], 4),
    # Step 8 is due, and the one at which all stop; after its failure there is space again.
    "a failed save is tried again": ([{"full_disk": 5, "space": 8, "terminate": 7}], 8),
}


@pytest.mark.parametrize("framework", ["trainer", "loop"])
@pytest.mark.parametrize("name", UNSAVED_STEPS)
def test_a_last_checkpoint_that_cannot_be_written(
    name: str, framework: str, signalled: Start, tmp_path: Path
) -> None:
    """Of a training with a checkpoint every 4 steps."""
    starts, saved = UNSAVED_STEPS[name]
    for steps in starts:
        done = signalled(framework, tmp_path, steps)
        assert done.returncode == 0 or steps is starts[-1]
    preempted = "elastic: preempted at step 8 (rank 0: SIGTERM)"
    if saved == 8:
        assert f"{preempted}; checkpoint committed" in done.output
        assert done.returncode == 0
    else:
        last = f"the last complete checkpoint is of step {saved}"
        kept = "there is no complete checkpoint" if saved is None else last
        assert f"{preempted}, which could not be saved; {kept};" in done.output
        assert "is saved" not in done.output
        assert done.returncode == EXIT_UNSAVED == 74
    newest = newest_valid(str(tmp_path / "ckpt"))
    assert (newest is None) == (saved is None)
    assert newest is None or f"step={saved}" in newest.path


@pytest.mark.timeout(240)
def test_all_ranks_know(tmp_path: Path, quick_python: list[str]) -> None:
    """Rank 0 cannot write. Rank 1 is told to end; or else a failure ends all at one step."""
    jobs = []
    for framework, hook in (("trainer", "on_after_backward"), ("plain", "after_backward")):
        for on_error in ("warn", "raise"):
            faults = [Fault("full_disk", hook, 5, (0,))]
            faults += [Fault("terminate", hook, 7)] if on_error == "warn" else []
            saving = {"on_error": on_error, "writer": "process", "snapshot": "sync"}
            elastic: dict[str, Any] = {"every_n_train_steps": 4}
            of_trainer = {"elastic": elastic | saving}
            fit = of_trainer if framework == "trainer" else {"elastic": elastic, "saving": saving}
            name = f"{framework}-{on_error}"
            settings = {"max_restarts": 0, "framework": framework, "fit": fit}
            jobs.append(Job(name, str(tmp_path / name), faults=faults, **settings))
    done = run_jobs(jobs, tmp_path, python=quick_python)
    for job in jobs:
        assert not done[job.name]["hung"]
        if job.name.endswith("warn"):
            # The agent ends the other one as soon as the first is gone.
            codes = {path.read_text() for path in Path(job.folder).glob("exit-0-*")}
            assert codes == {"74"}, job.name
        else:
            journals = Path(job.folder, "ckpt", "elastic").glob("rank-*.jsonl")
            ends = [json.loads(each.read_text().splitlines()[-1]) for each in journals]
            assert {each["rank"] for each in ends} == {0, 1}
            (reason,) = {each["reason"] for each in ends}
            assert reason.startswith("CheckpointError: The checkpoint "), job.name
            assert "was not written: OSError" in reason
