"""Planted runs for predictions, and what codecs cost in them."""

from __future__ import annotations

from planted import MS, Planted, replace

from lightning_dist.profiling.capture.events import Span
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.answer import WhatIf
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import Wish, predict
from lightning_dist.reducer.chunk_sizes import CHUNK_ELEMENTS
from lightning_dist.reducer.costs import CodecCost

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)
INT8 = replace(DDP, codec="int8", encode=1, decode=2, sent=1_000_000, transfer=10)
CHUNK = replace(INT8, raw=4 * CHUNK_ELEMENTS, sent=CHUNK_ELEMENTS)
"""Buckets of one chunk each, as planted ones are; larger ones overlap with themselves."""

COSTS = {
    # of a bucket of a million elements 1 ms and, with two payloads, 2 ms
    "int8": CodecCost("int8", "two_shot", 1.0, encode=1e-9, decode=5e-10, settle=1e-9),
    "fp16": CodecCost("fp16", "allreduce", 2.0, encode=0.0, decode=0.0, settle=0.0, source="here"),
    "none": CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, settle=0.0),
}


def asked(planted: Planted, *wishes: Wish) -> WhatIf:
    return predict(observe(planted.run()), wishes, costs=COSTS)


def duration(planted: Planted) -> float:
    return planted.run().ranks[0].steps[4].duration / MS


def with_small_exchanges(run: Run, took: float) -> Run:
    """Each step has a vote of a few bytes, too."""
    ranks = {}
    for rank, each in run.ranks.items():
        steps = {}
        for number, step in each.steps.items():
            begin = round(1 * MS)
            vote = Span(
                "exchange", -1, begin, begin + round(took * MS), "all_reduce", "control", 8, order=0
            )
            steps[number] = replace(step, spans=(vote, *step.spans))
        about = replace(each.about, groups={**each.about.groups, "control": [0, 1]})
        ranks[rank] = replace(each, about=about, steps=steps)
    return Run(ranks)
