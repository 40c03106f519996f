"""Predictions in words, wherever they are shown."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dist.profiling.analysis.metrics import format_value
from lightning_dist.profiling.whatif.answer import Prediction, WhatIf, is_faster
from lightning_dist.profiling.whatif.simulator import FLAT, LEADER

_NOTHING = "No other setting is predicted to be faster than the model can tell"


def predicted(found: WhatIf) -> str:
    """The sentence of the headline; empty where the model has no error to be judged by."""
    if found.margin is None or found.current.step_ms is None:
        return ""
    best = recommended(found)
    if best is None or best.step_ms is None:
        only = dict.fromkeys(each.codec for each in found.others if is_faster(each))
        unless = f"; {', '.join(only)} may be, with what it assumes" if only else ""
        return f"{_NOTHING}{unless}."
    return f"Predicted with {name_of(best, found.current)}: {times_faster(best)}."


def recommended(found: WhatIf) -> Prediction | None:
    """The first of the others, if it is faster by more than the model can be wrong."""
    first = next(iter(found.others), None)
    return first if first is not None and first.place and is_faster(first) else None


def name_of(each: Prediction, current: Prediction) -> str:
    """The codec, and what else is not as in a flat exchange with the buckets of the run."""
    words = each.codec
    if each.form != FLAT:
        words += " between hosts"
    elif current.form != FLAT:
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
    found = (each.reason, each.verdict, each.assumes and f"not ranked: for {each.assumes}")
    return "; ".join(remark for remark in found if remark)


def error_of(found: WhatIf) -> str:
    """How well the model knows the run itself."""
    current = found.current
    if found.error is None or found.margin is None or current.step_ms is None:
        return f"The model says nothing of the run itself: {current.reason}; so nothing is ranked."
    return (
        f"The model says {current.step_ms:.1f} ms of it, {signed(found.error)}. Steps within "
        f"{100 * found.margin:.1f} % are not told apart."
    )


def where_of(found: WhatIf) -> str:
    """The hosts of the run, and what their rate is of."""
    if found.current.hosts > 1:
        return f"{found.current.hosts} hosts, {found.current.gbps:.3g} Gbit/s"
    return f"1 host, {found.current.gbps:.3g} Gbit/s of a rank, which is loopback or shared memory"


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
