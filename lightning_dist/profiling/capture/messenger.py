"""Which lines of a file are new, for ranks whose lines have to travel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_dist.profiling.capture.gathering import Gatherer


class Messenger:
    """Hands the new lines of a file to a gatherer."""

    def __init__(self, gatherer: Gatherer, path: Path) -> None:
        self._gatherer, self._path, self._sent = gatherer, path, 0

    @property
    def is_over(self) -> bool:
        """Whether this rank has closed, and uses its group no more."""
        return self._gatherer.is_over

    def send(self) -> None:
        """Whole lines that are in the file and were not sent yet."""
        lines = self._new() if self._gatherer.sends else b""
        self._sent += len(lines)
        self._gatherer.collect(lines)

    def _new(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._sent)
                lines = file.read()
        except OSError:
            return b""
        return lines[: lines.rfind(b"\n") + 1]

    def close(self, timeout: float) -> Sequence[str]:
        """Send the rest; what did not arrive, and why."""
        self.send()
        return self._gatherer.close(timeout)
