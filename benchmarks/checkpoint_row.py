"""What the checkpoint benchmark asks of a way to save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from benchmarks.checkpoint_state import Training


class Row(ABC):
    """One way to save the state of ``training``; by default one that is done when it returns."""

    fenced = False
    """Whether the optimizer step must wait for the rest of a copy."""
    write_s: float | None = None
    """Seconds that the last write took by its own account, without the copy."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def open(self, folder: Path) -> None:  # noqa: B027  (most rows need nothing)
        """Prepare to save in ``folder``."""

    @abstractmethod
    def save(self, target: Path) -> None:
        """Save as ``target`` or something that begins with its name; what training is held by."""

    def is_done(self) -> bool:
        """Whether the last save is complete, without waiting."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Wait until it is."""

    def before_step(self) -> None:  # noqa: B027
        """What the user must call before an optimizer step."""

    def held_back_s(self) -> float:
        """Seconds that optimizer steps were held back, in total."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """End what it has started."""
