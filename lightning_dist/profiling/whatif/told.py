"""Predictions in words, wherever they are shown."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dist.profiling.analysis.metrics import format_value
from lightning_dist.profiling.whatif.answer import Prediction, Predictions, is_faster
from lightning_dist.profiling.whatif.simulator import FLAT, LEADER

_NOTHING = "No other setting is predicted to be faster than the model can tell"


def predicted(found: Predictions) -> str:
    """The sentence of the headline; empty where the model has no error to be judged by."""
    if found.tolerance is None or found.baseline.step_ms is None:
        return ""
    best = recommended(found)
    if best is None or best.step_ms is None:
        only = dict.fromkeys(each.codec for each in found.scenarios if is_faster(each))
        unless = f"; {', '.join(only)} may be, under its assumption" if only else ""
        return f"{_NOTHING}{unless}."
    return f"Predicted with {name_of(best, found.baseline)}: {times_faster(best)}."


def recommended(found: Predictions) -> Prediction | None:
    """The first of the others, if it is faster by more than the model can be wrong."""
    first = next(iter(found.scenarios), None)
    return first if first is not None and first.position and is_faster(first) else None


def name_of(each: Prediction, baseline: Prediction) -> str:
    """The codec, and what else is not as in a flat exchange with the buckets of the run."""
    words = each.codec
    if each.form != FLAT:
        words += " between hosts"
    elif baseline.form != FLAT:
        words += ", flat"
    if each.form == LEADER:
        words += ", leader form"
    if each.bucket_mb is not None:
        words += f" in buckets of {each.bucket_mb:g} MB"
    return words


def times_faster(each: Prediction) -> str:
    """Such as ``1.9x``, against the prediction for the run itself."""
    assert each.change is not None
    factor = 1 / (1 + each.change)
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.2g}x"


def remarks(each: Prediction) -> str:
    """What beside the figures has to be said of one."""
    found = (each.reason, each.verdict, each.assumption and f"not ranked: for {each.assumption}")
    return "; ".join(remark for remark in found if remark)


def error_of(found: Predictions) -> str:
    """How well the model knows the run itself."""
    baseline = found.baseline
    if found.error is None or found.tolerance is None or baseline.step_ms is None:
        return f"This run cannot be simulated: {baseline.reason}; nothing is ranked."
    return (
        f"This run simulated: {baseline.step_ms:.1f} ms ({signed(found.error)}). "
        f"Differences within {100 * found.tolerance:.1f} % are not ranked."
    )


def where_of(found: Predictions) -> str:
    """The hosts of the run, and what their rate is of."""
    if found.baseline.hosts > 1:
        return f"{found.baseline.hosts} hosts, {found.baseline.gbps:.3g} Gbit/s"
    return f"1 host, {found.baseline.gbps:.3g} Gbit/s of a rank, which is loopback or shared memory"


def sources(others: Iterable[Prediction]) -> list[str]:
    """Where the costs of codecs are from."""
    names: dict[str, list[str]] = {}
    for each in others:
        of_source = names.setdefault(each.source, [])
        if each.source and each.codec not in of_source:
            of_source.append(each.codec)
    return [
        f"what {', '.join(codecs)} cost: {source}" for source, codecs in names.items() if codecs
    ]


def untold(others: Iterable[Prediction]) -> list[str]:
    """Of which settings nothing can be told, and why."""
    of_reason: dict[str, dict[tuple[str, str], None]] = {}  # each once, of any number of hosts
    for each in others:
        if each.step_ms is None:
            of_reason.setdefault(each.reason, {})[each.codec, each.form] = None
    found = []
    for reason, settings in of_reason.items():
        codecs, forms = (list(dict.fromkeys(names)) for names in zip(*settings, strict=True))
        if len(codecs) * len(forms) == len(settings):
            told = f"{', '.join(codecs)} {' or '.join(forms)}"
        else:
            told = ", ".join(f"{codec} {form}" for codec, form in settings)
        found.append(f"n/a for {told}: {reason}")
    return found


def signed(share: float) -> str:
    """Such as ``+1.9 %``."""
    return format_value(share, "%", signed=True)
