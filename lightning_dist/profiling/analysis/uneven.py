"""Phases in which ranks differ without waiting for each other in exchanges of gradients.

Ranks make their steps together: what one of them takes longer the others spend elsewhere. Where
that is not in an exchange, they may wait in a collective that nobody has told the profiler of.
"""

from __future__ import annotations

from lightning_dist.profiling.analysis.findings import Findings
from lightning_dist.profiling.analysis.parts import Uneven
from lightning_dist.profiling.analysis.stragglers import may_be_chance
from lightning_dist.profiling.analysis.totals import MS

_ORDER = ("optimizer", "data", "forward", "backward")
"""As they come after an exchange, which ranks leave together: who is late in one is waited for in
another that comes later."""

_LEAST = 0.1
"""Share of the step up to which ranks are as good as even."""

_EXPLAINED = 0.5
"""Share of a difference; where so much of it is waiting in exchanges, that is all there is."""


def uneven_phases(found: Findings) -> list[Uneven]:
    """In the order in which they come after an exchange; none where waiting is not known."""
    if found.unknown_wait or not any(each.union for each in found.ranks.values()):
        return []
    return [each for phase in _ORDER if (each := _uneven(found, phase)) is not None]


def waits_explain(found: Findings, rank: int, more_ms: float) -> bool:
    """Whether ``rank`` is waited for in exchanges as long as something that takes ``more_ms``."""
    longest = max(each.waited_for[rank] / max(each.steps, 1) for each in found.ranks.values())
    return longest / MS >= _EXPLAINED * more_ms


def _uneven(found: Findings, phase: str) -> Uneven | None:
    ms = {rank: each.parts[phase] / each.steps / MS for rank, each in found.ranks.items()}
    by_length = sorted(ms, key=lambda rank: (-ms[rank], rank))
    longest, shortest = by_length[0], min(ms, key=lambda rank: ms[rank])
    more = ms[longest] - ms[shortest]
    if more <= _LEAST * found.duration_ms or _is_explained(found, longest, shortest, more):
        return None
    of_steps = found.phases[phase]
    if may_be_chance([a - b for a, b in zip(of_steps[longest], of_steps[shortest], strict=True)]):
        return None
    ranks = [rank for rank in by_length if ms[rank] - ms[shortest] > more / 2]
    return Uneven(phase, ranks, shortest, more)


def _is_explained(found: Findings, longest: int, shortest: int, more_ms: float) -> bool:
    """Ranks wait for the longest in exchanges, or the shortest for one that has waited for it."""
    waited = {rank: each.waited / each.steps / MS for rank, each in found.ranks.items()}
    return (
        waits_explain(found, longest, more_ms)
        or waited[shortest] - waited[longest] >= _EXPLAINED * more_ms
    )
