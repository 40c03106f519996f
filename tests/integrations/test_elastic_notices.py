"""Signals and notices: one checkpoint, a clean end, and the next start goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_runs import FailAt, committed, fit, hash_of
from lightning.fabric.plugins.environments import SLURMEnvironment
from processes import Finished, run

from lightning_dist.elastic.process.watchdog import EXIT_STUCK
from lightning_dist.integrations.lightning.elastic.connectors import Preempted, requeue

MAIN = """
import signal, sys, os, threading
from pathlib import Path
from elastic_runs import FailAt, fit
from lightning_dist.elastic.process.preemption import PreemptionListener
what, folder = sys.argv[1], Path(sys.argv[2])
noticed, give = threading.Event(), PreemptionListener.give
def note(self, reason):
    give(self, reason)
    noticed.set()
def go(name):
    def send():
        PreemptionListener.give = note
        os.kill(os.getpid(), getattr(signal, name))
        assert noticed.wait(60), "the thread that listens has not heard of it"
    return FailAt("on_after_backward", 7, send)
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
    trainer, _ = fit(folder, FailAt("on_train_end", 12, hold), max_epochs=1,
                     elastic={"hang_timeout": 5.0})
    print("all saved after", len(beats), "beats", enough.is_set())
elif what == "hang":
    from lightning_dist.elastic.process.watchdog import Watchdog
    dogs, start = [], Watchdog.start
    Watchdog.start = lambda self: (dogs.append(self), start(self))
    def hang():
        dogs[0]._hang_timeout = 0.3  # the start may take longer
        dogs[0].heartbeat()
        os.read(os.pipe()[0], 1)
    fit(folder, FailAt("on_after_backward", 7, hang), elastic={"hang_timeout": 60.0})
else:
    fit(folder, go(what))
"""


Start = Callable[..., Finished]


@pytest.fixture(scope="module")
def start(quick_python: list[str]) -> Start:
    def start(what: str, folder: Path, **environment: str) -> Finished:
        return run([*quick_python, "-c", MAIN, what, folder], limit=90, **environment)

    return start


def test_a_signal_ends_a_process_well(start: Start, tmp_path: Path) -> None:
    done = start("SIGTERM", tmp_path / "run").require_success()
    assert "elastic: preempted at step 8 (rank 0: SIGTERM); checkpoint committed" in done.output
    assert max(committed(tmp_path / "run" / "account")) == 8


def test_slurm_is_asked_for_another_start(start: Start, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0"}
    path = f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"
    start("SIGUSR1", tmp_path / "run", PATH=path, **slurm).require_success()
    assert asked.read_text() == "requeue 17\n"
    assert max(committed(tmp_path / "run" / "account")) == 8


def test_a_job_that_is_cancelled_is_not_started_again(tmp_path: Path) -> None:
    asked, reasons = tmp_path / "asked", ["SIGTERM", ""]
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    scontrol.chmod(0o755)
    environment = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        requeue(SLURMEnvironment(), reasons)
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


def test_a_notice_of_the_cloud(tmp_path: Path) -> None:
    _, reference = fit(tmp_path / "reference", max_epochs=1)
    noticed = threading.Event()

    def preempted() -> bool:
        noticed.set()
        return True

    settings = {"preemption_check": preempted, "preemption_poll_interval": 0.01}
    waits = FailAt("on_train_batch_start", 3, lambda: noticed.wait(30) and None)
    with pytest.raises(Preempted) as ended:
        fit(tmp_path / "run", waits, max_epochs=1, elastic=settings)
    assert ended.value.code == 0
    _, module = fit(tmp_path / "run", max_epochs=1)
    assert hash_of(module) == hash_of(reference)


def test_handlers_and_wakeups_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(tmp_path, max_epochs=1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
