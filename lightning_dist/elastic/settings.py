"""When a process ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EndSettings:
    """What counts as a notice, and the bounds on hanging.

    Args:
        preempted: asked every ``poll_s`` seconds; whether the machine is about to go.
        poll_s: seconds.
        grace_period: seconds from a notice to the forced end of the process.
        hang_timeout: seconds without progress after which the process ends itself; None: never.

    Raises:
        ValueError: a number that is not positive.
    """

    preempted: Callable[[], bool] | None = None
    poll_s: float = 5.0
    grace_period: float = 25.0
    hang_timeout: float | None = 600.0

    def __post_init__(self) -> None:
        for name in ("poll_s", "grace_period"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} has to be positive; got {getattr(self, name)}")
        if self.hang_timeout is not None and self.hang_timeout <= 0:
            raise ValueError(
                f"hang_timeout is positive, or None for never; got {self.hang_timeout}"
            )
