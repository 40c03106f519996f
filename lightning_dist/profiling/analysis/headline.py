"""The most important of a profile, in words."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dist.profiling.analysis.parts import Summary, Uneven

_LEAST = 0.005
"""Below this share there is nothing to say."""

_MOST_NAMED = 4
"""Of more ranks only the number is told."""


def headline(summary: Summary, *, of_steps: tuple[int, int] | None = None) -> str:
    """One or two sentences of what was measured.

    Args:
        of_steps: how many of how many steps count, where that has to be said.
    """
    told = _of_some(summary, of_steps), _measured(summary), _besides(summary)
    return " ".join(filter(None, told))


def _of_some(summary: Summary, of_steps: tuple[int, int] | None) -> str:
    """A warning before all else, where lines are missing: the figures are not of the whole run."""
    here, all_ = len(summary.ranks), summary.run.get("world_size", 0)
    found = [f"OF {here} OF {all_} RANKS"] if 0 < here < all_ else []
    if of_steps is not None:
        found.append(f"OF {of_steps[0]} OF {of_steps[1]} STEPS")
    return f"{', '.join(found)} ONLY:" if found else ""


def _measured(summary: Summary) -> str:
    step = f"a step takes {milliseconds(summary.step_ms['mean'])}"
    if not summary.steps:
        return f"Nothing to say: {summary.reasons.get('steps', 'no step was recorded')}."
    if "parts_ms" in summary.reasons:
        return f"{_capital(step)}; {summary.reasons['parts_ms']}, so nothing is known of its parts."
    if summary.run.get("world_size", 1) < 2:
        return f"One rank communicates with nobody; {step}."
    assert summary.exposed is not None
    assert summary.exposed_ms is not None
    assert summary.hidden_ms is not None
    if summary.exposed < _LEAST:
        if summary.overlap is None:
            return f"{_capital(summary.reasons.get('overlap', 'nothing was exchanged'))}; {step}."
        hidden = milliseconds(summary.hidden_ms)
        return (
            f"Communication is hidden: {hidden} under the backward pass, "
            f"{milliseconds(summary.exposed_ms)} exposed; {step}."
        )
    share = percent(summary.exposed)
    exposed = milliseconds(summary.exposed_ms)
    shares = _shares(summary, summary.exposed_ms)
    return f"{share} of the step is exposed communication ({exposed}): {shares}."


def _shares(summary: Summary, exposed_ms: float) -> str:
    rank = summary.exposed_straggler
    whom = "each other" if rank is None else f"rank {rank}"
    # Where waiting is not known, all of it may be in what counts as transfer.
    transfer = "transfer or unknown waiting" if "wait" in summary.reasons else "transfer"
    names = {
        "transfer": transfer,
        "wait": f"waiting for {whom}",
        "codec": "codec",
        "unattributed": "unattributed",
    }
    shares = {name: (summary.parts_ms[name] or 0.0) / exposed_ms for name in names}
    return ", ".join(
        f"{percent(shares[name])} {names[name]}" for name in names if shares[name] >= _LEAST
    )


def _besides(summary: Summary) -> str:
    """What exchanges do not show."""
    if not summary.uneven:
        return ""
    told = longer(summary.uneven, of=len(summary.ranks))
    return f"Besides, {told}, which may be waiting outside of exchanges."


def longer(uneven: Sequence[Uneven], *, of: int) -> str:
    """Such as ``rank 1 is 53 ms longer in forward than rank 0``, of ``of`` ranks."""
    return ", and ".join(
        f"{_who(each.ranks, of)} {milliseconds(each.more_ms)} longer in {each.phase} "
        f"than rank {each.than}"
        for each in uneven
    )


def _who(ranks: Sequence[int], of: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} of {of} ranks are up to"
    return f"ranks {', '.join(map(str, sorted(ranks)))} are up to"


def percent(share: float) -> str:
    """Such as ``31 %``; below 1 with a decimal."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.00995 else f"{100 * share:.0f} %"


def two_digits(share: float) -> str:
    """Such as ``1.2 %`` and ``12 %``: to tell a share from another that is near."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def milliseconds(value: float | None) -> str:
    """Such as ``412 ms`` and ``4.12 ms``: three digits; ``n/a`` of None."""
    if value is None:
        return "n/a"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def count(number: int, what: str) -> str:
    """Such as ``1 step`` and ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
