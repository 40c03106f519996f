"""Summaries and time lines written by hand, for what is made of them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dist.profiling.analysis.parts import (
    PARTS,
    BucketSummary,
    PerStep,
    RankSummary,
    Summary,
    Timeline,
    TimelineSpan,
    Traffic,
)
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.whatif.scenarios import Prediction, Predictions

MS = 1_000_000
MEANS = dict(zip(PARTS, (2.1, 20.4, 41.0, 12.3, 30.8, 3.2, 0.6, 5.0, 0.9), strict=True))


def nodes_of(ranks: int) -> list[str]:
    """Two ranks on every node, or one if there are two."""
    return [f"node-{rank // 2 if ranks > 2 else rank:02d}.cluster" for rank in range(ranks)]


def a_series(*, ranks: int = 2, steps: int = 120, late: int = 1, seed: int = 1) -> PerStep:
    """Steps around :data:`MEANS`, in which ``late`` is waited for."""
    rng = random.Random(seed)
    parts = {
        name: [value * rng.uniform(0.85, 1.25) for _ in range(steps)]
        for name, value in MEANS.items()
    }
    waits = {
        rank: [0.0 if rank == late else rng.uniform(4, 22) for _ in range(steps)]
        for rank in range(ranks)
    }
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    return PerStep(list(range(2, 2 + steps)), totals, parts, waits)


def sampled(summary: Summary, steps: Sequence[int]) -> Summary:
    """The same where only these ``steps`` were recorded in detail."""
    per_step = summary.per_step
    at = [per_step.steps.index(step) for step in steps]

    def of(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in at]

    few = PerStep(
        list(steps),
        of(per_step.step_ms),
        {name: of(values) for name, values in per_step.breakdown_ms.items()},
        {rank: of(values) for rank, values in per_step.wait_ms.items()},
    )
    return replace(summary, per_step=few, detailed_steps=len(at))


def a_timeline(
    *, ranks: int = 2, buckets: int = 5, late: int = 1, label: str = "median step"
) -> Timeline:
    """One step in which ``late`` has a longer forward pass; two exchanges are under way at once."""
    phases, ready, spans = {}, {}, {}
    begins = {rank: (2 + 20 + 12 * (rank == late)) for rank in range(ranks)}  # of the backward pass
    at = [[begins[rank] + 8 * (index + 1) for index in range(buckets)] for rank in range(ranks)]
    last = [max(at[rank][index] for rank in range(ranks)) + 1 for index in range(buckets)]
    ends: list[float] = []
    for index in range(buckets):
        ends.append(max([last[index], *ends[:-1]]) + 15)
    for rank in range(ranks):
        placed, of_buckets, now = [], [], ends[-1]
        for index in range(buckets):
            begin = at[rank][index]
            placed.append(TimelineSpan("encode", index, ns(begin), ns(begin + 1)))
            placed.append(
                TimelineSpan(
                    "exchange",
                    index,
                    ns(begin + 1),
                    ns(ends[index]),
                    arrival=ns(last[index]),
                    op="all_gather",
                    group="flat",
                    sent=1_000_000,
                )
            )
        for index in range(buckets):
            placed.append(TimelineSpan("decode", index, ns(now), ns(now + 1.5)))
            now += 1.5
            of_buckets.append((index, ns(at[rank][index]), ns(now)))
        phases[rank] = [
            ("between_steps", 0, ns(2)),
            ("forward", ns(2), ns(begins[rank])),
            ("backward", ns(begins[rank]), ns(now)),
            ("optimizer", ns(now), ns(now + 5)),
        ]
        ready[rank] = of_buckets
        spans[rank] = sorted(placed, key=lambda each: each.begin)
    return Timeline(57, label, phases, ready, spans)


def ns(milliseconds: float) -> int:
    return round(milliseconds * MS)


def a_summary(
    *,
    ranks: int = 2,
    steps: int = 120,
    late: int = 1,
    nodes: Sequence[str] | None = None,
) -> Summary:
    """Everything was measured, except the bandwidth inside nodes."""
    nodes = nodes or nodes_of(ranks)
    rng = random.Random(2)
    return Summary(
        headline=(
            "40 % of the step is exposed communication (46.9 ms): 66 % of that is transfer, 26 % "
            f"waiting for rank {late}, 7 % codec."
        ),
        run={
            "codec": "int8",
            "backend": "gloo",
            "device": "cpu",
            "world_size": ranks,
            "nodes": list(nodes),
            "script": "/home/me/train.py",
            "started": "2026-11-22T22:24:05+00:00",
            "versions": {"torch": "2.13.0", "lightning": "2.6.6"},
        },
        steps=steps,
        warmup_steps=2,
        step_ms={"mean": sum(MEANS.values()), "median": 114.2, "p95": 139.8},
        breakdown_ms=MEANS,
        exposed_ms=46.9,
        hidden_ms=25.2,
        overlap_fraction=0.35,
        traffic=Traffic(64e6, 16.3e6, 4.1e6, 12.2e6, 0.187, 0.734, 0.196),
        ranks=[
            RankSummary(
                rank,
                nodes[rank],
                step_ms=116.3 + rng.random(),
                exposed_ms=46 + rng.random(),
                wait_ms=0.4 if rank == late else 12 + rng.random(),
                waited_for_ms=12.5 * (ranks - 1) if rank == late else rng.random(),
                clock_uncertainty_ms=0.021 if rank else None,
                inter_gbps=0.187,
                phases_ms={name: MEANS[name] for name in PHASES},
            )
            for rank in range(ranks)
        ],
        buckets=[
            BucketSummary(index, "int8", 16.0, 4.07, 30 + 8 * index, 1, 6.2, 15.3, 1.5, 5.1 * index)
            for index in range(4)
        ],
        straggler=late,
        profiler_overhead=0.00052,
        per_step=a_series(ranks=ranks, steps=steps, late=late),
        errors=[
            {
                "step": step,
                "bucket": bucket,
                "rank": 0,
                "relative_l2": 0.008 * rng.uniform(0.8, 1.3),
                "cosine": 0.99993 + 0.00005 * rng.random(),
                "residual_ratio": 0.012 * rng.uniform(0.8, 1.3),
            }
            for step in range(0, steps, 10)
            for bucket in range(4)
        ],
        links=[
            {"rank": a, "peer": b, "group": "flat", "sent": 8_000_000, "seconds": seconds}
            for a in range(ranks)
            for b in range(ranks)
            if a != b
            for seconds in [0.004 if nodes[a] == nodes[b] else 0.33 + 0.1 * rng.random()]
        ],
        notes=["rank 1 is missing from step 119 on"],
        predictions=a_whatif(ranks=ranks),
        detailed_steps=steps,
    )


def a_whatif(*, ranks: int = 2) -> Predictions:
    """Three settings that are told apart or not, and one of which nothing is known."""

    def told(codec: str, step: float, *, sent_mb: float = 16.0, **more: Any) -> Prediction:
        of_run = {"step_ms": step, "exposed_ms": step - 70, "sent_mb": sent_mb}
        source = "measured alone on node-00.cluster after this run, not compiled"
        return Prediction(codec, "flat", 2, ranks, 0.196, **of_run, source=source, **more)

    return Predictions(
        measured_ms=114.2,
        baseline=told("int8", 112.0),
        error=-0.0193,
        tolerance=0.02,
        scenarios=[
            told("int4", 92.0, sent_mb=8.2, change=-0.179, position=1),
            told("sign", 93.0, sent_mb=2.1, change=-0.17, position=1),
            told("fp8", 111.0, change=-0.009, position=3),
            told("ddp", 280.0, sent_mb=64.0, change=1.5, position=4),
            Prediction("topk", "flat", 2, ranks, 0.196, reason="the cost of topk was not measured"),
        ],
        link={"gbps": 0.196, "inside_gbps": None, "latency_us": None},
        unavailable={"latency": "no small exchange was seen"},
    )
