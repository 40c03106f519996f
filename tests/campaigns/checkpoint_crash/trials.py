"""Trials with a trainer and a fault that is drawn by chance."""

import functools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_dist.checkpoint import writers
from lightning_dist.checkpoint.disk.writer import Writer
from tests.campaigns.checkpoint_crash.child import BOUND_S, Child, Message, Report, kill
from tests.campaigns.checkpoint_crash.disk import SlowStorage, fill, small_disk
from tests.campaigns.checkpoint_crash.oracle import Ledger, Oracle, Verdict
from tests.campaigns.checkpoint_crash.trainer import (
    EVERY,
    STEPS,
    TOTAL,
    Gate,
    Run,
    Trainer,
    newest_stock,
    reference,
)
from tests.campaigns.harness import Hang

_DISK_BYTES = 4 << 20


def any_run(chance: random.Random, folder: Path) -> Run:
    return Run(
        str(folder),
        snapshot=chance.choice(("overlap", "blocking")),
        sharded=chance.random() < 0.4,
        same_name=chance.random() < 0.3,
        last=chance.random() < 0.3,
        max_in_flight=chance.choice((1, 1, 2)),
    )


_MESSAGES = 50  # of an uninterrupted run
_DELAY_S = 0.02
_RUN_S = 0.5


@dataclass(frozen=True)
class Moment:
    """After so many messages and then so many seconds."""

    messages: int
    seconds: float


def any_moment(chance: random.Random) -> Moment:
    """Uniform over the messages of a run, or over its time."""
    if chance.random() < 0.7:
        return Moment(chance.randrange(_MESSAGES), chance.uniform(0, _DELAY_S))
    return Moment(0, chance.uniform(0, _RUN_S))


