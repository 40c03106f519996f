"""How a worker has ended, in the file that torch's agent reads then; standard library only."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterable, Mapping
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
        is_echo: another rank failed first, and a collective here for that reason.
    """

    step: int | None
    error: str = ""
    place: str = ""
    is_echo: bool = False

    @classmethod
    def of(cls, error: BaseException, *, step: int | None, is_echo: bool = False) -> Outcome:
        """The end by an exception."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = "".join(traceback.format_exception_only(error)).strip()
        return cls(step, text, place, is_echo)

    @classmethod
    def read(cls, message: Any) -> Outcome | None:
        """The outcome in what torch's agent has read from the file; None: there is none."""
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        known = extra.get("lightning_dist") if isinstance(extra, Mapping) else None
        return None if known is None else cls(**known)

    def write(self, error: BaseException | None = None) -> None:
        """Leave this to the agent, if there is one; the first outcome of a process counts.

        Args:
            error: whose traceback the agent prints with it.
        """
        path = os.environ.get(FILE, "")
        if not path or path == os.devnull or os.path.exists(path):
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


SAME_FAILURES = 3
"""Failures with one exception at one step, after which a job ends."""


class Progress:
    """Steps and failures of the starts of a job, as one launcher sees them."""

    def __init__(self) -> None:
        self._step = -1
        self._failure: Outcome | None = None
        self._count = 0

    def advanced(self, outcomes: Iterable[Outcome]) -> bool:
        """Whether a start has done more steps than all before it."""
        before = self._step
        self._step = max([before, *(each.step for each in outcomes if each.step is not None)])
        return self._step > before

    def stuck(self, outcomes: Iterable[Outcome]) -> str:
        """Why it is useless to start again; empty if it is not.

        Args:
            outcomes: of one start, those that come first first.
        """
        own = [each for each in outcomes if each.error and not each.is_echo]
        if not own:
            return ""
        first, before = own[0], self._failure
        is_same = before is not None and (first.step, first.place) == (before.step, before.place)
        self._failure, self._count = first, self._count + 1 if is_same else 1
        if self._count < SAME_FAILURES:
            return ""
        since = "in the set-up" if first.step is None else f"since step {first.step}"
        return f"no progress {since}: {first.error}"
