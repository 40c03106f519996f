"""Copies that a test holds: the copy begins and ends when the test says so."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_dist.checkpoint.snapshot.copying import LaterCopy

LIMIT = 20.0


@dataclass
class Held:
    """The copy has begun at ``begun``, and goes on when ``go`` is set."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@contextmanager
def held_copies(patch: pytest.MonkeyPatch, *, after: bool = False) -> Iterator[Held]:
    """Hold every :class:`LaterCopy` before it copies, or ``after``, before it looks for tears."""
    held = Held()

    def wait() -> None:
        held.begun.set()
        assert held.go.wait(LIMIT), "nobody let the copy go on"

    def method(original: Any) -> Any:
        def waiting(self: LaterCopy) -> Any:
            wait()
            return original(self)

        return waiting

    name = "_torn" if after else "run"
    with patch.context() as context:
        context.setattr(LaterCopy, name, method(getattr(LaterCopy, name)))
        try:
            yield held
        finally:
            held.go.set()
