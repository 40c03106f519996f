"""Trials with a disk that is slow or full, a writer that stops, a snapshot that is given up."""

from __future__ import annotations

import functools
import random
import signal
import time
from dataclasses import asdict

from benchmarks.crash_disk import SlowStorage, fill
from benchmarks.crash_kills import kill_at
from benchmarks.crash_process import Child, Message, Report, kill
from benchmarks.crash_trainer import EVERY, STEPS, Trainer
from benchmarks.crash_trial import Trial, any_moment, start
from lightning_dist.checkpoint import writers
from lightning_dist.checkpoint.disk.writer import Writer


def slow_disk(trial: Trial, chance: random.Random) -> None:
    """Every write takes until the next save is asked for; half of the trials kill the trainer."""
    trial.change(writer="thread")
    moment = any_moment(chance) if chance.random() < 0.5 else None
    trial.verdict.details["moment"] = None if moment is None else asdict(moment)

    def train(report: Report) -> None:
        storage = SlowStorage()
        writers.Writer = functools.partial(Writer, find_storage=storage.find)
        Trainer(trial.kept, report, gate=storage.gate).run(STEPS)

    child = Child(train)
    try:
        if trial.follow(child, trial.ledger, moment):
            child.send(signal.SIGKILL)
            trial.drain(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
    trial.check_first_run()
    trial.resume()


def stopped_writer(trial: Trial, chance: random.Random) -> None:
    """The writer process is stopped from one save to the next request; half are killed then."""
    moment = any_moment(chance) if chance.random() < 0.5 else None
    trial.verdict.details["moment"] = None if moment is None else asdict(moment)
    child = start(trial)
    writer: list[int] = []

    def hold(message: Message) -> None:
        writer[:] = child.children() or writer
        if message["event"] == "saved":
            kill(writer, signal.SIGSTOP)
        elif message["event"] in ("requested", "waiting"):
            kill(writer, signal.SIGCONT)

    try:
        if trial.follow(child, trial.ledger, moment, on_message=hold):
            child.send(signal.SIGKILL)
            trial.drain(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
        resumed = Child(lambda report: _continue(report, list(writer), chance.uniform(0, 0.3)))
    trial.check_first_run()
    try:
        trial.resume()
    finally:
        resumed.close()


def _continue(report: Report, writer: list[int], seconds: float) -> None:
    time.sleep(seconds)  # the disk answers again while the next trainer waits for the folder
    kill(writer, signal.SIGCONT)


def dropped_snapshot(trial: Trial, chance: random.Random) -> None:
    """A save is given up, because a parameter changes during the copy; half are killed then."""
    touched = EVERY * chance.randrange(2, STEPS // EVERY)
    trial.change(snapshot="overlap", touched=touched)
    if chance.random() < 0.5:
        kill_at(trial, chance, lambda child: child.send(signal.SIGKILL))
        return
    child = start(trial)
    try:
        trial.follow(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
    trial.verdict.details["dropped"] = [m["step"] for m in trial.ledger.of("failed")]
    trial.check_first_run()
    trial.resume()


def full_disk(trial: Trial, chance: random.Random) -> None:
    """Somebody fills the disk for a part of the run."""
    filler = trial.folder.parent / "filler"
    begin = chance.randrange(5, 30)
    end = begin + chance.randrange(1, 15)
    trial.verdict.details["filled"] = [begin, end]
    seen = 0

    def use(message: Message) -> None:
        nonlocal seen
        seen += 1
        if seen == begin:
            fill(filler, leave=chance.randrange(1 << 18))
        if seen == end:
            filler.unlink()

    child = start(trial)
    try:
        trial.follow(child, trial.ledger, on_message=use)
        trial.check_reader()
    finally:
        child.close()
    filler.unlink(missing_ok=True)
    trial.verdict.require(trial.ledger.ended, "hang", "the trainer did not get to its end")
    trial.verdict.details["failed"] = len(trial.ledger.of("failed"))
    trial.check_first_run()
    trial.resume()
