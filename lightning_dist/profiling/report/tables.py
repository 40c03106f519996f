"""Facts and tables of a summary, as the page and the terminal show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_dist.profiling.analysis.metrics import (
    METRICS,
    MISSING,
    TEXT,
    Metric,
    count,
    finite,
    format_value,
    why,
)
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.whatif.predictions import (
    LABEL,
    Prediction,
    Predictions,
    name_of,
    notes,
    remark,
    where,
)

PREDICTED = LABEL

RANK_COLUMNS = (
    *("rank", "host", "step_ms", "exposed_ms", "wait_ms", "waited_for_ms"),
    *PHASES,
    *("clock_uncertainty_ms", "intra_gbps", "inter_gbps"),
)
_BUCKET_COLUMNS = ("raw_mb", "wire_mb", "ready_ms", "encode_ms", "wait_ms", "transfer_ms")
_WHATIF_COLUMNS = ("position", "setting", "step_ms", "exposed_ms", "sent_mb", "change", "remark")


@dataclass(frozen=True)
class Fact:
    """A figure of the whole run; ``detail`` of a missing one is the reason."""

    label: str
    value: str
    detail: str = ""

    @property
    def missing(self) -> bool:
        """True if it was not measured."""
        return self.value == MISSING


@dataclass(frozen=True)
class Table:
    """Rows of text, or a sentence that says why there are none."""

    id: str
    title: str
    columns: Sequence[Metric]
    rows: Sequence[Sequence[str]] = ()
    caption: str = ""
    missing: str = ""


def facts(summary: Summary) -> list[Fact]:
    """The figures of the whole run that are read first."""

    def fact(key: str, value: float | None, detail: str = "", *unavailable: str) -> Fact:
        label, unit = METRICS[key].label, METRICS[key].unit
        if value is None:
            return Fact(label, MISSING, why(summary.unavailable, key, *unavailable))
        return Fact(label, format_value(value, unit), detail)

    step, traffic = summary.step_ms, summary.traffic
    of_ranks = f" and {len(summary.ranks)} ranks" if len(summary.ranks) > 1 else ""
    mean = f"mean of {count(summary.steps, 'step')}{of_ranks}"
    spread = [f"{name} {_ms(step[name])}" for name in ("median", "p95") if name in step]
    warm_up = summary.warmup_steps
    excluded = f"{count(warm_up, 'warm-up step')} excluded" if warm_up else ""
    found = [
        fact(
            "exposed",
            summary.exposed,
            f"{_ms(summary.exposed_ms)} of {_ms(summary.detailed_step_ms)}, the mean of "
            f"{count(summary.detailed_steps, 'detailed step')}",
            "exposed_ms",
            "step_ms",
        ),
        fact("step_ms", step.get("mean"), "; ".join(filter(None, (mean, *spread, excluded)))),
        fact(
            "overlap_fraction",
            summary.overlap_fraction,
            f"{_ms(summary.hidden_ms)} per step hidden",
        ),
    ]
    if traffic is None:
        found.append(fact("traffic", None))
    else:
        ratio = traffic.compression_ratio
        less = f"{ratio:.1f}x less than" if ratio >= 1.05 else "compared to"
        found += [
            fact(
                "traffic",
                traffic.wire_bytes,
                f"per step and rank{'' if summary.is_of_all else ' with records'}, {less} "
                f"{format_value(traffic.raw_bytes, 'B')} of uncompressed DDP; "
                f"{format_value(traffic.inter_bytes, 'B')} to other hosts",
            ),
            fact("traffic.wire_gbps", traffic.wire_gbps),
            fact(
                "traffic.ddp_equivalent_busbw_gbps",
                traffic.ddp_equivalent_busbw_gbps,
                "uncompressed DDP, equal time",
            ),
            fact(
                "traffic.link_gbps",
                traffic.link_gbps,
                f"{format_value(traffic.link_utilization, '%')} used"
                + (", inside one host: no network" if _is_one_host(summary) else ""),
            ),
        ]
    return [
        *found,
        _straggler(summary),
        fact("profiler_overhead", summary.profiler_overhead, "of the time"),
    ]


def _ms(value: float | None) -> str:
    return format_value(value, "ms")


def _is_one_host(summary: Summary) -> bool:
    return len(set(summary.run.get("hosts", ()))) == 1


def _straggler(summary: Summary) -> Fact:
    label = METRICS["straggler"].label
    if summary.straggler is None:
        is_known = summary.steps and "exposed_wait" not in summary.unavailable
        reason = why(summary.unavailable, "straggler", "exposed_wait", "step_ms")
        return Fact(label, "none" if is_known else MISSING, reason)
    (rank,) = [each for each in summary.ranks if each.rank == summary.straggler]
    detail = f"{rank.host}; other ranks waited {_ms(rank.waited_for_ms)} per step for it"
    return Fact(label, f"rank {rank.rank}", detail)


def parts_table(summary: Summary) -> Table:
    """The mean of the detailed steps, in parts."""
    columns = (
        *(Metric("part", "part", TEXT), Metric("time", "time", "ms")),
        *(Metric("share", "of the step"), Metric("meaning", "meaning", TEXT)),
    )
    title, total = "Mean step", summary.detailed_step_ms
    if not summary.steps or total is None:
        missing = f"n/a: {why(summary.unavailable, 'breakdown_ms', 'step_ms')}."
        return Table("parts", title, columns, missing=missing)
    rows = []
    for name in (each for each in PARTS if each in summary.breakdown_ms):
        value, meaning = finite(summary.breakdown_ms[name]), METRICS[name].meaning
        if value is None:
            meaning = f"n/a: {why(summary.unavailable, name)}"
        share = None if value is None or not total else value / total
        rows.append((METRICS[name].label, format_value(value), format_value(share, "%"), meaning))
    of_steps = f"mean of {count(summary.detailed_steps, 'step')}"
    if "breakdown_ms" in summary.unavailable:
        caption = f"Exposed communication is n/a: {why(summary.unavailable, 'breakdown_ms')}."
        rows.append(("step", format_value(total), "100 %", of_steps))
    else:
        caption = f"Exposed communication is {_ms(summary.exposed_ms)}."
        rows.append(("detailed step", format_value(total), "100 %", of_steps))
    caption += f" Shares are of these steps; the mean of all is {_ms(summary.step_ms['mean'])}."
    return Table("parts", title, columns, rows, caption)


def ranks_table(summary: Summary, *, ranks: Sequence[int] | None = None) -> Table:
    """Every rank, or ``ranks`` in that order."""
    columns = [METRICS[key] for key in RANK_COLUMNS]
    if not summary.ranks:
        missing = f"n/a: {why(summary.unavailable, 'step_ms')}."
        return Table("ranks", "Ranks", columns, missing=missing)
    rows = []
    by_rank = {each.rank: each for each in summary.ranks}
    for each in (by_rank[rank] for rank in (by_rank if ranks is None else ranks)):
        values = {**vars(each), **each.phases_ms}
        cells = {key: format_value(values.get(key)) for key in RANK_COLUMNS}
        cells |= {"rank": str(each.rank), "host": each.host}
        if each.rank == 0:
            cells["clock_uncertainty_ms"] = "reference"
        rows.append(tuple(cells.values()))
    caption = "Means per detailed step. Waits are hidden or exposed."
    return Table("ranks", "Ranks", columns, rows, caption)


def buckets_table(summary: Summary) -> Table:
    """Every bucket, with the error of its compression if it was measured."""
    keys = ("bucket", "bucket_codec", *_BUCKET_COLUMNS, "decode_ms", "end_after_last_gradient_ms")
    errors = defaultdict(list)
    for error in summary.errors:
        if (value := finite(error.get("relative_l2"))) is not None:
            errors[int(error["bucket"])].append(value)
    columns = [METRICS[key] for key in (*keys, *(["relative_l2"] if errors else []))]
    if not summary.buckets:
        missing = f"n/a: {why(summary.unavailable, 'buckets')}."
        return Table("buckets", "Buckets", columns, missing=missing)
    rows = []
    for each in summary.buckets:
        values = {**vars(each), "end_after_last_gradient_ms": each.exposed_ms}
        row = [str(each.index), each.codec or "none"]
        row += [format_value(values[key]) for key in keys[2:]]
        median_error = median(errors[each.index]) if errors[each.index] else None
        rows.append([*row, format_value(median_error)] if errors else row)
    caption = (
        "Means over ranks and detailed steps; errors are medians. Buckets share the link, so times "
        "of several do not add up to time of the step. Ready counts from the begin of the step."
    )
    return Table("buckets", "Buckets", columns, rows, caption)


def groups_table(summary: Summary) -> Table | None:
    """Collectives measured on the idle link, by group; None if there were none."""
    rates = defaultdict(list)
    for link in summary.links:
        if link.get("peer") is None and (seconds := finite(link.get("seconds"))):
            rates[str(link["group"])].append(link["sent"] * 8e-9 / seconds)
    if not rates:
        return None
    columns = [Metric("group", "group", TEXT), Metric("measurements", "measurements")]
    columns += [Metric(name, name) for name in ("slowest", "fastest")]
    rows = [
        (group, str(len(of)), *(format_value(each, "Gbit/s") for each in (min(of), max(of))))
        for group, of in sorted(rates.items())
    ]
    caption = "Rate at which a rank sent in a collective of its group, on the idle link."
    return Table("groups", "Bandwidth of groups", columns, rows, caption)


def whatif_table(summary: Summary, *, most: int | None = None) -> Table:
    """Predictions for the run and for other settings, the fastest first."""
    if summary.predictions is None:
        missing = f"n/a: {why(summary.unavailable, 'predictions', 'steps')}."
        return Table(
            "whatif", PREDICTED, [METRICS[key] for key in _WHATIF_COLUMNS], missing=missing
        )
    return predictions_table(summary.predictions, most=most)


def predictions_table(found: Predictions, *, most: int | None = None) -> Table:
    """The same of predictions that are there."""
    baseline = found.baseline

    def row(each: Prediction, position: str, name: str, change: str, words: str) -> Sequence[str]:
        figures = (each.step_ms, each.exposed_ms, each.sent_mb)
        return position, name, *map(format_value, figures), change, words

    error = format_value(found.error, "%", signed=True)
    own = f"measured {_ms(found.measured_ms)}; error of the simulation {error}"
    rows = [row(baseline, "", f"{name_of(baseline, baseline)} (this run)", "", own)]
    for each in [each for each in found.scenarios if each.step_ms is not None][:most]:
        position, change = str(each.position or ""), format_value(each.change, "%", signed=True)
        rows.append(row(each, position, name_of(each, baseline), change, remark(each, found)))
    sentences = [
        f"This step simulated with other settings: {where(baseline)}",
        "Accuracy is not predicted",
        *notes(found),
    ]
    caption = " ".join(f"{each[:1].upper()}{each[1:]}." for each in sentences)
    return Table("whatif", PREDICTED, [METRICS[key] for key in _WHATIF_COLUMNS], rows, caption)


def run_table(summary: Summary) -> Table:
    """Settings and versions of the run."""
    columns = Metric("setting", "setting", TEXT), Metric("value", "value", TEXT)
    missing = "" if summary.run else f"n/a: {why(summary.unavailable, 'step_ms')}."
    title = "Configuration and versions"
    return Table("run", title, columns, _settings("", summary.run), missing=missing)


def _settings(prefix: str, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        label = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += _settings(f"{label}: ", value)
        elif isinstance(value, (list, tuple)):
            rows.append((label, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((label, "none" if value in (None, "") else str(value)))
    return rows
