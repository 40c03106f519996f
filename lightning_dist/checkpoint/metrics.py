"""Cost of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Cost of checkpoints so far; seconds and bytes of this rank."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    blocking_s: float = 0.0
    """of the last save: from its call to its return."""
    queue_s: float = 0.0
    """part of it: waiting for an earlier save."""
    optimizer_wait_s: float = 0.0
    """held back in optimizer steps, in total."""
    write_s: float = 0.0
    """of the last committed save."""
    bytes: int = 0
    """of the last committed save, written by this rank."""
    in_flight: int = 0

    def by_name(self) -> dict[str, float]:
        """``checkpoint/*``, as loggers are told it; without what has not been measured yet."""
        found: dict[str, float] = {
            "checkpoint/in_flight": self.in_flight,
            "checkpoint/skipped": self.skipped,
            "checkpoint/failed": self.failed,
        }
        if self.saves:
            found["checkpoint/blocking_ms"] = self.blocking_s * 1e3
            found["checkpoint/queue_ms"] = self.queue_s * 1e3
            found["checkpoint/optimizer_wait_ms"] = self.optimizer_wait_s * 1e3
        if self.bytes:
            found["checkpoint/write_ms"] = self.write_s * 1e3
            found["checkpoint/bytes"] = self.bytes
        return found
