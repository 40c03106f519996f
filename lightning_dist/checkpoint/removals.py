"""Removals that a writer has been asked for and that may be lost with it."""

from __future__ import annotations


class Removals:
    """Removals that were requested, until they are known to be done.

    After a failed save a writer lets removals wait for the next success. If it is lost they are
    asked for again, after the next save.
    """

    def __init__(self) -> None:
        self._asked: dict[str, bool] = {}  # whether it waits in the writer
        self._again: list[str] = []

    def ask(self, path: str) -> None:
        self._asked[path] = False

    def __contains__(self, path: str) -> bool:
        return path in self._asked or path in self._again

    def cancel(self, path: str) -> None:
        """``path`` is to stay, or is written anew."""
        self._asked.pop(path, None)
        self._again = [each for each in self._again if each != path]

    def answered(self, path: str, *, waits: bool) -> None:
        """The writer has done it, or will after the next success."""
        if path in self._asked:
            self._asked[path] = True
            if not waits:
                del self._asked[path]

    def succeeded(self) -> None:
        """A save was committed, so what waited is done."""
        self._asked = {path: waits for path, waits in self._asked.items() if not waits}

    def lost(self) -> None:
        """The writer is gone."""
        self._again = list(self._asked)

    def take_again(self) -> list[str]:
        """Removals to be requested again."""
        again, self._again = self._again, []
        return again
