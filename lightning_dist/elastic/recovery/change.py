"""A change of members within the process, as it is told to people, the account and the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A pause in which members were lost or joined, and training went on.

    Attributes:
        generation: number of the generation that goes on.
        step: optimizer steps done, of all starts.
        world_size: ranks that go on.
        lost: workers that are gone.
        joined: workers that are new.
        reason: for people; of all generations of the pause.
        is_redone: the step that was under way is taken again.
        pause_s: from the moment when this rank knew of it until all go on.
        norm_lost: norm of the residuals of the lost ranks, estimated from those of the others: the
            root of the sum of as many mean squares. 0 where other ranks have taken them over.
        taken_over: lost workers whose residuals another rank has a copy of, and owes from now on.
    """

    generation: int
    step: int
    world_size: int
    lost: Sequence[str] = ()
    joined: Sequence[str] = ()
    reason: str = ""
    is_redone: bool = False
    pause_s: float = 0.0
    norm_lost: float = 0.0
    taken_over: Sequence[str] = ()

    @property
    def line(self) -> str:
        """The event in one line, for people."""
        what = self.reason or "the groups are made anew"
        next_step = f"step {self.step + 1} is taken again" if self.is_redone else ""
        owed = f"lost residuals of norm {self.norm_lost:.3g}" if self.norm_lost else ""
        if self.taken_over:
            owed = f"{owed and owed + ', '}residuals of {', '.join(self.taken_over)} taken over"
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        said = filter(None, (what, next_step, owed, f"paused {self.pause_s:.2f} s"))
        return (
            f"elastic: {ranks} after step {self.step}, within the process "
            f"(generation {self.generation}): {'; '.join(said)}"
        )


def norm_of_lost(norms: Sequence[float | None], *, lost: int) -> float:
    """Norm of ``lost`` residuals, estimated from ``norms``; None of ranks that are new."""
    known = [norm for norm in norms if norm is not None]
    mean_square = sum(norm**2 for norm in known) / max(len(known), 1)
    return float((lost * mean_square) ** 0.5)
