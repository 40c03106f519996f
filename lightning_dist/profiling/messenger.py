"""Which lines of a file are new, for ranks whose lines have to travel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_dist.profiling.gathering import Gatherer


class Messenger:
    """Hands the new lines of a file to a gatherer."""

    def __init__(self, gatherer: Gatherer, path: Path) -> None:
        self._gatherer, self._path, self._sent = gatherer, path, 0

    def send(self) -> None:
        """Whole lines that are in the file and were not sent yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._sent)
                lines = file.read()
        except OSError:
            lines = b""
        lines = lines[: lines.rfind(b"\n") + 1]
        self._sent += len(lines)
        self._gatherer.collect(lines)

    def close(self, timeout: float) -> Sequence[str]:
        """Send the rest; what did not arrive, and why."""
        self.send()
        return self._gatherer.close(timeout)
