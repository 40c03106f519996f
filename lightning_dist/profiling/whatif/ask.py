"""What a summary says of other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.answer import WhatIf
from lightning_dist.profiling.whatif.candidates import candidates, other_buckets
from lightning_dist.profiling.whatif.costs_file import Costs
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import Wish, predict
from lightning_dist.profiling.whatif.setting import FLAT
from lightning_dist.profiling.whatif.told import predicted
from lightning_dist.reducer.costs import CANDIDATES


def with_whatif(summary: Summary, run: Run, costs: Callable[[Observed], Costs]) -> Summary:
    """``summary`` of ``run`` with predictions, or with the reason why there are none.

    Args:
        costs: of codecs; is asked only where something can be predicted with them.
    """
    try:
        found = ask(run, costs)
    except ValueError as error:
        return replace(summary, reasons={**summary.reasons, "whatif": str(error)})
    except Exception as error:  # the rest of the report is worth more than this part of it
        reason = f"the prediction failed: {type(error).__name__}: {error}"
        return replace(summary, reasons={**summary.reasons, "whatif": reason})
    told = " ".join(filter(None, (summary.headline, predicted(found))))
    return replace(summary, whatif=found, headline=told)


def ask(run: Run, costs: Callable[[Observed], Costs]) -> WhatIf:
    """All candidates on the links and hosts of the run.

    Raises:
        ValueError: nothing can be predicted, and why.
    """
    observed = observe(run)
    known = costs(observed)
    if not known.by_name:
        raise ValueError(known.reason)
    setting, like = observed.setting, Wish()
    wishes = [
        wish
        for wish in candidates(observed, CANDIDATES, like=like)
        if (wish.codec, wish.form or FLAT) != (setting.codec, setting.form)
    ]
    wishes += other_buckets(observed, like=like)
    found = predict(observed, wishes, costs=known.by_name)
    if known.reason:
        found = replace(found, reasons={**found.reasons, "costs": known.reason})
    return found
