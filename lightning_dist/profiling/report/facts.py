"""The figures that are read first."""

from __future__ import annotations

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.text import MISSING, finite, megabytes, ms, percent, rate, why
from lightning_dist.profiling.report.view import Fact


def facts(summary: Summary) -> list[Fact]:
    """Those of the whole run; what is missing says why."""
    return [
        *_step(summary),
        _overlap(summary),
        *_traffic(summary),
        _straggler(summary),
        _steps(summary),
        _overhead(summary),
    ]


def _step(summary: Summary) -> list[Fact]:
    mean = finite(summary.step_ms.get("mean"))
    if not summary.steps or mean is None:
        because = why(summary, "step_ms")
        return [
            _missing("Exposed communication", because),
            _missing("Step", because),
        ]
    rest = [
        f"{words} {ms(summary.step_ms[name])}"
        for name, words in (("median", "median"), ("p95", "95 % of all below"))
        if name in summary.step_ms
    ]
    label = f"All {summary.steps:,} steps" if summary.steps > 1 else "The one step"
    return [_exposed(summary), Fact(label, ms(mean), ", ".join(["mean", *rest]))]


def _exposed(summary: Summary) -> Fact:
    label = "Exposed communication"
    if summary.exposed is None or summary.exposed_ms is None:
        return _missing(label, why(summary, "exposed_ms"))
    detail = f"{ms(summary.exposed_ms)} of the {ms(summary.parts_step_ms)} of a step in detail"
    return Fact(label, percent(summary.exposed), detail)


def _overlap(summary: Summary) -> Fact:
    if summary.overlap is None or summary.hidden_ms is None:
        return _missing("Hidden under compute", why(summary, "overlap"))
    return Fact(
        "Hidden under compute",
        percent(summary.overlap),
        f"of the time in which exchanges were under way; {ms(summary.hidden_ms)} per step",
    )


def _traffic(summary: Summary) -> list[Fact]:
    traffic = summary.traffic
    if traffic is None:
        because = why(summary, "traffic")
        return [_missing("Sent per step and rank", because), _missing("Bandwidth used", because)]
    sent = Fact(
        "Sent per step and rank" + ("" if summary.is_of_all else " that has left steps"),
        megabytes(traffic.wire_bytes),
        f"{_compared(traffic.ratio)} uncompressed DDP ({megabytes(traffic.raw_bytes)}); "
        f"{megabytes(traffic.inter_bytes)} to other hosts",
    )
    if traffic.wire_gbps is None:
        return [sent, _missing("Bandwidth used", why(summary, "traffic.wire_gbps"))]
    used = traffic.link_utilization
    if used is None:
        because = why(summary, "traffic.peak_gbps")
        detail = f"peak {MISSING}: {because}"
    else:
        detail = f"{percent(used)} of the measured peak, {rate(traffic.peak_gbps)}"
    if traffic.effective_gbps is not None:
        detail += f"; uncompressed DDP would have needed {rate(traffic.effective_gbps)}"
    return [sent, Fact("Bandwidth used", rate(traffic.wire_gbps), detail)]


def _compared(ratio: float) -> str:
    if ratio < 0.95:
        return "more than"
    return "as many as" if ratio < 1.05 else f"{ratio:.1f} times fewer than"


def _straggler(summary: Summary) -> Fact:
    if not summary.steps or (summary.straggler is None and "wait" in summary.reasons):
        return _missing("Straggler", why(summary, "straggler"))
    if summary.straggler is None:
        detail = summary.reasons.get("straggler", "most of the waiting is not for one rank")
        return Fact("Straggler", "none", detail)
    detail = "most of the waiting is for it"
    for each in summary.ranks:
        if each.rank == summary.straggler:
            detail = f"on {each.host}; others waited {ms(each.caused_ms)} per step for it"
    return Fact("Straggler", f"rank {summary.straggler}", detail)


def _steps(summary: Summary) -> Fact:
    if not summary.steps:
        return Fact("Steps", "0", why(summary, "step_ms"))
    here, all_ = len(summary.ranks), summary.run.get("world_size", 0)
    who = "all ranks" if summary.is_of_all else f"the ranks with lines, {here} of {all_},"
    detail = f"that {who} have recorded"
    if "parts_ms" not in summary.reasons:
        detail += f", {summary.parts_steps:,} of them looked at in detail"
    if summary.skipped:
        detail += f", without the first {summary.skipped}"
    return Fact("Steps", f"{summary.steps:,}", detail)


def _overhead(summary: Summary) -> Fact:
    if summary.overhead is None:
        return _missing("Profiler", why(summary, "overhead"))
    return Fact("Profiler", percent(summary.overhead), "of the time was its own")


def _missing(label: str, because: str) -> Fact:
    return Fact(label, MISSING, because, missing=True)
