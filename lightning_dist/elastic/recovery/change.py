"""A change of members within the process, as reported in logs, metrics and profiles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dist.elastic.recovery.protocol import Generation


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
        taken_over: lost workers whose residuals another rank takes over from its copy.
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
        what = self.reason or "process groups rebuilt"
        next_step = f"step {self.step + 1} is repeated" if self.is_redone else ""
        lost = f"residuals of norm {self.norm_lost:.3g} lost" if self.norm_lost else ""
        taken = f"residuals of {', '.join(self.taken_over)} taken over" if self.taken_over else ""
        residuals = ", ".join(filter(None, (lost, taken)))
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        parts = filter(None, (what, next_step, residuals, f"paused {self.pause_s:.2f} s"))
        return (
            f"elastic: {ranks} after step {self.step}, within the process (generation "
            f"{self.generation}): {'; '.join(parts)}"
        )


@dataclass
class Pause:
    """Events between two steps, from the first failure until all ranks continue.

    Attributes:
        members: of the last step.
        since: when this rank first knew that it cannot go on with them; None: it can.
        is_redone: a rank has begun the next step, which is taken again.
        norm: of the residuals of this rank at the start; None on a newcomer.
        reasons: of the generations since then.
        norm_lost: as of a :class:`Change`.
        taken_over: lost workers whose residuals others have taken over.
    """

    members: Sequence[str] = ()
    since: float | None = None
    is_redone: bool = False
    norm: float | None = None
    reasons: list[str] = field(default_factory=list)
    norm_lost: float = 0.0
    taken_over: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """This rank knows that it cannot go on. From any thread."""
        if self.since is None:
            self.since = time.monotonic()

    def enter(
        self, generation: Generation, facts: Sequence[tuple[float | None, str, bool]]
    ) -> None:
        """Add a generation that is complete; others may follow in this pause.

        Args:
            facts: of each member, the norm of its residuals, None for a new one; the lost
                worker whose residuals it has taken over; and its :attr:`is_redone`.
        """
        norms, names, redone = zip(*facts, strict=True)
        self.reasons.append(generation.reason)
        self.taken_over.update(filter(None, names))
        self.is_redone = any(redone)
        lost = set(self.members) - set(generation.members) - self.taken_over
        self.norm_lost = norm_of_lost(norms, lost=len(lost))

    def change(self, generation: Generation, *, step: int) -> Change:
        """The change, once all ranks continue."""
        before, now = set(self.members), set(generation.members)
        return Change(
            generation.number,
            step,
            world_size=len(now),
            lost=sorted(before - now),
            joined=sorted(now - before),
            reason="; ".join(filter(None, self.reasons)),
            is_redone=self.is_redone,
            pause_s=0.0 if self.since is None else time.monotonic() - self.since,
            norm_lost=self.norm_lost,
            taken_over=sorted(self.taken_over & (before - now)),
        )


def norm_of_lost(norms: Sequence[float | None], *, lost: int) -> float:
    """Norm of ``lost`` residuals, estimated from ``norms``; None of ranks that are new."""
    known = [norm for norm in norms if norm is not None]
    mean_square = sum(norm**2 for norm in known) / max(len(known), 1)
    return float((lost * mean_square) ** 0.5)