class Trial:
    """One folder, the trainers that write to it one after the other, and the oracle."""

    def __init__(self, verdict: Verdict, folder: Path, run: Run) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.verdict, self.folder, self.kept = verdict, folder, run
        self.change()
        self.oracle = Oracle(folder, verdict)
        self.ledger = Ledger()
        self.beside: Child | None = None
        """Runs while the second trainer does."""

    def change(self, **changes: Any) -> None:
        """Have the trainer save in another way, and note it."""
        self.kept = replace(self.kept, **changes)
        noted = {k: v for k, v in asdict(self.kept).items() if k != "folder"}
        self.verdict.details["run"] = noted

    def moment(self, chance: random.Random) -> Moment:
        """Any moment, which is noted."""
        moment = any_moment(chance)
        self.verdict.details.setdefault("moments", []).append(asdict(moment))
        return moment

    def half_of_the_time(self, chance: random.Random) -> Moment | None:
        return self.moment(chance) if chance.random() < 0.5 else None

    def follow(
        self,
        child: Child,
        ledger: Ledger,
        moment: Moment | None = None,
        *,
        on_message: Callable[[Message], None] = lambda message: None,
    ) -> bool:
        """Listen until the moment has come (True) or the child has ended (False)."""
        strike = None
        seen = 0
        while True:
            if moment is not None and strike is None and seen >= moment.messages:
                strike = time.monotonic() + moment.seconds
            timeout = BOUND_S if strike is None else strike - time.monotonic()
            message = child.receive(max(0.0, timeout))
            if message is None:
                if child.ended or strike is not None:
                    ledger.require_no_error(self.verdict)
                    return not child.ended
                raise Hang(f"nothing for {BOUND_S:.0f} s after {ledger.events[-1:]}")
            seen += 1
            ledger.note(message)
            on_message(message)
            self.oracle.check_never_empty(ledger)

    def watch(
        self,
        child: Child,
        moment: Moment | None = None,
        *,
        strike: Callable[[Child], None] = lambda child: child.send(signal.SIGKILL),
        on_message: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """Follow the first trainer, strike at the moment, if any; then look for the newest."""
        try:
            struck = self.follow(child, self.ledger, moment, on_message=on_message)
            if struck:
                strike(child)
                self.follow(child, self.ledger)  # what it had said
            self.check_reader()
        finally:
            child.close()
        if not struck:
            self.check_first_run()

    def resume(self) -> None:
        """A new trainer goes on; its result is that of an uninterrupted run."""
        verdict, ledger = self.verdict, Ledger()
        child = Child(lambda report: Trainer(self.kept, report).run(TOTAL))
        try:
            self.follow(child, ledger)
        finally:
            child.close()
        verdict.require(ledger.digest == reference(), "inexact", "the result differs")
        if not self.kept.stock:  # nobody can verify its files
            names = self.kept.names(TOTAL)
            self.oracle.check_resumed(self.ledger, ledger, last=TOTAL, names=names)

    def check_reader(self) -> None:
        """Somebody who knows of no lock looks for the newest."""
        if self.kept.stock:
            state, _ = newest_stock(str(self.folder))
            step, newest = 0 if state is None else state["step"], self.ledger.newest
            self.verdict.require(step >= newest, "lost", f"reported {newest}, found {step}")
        else:
            self.oracle.check_newest(self.ledger, moment="right after the fault")

    def check_first_run(self, *, leftovers: str = "") -> None:
        """If it came to its end and the last save succeeded, only that one is left.

        leftovers: as of :meth:`Oracle.check_end`; a dead writer's remain.
        """
        if self.ledger.ended and STEPS in self.ledger.committed:
            expected = self.kept.names(STEPS)
            self.oracle.check_end(expected, moment="after the first run", leftovers=leftovers)


def start(trial: Trial) -> Child:
    return Child(lambda report: Trainer(trial.kept, report).run(STEPS))


def kill_trainer(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of the trainer; its writer finishes."""
    trial.watch(start(trial), trial.moment(chance))


def kill_both(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of trainer and writer, as when a cgroup or a machine ends."""
    trainer_first = chance.random() < 0.5
    moment = trial.moment(chance)

    def strike(child: Child) -> None:
        writer = child.children()
        if trainer_first:
            child.send(signal.SIGKILL)
        kill(writer)
        child.send(signal.SIGKILL)

    trial.watch(start(trial), moment, strike=strike)


def kill_writer(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of the writer, once or twice; the trainer goes on to its end."""
    moments = [trial.moment(chance) for _ in range(chance.choice((1, 1, 2)))]
    child = start(trial)
    try:
        for moment in moments:
            if trial.follow(child, trial.ledger, moment):
                kill(child.children())
        trial.follow(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
    verdict, ledger = trial.verdict, trial.ledger
    verdict.require(ledger.ended, "hang", "the trainer did not get to its end")
    saves = {message["step"] for message in ledger.of("saved")}
    failed = [m["step"] for m in ledger.of("failed") if m["step"] is not None]
    verdict.require(len(failed) == len(set(failed)), "report", f"told twice: {failed}")
    verdict.require(
        saves == ledger.committed | set(failed), "report",
        f"saves {saves}, committed {ledger.committed}, failed {failed}",
    )  # fmt: skip
    trial.check_first_run(leftovers="all")


def slow_disk(trial: Trial, chance: random.Random) -> None:
    """Every write takes until the next save is asked for; half of the trials kill the trainer."""
    trial.change(writer="thread")
    moment = trial.half_of_the_time(chance)

    def train(report: Report) -> None:
        storage = SlowStorage()
        writers.Writer = functools.partial(Writer, find_storage=storage.find)
        Trainer(trial.kept, report, gate=storage.gate).run(STEPS)

    trial.watch(Child(train), moment)


def slow_disk_of_stock(trial: Trial, chance: random.Random) -> None:
    """The same without any fault, for AsyncCheckpointIO."""
    gate = Gate(slow=True)
    trial.watch(Child(lambda report: Trainer(trial.kept, report, gate=gate).run(STEPS)))


def stopped_writer(trial: Trial, chance: random.Random) -> None:
    """The writer process is stopped from one save to the next request; half are killed then."""
    moment = trial.half_of_the_time(chance)
    child = start(trial)
    writer: list[int] = []

    def hold(message: Message) -> None:
        writer[:] = child.children() or writer
        if message["event"] == "saved":
            kill(writer, signal.SIGSTOP)
        elif message["event"] in ("requested", "waiting"):
            kill(writer, signal.SIGCONT)

    def wake(report: Report) -> None:
        time.sleep(seconds)  # the disk answers again while the next trainer waits for the folder
        kill(writer, signal.SIGCONT)

    try:
        trial.watch(child, moment, on_message=hold)
    finally:
        seconds = chance.uniform(0, 0.3)
        trial.beside = Child(wake)


def dropped_snapshot(trial: Trial, chance: random.Random) -> None:
    """A save is given up, because a parameter changes during the copy; half are killed then."""
    touched = EVERY * chance.randrange(2, STEPS // EVERY)
    trial.change(snapshot="overlap", touched=touched)
    trial.watch(start(trial), trial.half_of_the_time(chance))
    trial.verdict.details["dropped"] = [m["step"] for m in trial.ledger.of("failed")]


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

    trial.watch(start(trial), on_message=use)
    filler.unlink(missing_ok=True)
    trial.verdict.require(trial.ledger.ended, "hang", "the trainer did not get to its end")
    trial.verdict.details["failed"] = len(trial.ledger.of("failed"))


KINDS: dict[str, Callable[[Trial, random.Random], None]] = {
    "kill the trainer": kill_trainer,
    "kill the writer": kill_writer,
    "kill trainer and writer": kill_both,
    "slow disk (thread)": slow_disk,
    "stopped writer process": stopped_writer,
    "dropped snapshot": dropped_snapshot,
    "full disk": full_disk,
    "stock: kill the trainer": kill_trainer,
    "stock: slow disk": slow_disk_of_stock,
}


def run_trial(verdict: Verdict, chance: random.Random, place: Path) -> None:
    """One trial of ``verdict.kind`` in the new folder ``place``."""
    place.mkdir()

    def run_in(folder: Path) -> None:
        is_stock = verdict.kind.startswith("stock")
        run = Run(str(folder), stock=True) if is_stock else any_run(chance, folder)
        trial = Trial(verdict, folder, run)
        try:
            KINDS[verdict.kind](trial, chance)
            trial.resume()
        finally:
            if trial.beside is not None:
                trial.beside.close()

    if verdict.kind == "full disk":
        with small_disk(place / "disk", nbytes=_DISK_BYTES) as disk:
            run_in(disk / "checkpoints")
    else:
        run_in(place / "checkpoints")
