"""One trial: trainers that write to a folder, one after the other, and what is asked of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.crash_oracle import Foreign, Ledger, Oracle, Verdict
from benchmarks.crash_process import BOUND_S, Child, Hang, Message
from benchmarks.crash_trainer import STEPS, TOTAL, Run, Trainer

_MESSAGES = 50  # of an uninterrupted run
_DELAY_S = 0.02
_RUN_S = 0.5
_OPEN_S = 15.0  # that a resumed trainer may wait for the folder


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

    def __init__(
        self, verdict: Verdict, folder: Path, run: Run, *, reference: str, foreign: bytes
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.verdict, self.folder, self.kept = verdict, folder, run
        self.reference = reference
        self.change()
        self.foreign = Foreign(folder, checkpoint=foreign)
        self.oracle = Oracle(folder, verdict, self.foreign)
        self.ledger = Ledger()

    def change(self, **changes: Any) -> None:
        """Have the trainer save in another way, and note it."""
        self.kept = replace(self.kept, **changes)
        noted = {k: v for k, v in asdict(self.kept).items() if k != "folder"}
        self.verdict.details["run"] = noted

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
                    return not child.ended
                raise Hang(f"nothing for {BOUND_S:.0f} s after {ledger.events[-1:]}")
            seen += 1
            ledger.note(message)
            self._judge(message)
            on_message(message)
            self.oracle.check_never_empty(ledger)

    def drain(self, child: Child, ledger: Ledger) -> None:
        """What a killed child had said."""
        self.follow(child, ledger)

    def resume(self, *, also: Callable[[Message], None] = lambda message: None) -> None:
        """A new trainer goes on; its result is that of an uninterrupted run."""
        verdict, ledger = self.verdict, Ledger()
        child = Child(lambda report: Trainer(replace(self.kept), report).run(TOTAL))
        try:
            self.follow(child, ledger, on_message=also)
        finally:
            child.close()
        opened = ledger.of("opened")
        if opened:
            step, seconds = opened[0]["step"], opened[0]["seconds"]
            verdict.require(not opened[0]["torn"], "torn", str(opened[0]["torn"]))
            verdict.require(
                step >= self.ledger.newest, "lost",
                f"reported {self.ledger.newest}, resumed from {step}",
            )  # fmt: skip
            verdict.require(seconds < _OPEN_S, "hang", f"the folder opened after {seconds:.1f} s")
            verdict.details["resumed"] = step
        verdict.require(ledger.digest == self.reference, "inexact", "the result differs")
        verdict.require(TOTAL in ledger.committed, "report", "the last save was not reported")
        self.oracle.check_end(self.kept.names(TOTAL), moment="after the resumed run")
        self.oracle.check_all_whole(moment="after the resumed run")

    def check_reader(self) -> None:
        """Somebody who knows of no lock looks for the newest."""
        self.oracle.check_newest(self.ledger, moment="right after the fault")

    def check_first_run(self, *, leftovers: str = "") -> None:
        """If it came to its end and the last save succeeded, only that one is left.

        leftovers: as of :meth:`Oracle.check_end`; a dead writer's remain.
        """
        if self.ledger.ended and STEPS in self.ledger.committed:
            expected = self.kept.names(STEPS)
            self.oracle.check_end(expected, moment="after the first run", leftovers=leftovers)

    def _judge(self, message: Message) -> None:
        if message["event"] == "error":
            self.verdict.require(False, "report", message["reason"])
        if message["event"] == "hang":
            self.verdict.require(False, "hang", message["reason"])


def start(trial: Trial) -> Child:
    return Child(lambda report: Trainer(trial.kept, report).run(STEPS))
