"""Inputs of a simulation of a model that is sharded over all ranks, read from its profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dist.measurement.calibration import CodecCost
from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.parts import TimelineSpan
from lightning_dist.profiling.analysis.tables import Array
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, BucketTimes, Span
from lightning_dist.profiling.whatif.scenarios import ShardCollective

NS = 1e9
"""Nanoseconds in a second."""

IN_RUN = "as in this run, while training"
"""Source of the cost of a run's own codec."""


@dataclass(frozen=True)
class ObservedShards:
    """Collectives of a step in their order; seconds, medians over steps of the mean over ranks.

    Args:
        parameters, gradients: costs of the codecs, with the bytes and times of the run.
        transfer: of all collectives, from the launch on the last rank.
        tail: from the end of the last collective to that of the step, without codecs.
    """

    collectives: Sequence[ShardCollective]
    parameters: CodecCost
    gradients: CodecCost
    transfer: float
    tail: float


def why_no_shards(every: Sequence[Analysed]) -> str:
    """Reason why the collectives of these steps cannot be simulated; empty if they can."""
    spans = [span for each in every for span in each.exchanges]
    reasons = {
        "its model is sharded over all ranks, and what an accelerator computes meanwhile is not "
        "recorded": any(not span.blocks for span in spans),
        "its collectives have no sizes; profile it again with this version": any(
            not span.numel for span in spans
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def main_codec(exchanged: Iterable[BucketTimes | Span]) -> str:
    """Codec of the most bytes: small tensors travel as they are, beside it."""
    weights: Counter[str] = Counter()
    for each in exchanged:
        names = [name for name in each.codec.split("+") if name != "none"]
        weights[names[0] if names else "none"] += each.raw
    return max(weights, key=lambda name: weights[name])


def observe_shards(every: Sequence[Analysed], *, ranks: int) -> ObservedShards:
    """Inputs from steps, those of all ranks; of steps with the most frequent collectives."""
    sequences = Counter(_sequence(each) for each in every)
    common = max(sequences, key=lambda sequence: sequences[sequence])
    chosen = [each for each in every if _sequence(each) == common]
    computing = np.array([_computing(each) for each in chosen]) / NS
    *before, tail = _typical(chosen, computing)
    moving = np.array([[each.ns["moved"]] for each in chosen]) / NS
    return ObservedShards(
        [
            ShardCollective(gathers, compute, numel * ranks, raw / numel / (ranks - 1))
            for (gathers, numel, raw), compute in zip(common, before, strict=True)
        ],
        _cost(chosen, gathers=True, ranks=ranks),
        _cost(chosen, gathers=False, ranks=ranks),
        transfer=_typical(chosen, moving)[0],
        tail=tail,
    )


def _sequence(step: Analysed) -> tuple[tuple[bool, int, int], ...]:
    return tuple((span.bucket == OF_NO_BUCKET, span.numel, span.raw) for span in step.exchanges)


def _computing(step: Analysed) -> list[float]:
    """Nanoseconds before each collective and after the last: no codec, and nothing on its way."""
    codec = [span for span in step.spans if span.phase != "exchange"]
    found, now = [], 0
    for span in step.exchanges:
        found.append(span.transfer[0] - now - _within(codec, now, span.transfer[0]))
        now = span.end
    return [*found, step.duration - now - _within(codec, now, step.duration)]


def _within(codec: Sequence[TimelineSpan], begin: int, end: int) -> int:
    return sum(span.end - span.begin for span in codec if begin <= span.begin < end)


def _typical(steps: Sequence[Analysed], values: Array) -> list[float]:
    """Medians over steps of the means over ranks; ``values (steps and ranks, columns)``."""
    numbers = np.array([each.record.step for each in steps])
    means = [values[numbers == number].mean(axis=0) for number in np.unique(numbers)]
    return [float(each) for each in np.median(means, axis=0)]


def _cost(steps: Sequence[Analysed], *, gathers: bool, ranks: int) -> CodecCost:
    """Cost of the codec of the parameters, or of the gradients, as measured in the run."""
    chosen = [
        [span for span in each.spans if (span.bucket == OF_NO_BUCKET) == gathers] for each in steps
    ]
    exchanges = [span for spans in chosen for span in spans if span.phase == "exchange"]
    times = [
        [sum(s.end - s.begin for s in spans if s.phase == phase) for phase in ("encode", "decode")]
        for spans in chosen
    ]
    encode, decode = _typical(steps, np.array(times) / NS)
    numel = sum(span.numel for span in exchanges)
    of_step = numel / len(steps)
    return CodecCost(
        main_codec(exchanges),
        "two_shot",
        sum(span.sent for span in exchanges) / (ranks - 1) / numel,
        encode=encode / of_step / (1 if gathers else ranks),
        decode=decode / of_step / ranks,
        store=0.0,
        source=IN_RUN,
    )
