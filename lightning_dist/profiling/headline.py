"""The most important of a profile, in words."""

from __future__ import annotations

from lightning_dist.profiling.parts import Summary
from lightning_dist.profiling.whatif.told import predicted

_LEAST = 0.005
"""Below this share there is nothing to say."""


def headline(summary: Summary) -> str:
    """One or two sentences, and one of what is predicted, where something is."""
    sentences = [_of_some(summary), _measured(summary)]
    if summary.whatif is not None:
        sentences.append(predicted(summary.whatif))
    return " ".join(filter(None, sentences))


def _of_some(summary: Summary) -> str:
    """A warning before all else, where ranks have left nothing: waiting for them is not known."""
    here, all_ = len(summary.ranks), summary.run.get("world_size", 0)
    return f"OF {here} OF {all_} RANKS ONLY:" if 0 < here < all_ else ""


def _measured(summary: Summary) -> str:
    step = f"a step takes {milliseconds(summary.step_ms['mean'])}"
    if not summary.steps:
        return f"Nothing to say: {summary.reasons.get('step_ms', 'no step was recorded')}."
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


def percent(share: float) -> str:
    """Such as ``31 %``; below 1 with a decimal."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.00995 else f"{100 * share:.0f} %"


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
