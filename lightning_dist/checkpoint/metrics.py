"""Cost of checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Cost of checkpoints so far, on this rank. Loggers get the fields as ``checkpoint/<name>``."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    in_flight: int = 0
    blocking_ms: float = 0.0
    """Of the last save: from its call to its return."""
    queue_ms: float = 0.0
    """Part of it: waiting for an earlier save."""
    optimizer_wait_ms: float = 0.0
    """Waiting for copies in optimizer steps, in total."""
    write_ms: float = 0.0
    """Of the last committed save."""
    bytes: int = 0
    """Of the last committed save, written by this rank."""

    def by_name(self) -> dict[str, float]:
        """``checkpoint/*`` for loggers, without values that are not known yet."""
        unknown = {"saves"}
        if not self.saves:
            unknown |= {"blocking_ms", "queue_ms", "optimizer_wait_ms"}
        if not self.bytes:
            unknown |= {"write_ms", "bytes"}
        return {f"checkpoint/{n}": value for n, value in asdict(self).items() if n not in unknown}
