"""How a worker has ended, in the file that torch's agent reads then; standard library only."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable of torch's agent with the path."""


@dataclass(frozen=True)
class Outcome:
    """The end of a worker.

    Attributes:
        step: optimizer steps that were done by then, of all starts; None: no training was set up.
        error: of an exception, its class and text; empty for a planned stop.
        place: file and line that raised it.
        begun: :attr:`step` of the checkpoint that its training was resumed from.
        is_echo: another rank failed first, and a collective here for that reason.
    """

    step: int | None
    error: str = ""
    place: str = ""
    begun: int = 0
    is_echo: bool = False

    @property
    def kind(self) -> tuple[int | None, str, str]:
        """Step, class and place of a failure: its text may have a name of a file or a number."""
        return self.step, self.error.partition(":")[0], self.place

    @classmethod
    def of(
        cls, error: BaseException, *, step: int | None, begun: int = 0, is_echo: bool = False
    ) -> Outcome:
        """The end by an exception."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = "".join(traceback.format_exception_only(error)).strip()
        return cls(step, text, place, begun, is_echo)

    @classmethod
    def read(cls, message: Any) -> Outcome | None:
        """The outcome in what torch's agent has read from the file; None: there is none."""
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        known = extra.get("lightning_dist") if isinstance(extra, Mapping) else None
        try:
            return None if known is None else cls(**known)
        except TypeError:  # of another version of this package
            return None

    def write(self, error: BaseException | None = None, *, replaces: bool = True) -> None:
        """Leave this to the agent, if there is one.

        Args:
            error: whose traceback the agent prints with it.
            replaces: in the place of an earlier outcome of this process.
        """
        path = os.environ.get(FILE, "")
        if not path or path == os.devnull or (os.path.exists(path) and not replaces):
            return
        extra: dict[str, Any] = {"timestamp": str(int(time.time())), "lightning_dist": asdict(self)}
        if error is not None:
            extra["py_callstack"] = "".join(traceback.format_exception(error))
        text = self.error or f"stopped after step {self.step}"
        # All at once: torch's agent ends where it cannot read it.
        with suppress(OSError):
            with open(f"{path}.{os.getpid()}", "w") as file:
                json.dump({"message": {"message": text, "extraInfo": extra}}, file)
            os.replace(file.name, path)


def forget_outcome() -> None:
    """Leave nothing to the agent: what has ended before does not end this process."""
    with suppress(OSError):
        os.unlink(os.environ.get(FILE, ""))


SAME_FAILURES = 3
"""Failures with one exception at one step, after which a job ends."""


class Progress:
    """Steps and failures of the starts of a job, as one launcher sees them."""

    def __init__(self) -> None:
        self._failure: Outcome | None = None
        self._step = self._begun = -1  # the most steps so far; and where a planned stop had begun
        self._count = 0

    def advanced(self, outcomes: Iterable[Outcome]) -> bool:
        """Whether a start before a planned stop resumed from a newer checkpoint, and did a step."""
        done = [each for each in outcomes if each.step is not None and each.step > each.begun]
        before = self._begun
        self._begun = max([before, *(each.begun for each in done)])
        return self._begun > before

    def stuck(self, outcomes: Sequence[Outcome]) -> str:
        """Why it is useless to start again; empty if it is not.

        Args:
            outcomes: of one start, those that come first first.
        """
        furthest = max([-1, *(each.step for each in outcomes if each.step is not None)])
        if furthest > self._step:
            self._step, self._count = furthest, 0
        own = [each for each in outcomes if each.error and not each.is_echo]
        if not own:
            return ""
        first, before = own[0], self._failure
        is_same = before is not None and first.kind == before.kind
        self._failure, self._count = first, self._count + 1 if is_same else 1
        if self._count < SAME_FAILURES:
            return ""
        where = "outside of a training" if first.step is None else f"since step {first.step}"
        return f"no progress {where}: {first.error}"
