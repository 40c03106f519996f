"""What must hold after a crash, and the count of what did not."""

import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_dist.checkpoint.disk.folder_owner import LOCK
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.scan import (
    SUFFIX,
    Description,
    checkpoints,
    newest_valid,
    verify,
)
from tests.campaigns import harness
from tests.campaigns.checkpoint_crash.child import Message

PROBLEMS = ("lost", "undetected", "inexact", "hang", "torn", "leak", "touched", "report")
"""lost: a reported checkpoint that is not found, or a moment without any; undetected: wrong bytes
that pass; inexact: another result after the resume; hang: anything beyond its bound; torn: half a
checkpoint under the name of a whole one; leak: something left behind at the end; touched: somebody
else's files; report: an error that is told never, or twice."""


@dataclass
class Verdict(harness.Verdict):
    """One trial: how to repeat it, what happened, and what should not have."""

    details: dict[str, Any] = field(default_factory=dict)
    trials: int = 1
    """that this one stands for."""


_OPEN_S = 15.0  # that a resumed trainer may wait for the folder


@dataclass
class Ledger:
    """What processes have said about their saves."""

    committed: set[int] = field(default_factory=set)
    events: list[Message] = field(default_factory=list)
    digest: str = ""
    ended: bool = False

    @property
    def newest(self) -> int:
        return max(self.committed, default=0)

    def note(self, message: Message) -> None:
        if message["event"] == "committed":
            self.committed.add(message["step"])
        if message["event"] == "end":
            self.ended, self.digest = True, message.get("digest", "")
        if message["event"] != "step":
            self.events.append(message)

    def require_no_error(self, verdict: Verdict) -> None:
        for event, problem in (("error", "report"), ("hang", "hang")):
            for message in self.of(event):
                verdict.require(False, problem, message["reason"])

    def of(self, event: str) -> list[Message]:
        return [message for message in self.events if message["event"] == event]


@functools.cache
def pretrained() -> bytes:
    """A file of torch.save, as somebody else may put it into the folder."""
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, file)
    return file.getvalue()


def step_of(found: Description | None) -> int:
    """The step of a checkpoint of ours; 0 if there is none."""
    return 0 if found is None or found.origin is None else found.origin.step


class Oracle:
    """Looks at a checkpoint folder from outside; puts files of somebody else there."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        self._folder, self._verdict = folder, verdict
        self._foreign = {
            folder / "notes.txt": b"keep me",
            folder / "pretrained.ckpt": pretrained(),
            folder / ".step=3.ckpt.tmp-mine": b"not one of ours",
            folder / ".trash-0123456789abcdef": b"nor this",
            folder / "logs" / "manifest.txt": b"{}",
            folder / ".cache.tmp" / "manifest.json": b"{}",
        }
        for path, content in self._foreign.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._others = {path.relative_to(folder).parts[0] for path in self._foreign} | {LOCK}

    def check_foreign(self) -> None:
        """What is not ours is as it was."""
        for path, content in self._foreign.items():
            same = path.is_file() and path.read_bytes() == content
            self._verdict.require(same, "touched", path.name)

    def check_never_empty(self, ledger: Ledger) -> None:
        """At any moment after the first commit."""
        if ledger.committed:
            names = set(os.listdir(self._folder)) - self._others
            there = any(name.endswith(SUFFIX) and not name.startswith(".") for name in names)
            self._verdict.require(there, "lost", f"no checkpoint on disk: {sorted(names)}")

    def check_newest(
        self, ledger: Ledger, *, moment: str, is_content: Callable[[str, int], bool] | None = None
    ) -> Description | None:
        """The newest is whole and at least as new as the newest that was reported."""
        verdict = self._verdict
        found = newest_valid(str(self._folder))
        step = step_of(found)
        verdict.require(
            step >= ledger.newest, "lost", f"{moment}: reported {ledger.newest}, found {step}"
        )
        if found is not None and is_content is not None:
            verdict.require(is_content(found.path, step), "undetected", f"{moment}: wrong bytes")
        return found

    def check_all_whole(self, *, moment: str) -> None:
        """Nothing in the folder looks like a checkpoint and is none; no writer is at work."""
        for there in checkpoints(str(self._folder)):
            problem = there.problem
            if not problem:
                try:
                    verify(there.path)
                except CheckpointError as error:
                    problem = str(error)
            self._verdict.require(not problem, "torn", f"{moment}: {problem}")

    def check_resumed(
        self,
        ledger: Ledger,
        resumed: Ledger,
        *,
        last: int,
        names: set[str],
        is_content: Callable[[str, int], bool] | None = None,
    ) -> None:
        """After a second run, which has saved ``last`` at its end; ``ledger`` is of the first."""
        verdict, newest = self._verdict, ledger.newest
        for opened in resumed.of("opened"):
            step, seconds = opened["step"], opened["seconds"]
            verdict.require(not opened["torn"], "torn", str(opened["torn"]))
            verdict.require(step >= newest, "lost", f"reported {newest}, resumed from {step}")
            verdict.require(seconds < _OPEN_S, "hang", f"the folder opened after {seconds:.1f} s")
            verdict.details["resumed"] = step
        verdict.require(last in resumed.committed, "report", "the last save was not reported")
        self.check_newest(resumed, moment="at the end", is_content=is_content)
        self.check_all_whole(moment="at the end")
        self.check_end(names, moment="at the end")

    def check_end(self, expected: set[str], *, moment: str, leftovers: str = "") -> None:
        """Exactly the checkpoints that should be kept are left, and what is not ours.

        leftovers: what nobody sees and the next trainer will remove: ``"all"``, or ``"trash"``,
            removed checkpoints whose files could not all be removed.
        """
        names = set(os.listdir(self._folder)) - self._others
        hidden = {"": "\n", "all": ".", "trash": ".trash-"}[leftovers]
        names = {name for name in names if not (name.startswith(".") and hidden in name)}
        what = f"{moment}: {sorted(names)} instead of {sorted(expected)}"
        self._verdict.require(expected <= names, "lost", what)
        self._verdict.require(names <= expected, "leak", what)
        self.check_foreign()
