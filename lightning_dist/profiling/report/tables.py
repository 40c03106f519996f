"""Facts and tables of a summary, as the page and the terminal show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    in_ms,
    why,
)
from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.whatif.scenarios import (
    LABEL,
    Predictions,
    name_of,
    notes,
    remark,
    where,
)

RANK_COLUMNS = (
    *("rank", "node", "step_ms", "exposed_ms", "wait_ms", "waited_for_ms"),
    *PHASES,
    *("clock_uncertainty_ms", "intra_gbps", "inter_gbps"),
)
_BUCKET_COLUMNS = (
    *("bucket", "bucket_codec", "raw_mb", "wire_mb", "ready_ms", "encode_ms", "wait_ms"),
    *("transfer_ms", "decode_ms", "end_after_last_gradient_ms"),
)
_ERROR_COLUMNS = ("relative_l2", "cosine", "residual_ratio")
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
class View:
    """A section of the page: a table, figures, or a sentence that says why there is neither.

    Args:
        rows: text of the cells.
        figures: of plotly, by the name of the choice between them.
    """

    id: str
    title: str
    caption: str = ""
    columns: Sequence[Metric] = ()
    rows: Sequence[Sequence[str]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


def missing(summary: Summary, *keys: str) -> str:
    """Sentence in the place of what is not known: the reason of the first key that has one."""
    return f"n/a: {why(summary.unavailable, *keys)}."


def facts(summary: Summary) -> list[Fact]:
    """The figures of the whole run that are read first."""

    def fact(key: str, value: float | None, detail: str = "", *unavailable: str) -> Fact:
        label, unit = METRICS[key].label, METRICS[key].unit
        if value is None:
            return Fact(label, MISSING, why(summary.unavailable, key, *unavailable))
        return Fact(label, format_value(value, unit), detail)

    step = summary.step_ms
    of_ranks = f" and {len(summary.ranks)} ranks" if len(summary.ranks) > 1 else ""
    of_steps = [f"mean of {count(summary.steps, 'step')}{of_ranks}"]
    of_steps += [f"{name} {in_ms(step[name])}" for name in ("median", "p95")]
    if summary.warmup_steps:
        of_steps.append(f"{count(summary.warmup_steps, 'warm-up step')} excluded")
    exposed = (
        f"{in_ms(summary.exposed_ms)} of {in_ms(summary.detailed_step_ms)}, the mean of "
        f"{count(summary.detailed_steps, 'detailed step')}"
    )
    if summary.exposed_fsdp_ms:
        exposed += f"; {in_ms(summary.exposed_fsdp_ms)} of it in collectives of FSDP itself"
    hidden = f"{in_ms(summary.hidden_ms)} per step hidden"
    known = [
        fact("exposed_fraction", summary.exposed_fraction, exposed, "exposed_ms", "step_ms"),
        fact("step_ms", step["mean"], "; ".join(of_steps)),
        fact("overlap_fraction", summary.overlap_fraction, hidden),
    ]
    traffic = summary.traffic
    if traffic is None:
        known.append(fact("traffic", None))
    else:
        ratio = traffic.compression_ratio
        sent = (
            f"per step and rank{'' if summary.is_of_all else ' with records'}, "
            f"{f'{ratio:.1f}x less than' if ratio >= 1.05 else 'compared to'} "
            f"{format_value(traffic.raw_bytes, 'B')} of uncompressed DDP; "
            f"{format_value(traffic.inter_bytes, 'B')} to other nodes"
        )
        used = f"{format_value(traffic.link_utilization, '%')} used"
        if len(set(summary.run.get("nodes", ()))) == 1:
            used += ", inside one node: no network"
        like_ddp, busbw = "uncompressed DDP, equal time", traffic.ddp_equivalent_busbw_gbps
        known += [
            fact("traffic", traffic.wire_bytes, sent),
            fact("traffic.wire_gbps", traffic.wire_gbps),
            fact("traffic.ddp_equivalent_busbw_gbps", busbw, like_ddp),
            fact("traffic.link_gbps", traffic.link_gbps, used),
        ]
    overhead = fact("profiler_overhead", summary.profiler_overhead, "of the time")
    return [*known, _straggler(summary), overhead]


def _straggler(summary: Summary) -> Fact:
    label = METRICS["straggler"].label
    if summary.straggler is None:
        is_known = summary.steps and "exposed_wait" not in summary.unavailable
        reason = why(summary.unavailable, "straggler", "exposed_wait", "step_ms")
        return Fact(label, "none" if is_known else MISSING, reason)
    (rank,) = (rank for rank in summary.ranks if rank.rank == summary.straggler)
    detail = f"{rank.node}; other ranks waited {in_ms(rank.waited_for_ms)} per step for it"
    return Fact(label, f"rank {rank.rank}", detail)


def parts_table(summary: Summary) -> View:
    """The mean of the detailed steps, in parts."""
    total = summary.detailed_step_ms
    if not summary.steps or total is None:
        return View("parts", "Mean step", missing=missing(summary, "breakdown_ms", "step_ms"))
    rows = []
    for name in (part for part in PARTS if part in summary.breakdown_ms):
        value, meaning = finite(summary.breakdown_ms[name]), METRICS[name].meaning
        if value is None:
            meaning = why(summary.unavailable, name)
        share = None if value is None or not total else value / total
        rows.append((METRICS[name].label, format_value(value), format_value(share, "%"), meaning))
    label, exposed = "detailed step", f"{in_ms(summary.exposed_ms)}."
    if "breakdown_ms" in summary.unavailable:
        label, exposed = "step", missing(summary, "breakdown_ms")
    steps = f"mean of {count(summary.detailed_steps, 'step')}"
    rows.append((label, format_value(total), "100 %", steps))
    caption = (
        f"Exposed communication is {exposed} Shares are of these steps; the mean of all is "
        f"{in_ms(summary.step_ms['mean'])}."
    )
    numbers = Metric("time", "time", "ms"), Metric("share", "of the step")
    columns = _text("part"), *numbers, _text("meaning")
    return View("parts", "Mean step", caption, columns, rows)


def ranks_table(summary: Summary) -> View:
    """Every rank."""
    if not summary.ranks:
        return View("ranks", "Ranks", missing=missing(summary, "step_ms"))
    records = []
    for rank in summary.ranks:
        clock = "reference" if rank.rank == 0 else rank.clock_uncertainty_ms
        cells = {"rank": str(rank.rank), "clock_uncertainty_ms": clock}
        records.append({**vars(rank), **rank.phases_ms, **cells})
    caption = "Means per detailed step. Waits are hidden or exposed."
    return _view("ranks", "Ranks", caption, RANK_COLUMNS, records)


def buckets_table(summary: Summary) -> View:
    """Every bucket, with the medians of its compression errors if they were sampled."""
    if not summary.buckets:
        return View("buckets", "Buckets", missing=missing(summary, "buckets"))
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    for error in summary.errors:
        for name in _ERROR_COLUMNS:
            if (value := finite(error.get(name))) is not None:
                errors[int(error["bucket"]), name].append(value)
    sampled = [name for name in _ERROR_COLUMNS if any(key == name for _, key in errors)]
    records = []
    for bucket in summary.buckets:
        cells = {"bucket": str(bucket.index), "bucket_codec": bucket.codec or "none"}
        cells["end_after_last_gradient_ms"] = format_value(bucket.exposed_ms)
        of_bucket = {name: errors[bucket.index, name] for name in sampled}
        medians = {name: median(values) for name, values in of_bucket.items() if values}
        records.append({**vars(bucket), **cells, **medians})
    caption = (
        "Means over ranks and detailed steps; errors are medians. Buckets share the link, so times "
        "of several do not add up to time of the step. Ready is from the start of the step."
    )
    if "errors" in summary.unavailable:
        caption += f" Compression errors: n/a, {summary.unavailable['errors']}."
    return _view("buckets", "Buckets", caption, (*_BUCKET_COLUMNS, *sampled), records)


def links_table(summary: Summary) -> View:
    """Gbit/s from the node of the row to that of the column: all bits over all seconds."""
    title, nodes = "Bandwidth between nodes", {rank.rank: rank.node for rank in summary.ranks}
    sent: Counter[tuple[str, str]] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    for link in (link for link in summary.links if link.get("peer") is not None):
        source, target = (
            nodes.get(link[end], f"node of rank {link[end]}") for end in ("rank", "peer")
        )
        sent[source, target] += link["sent"]
        seconds[source, target] += link["seconds"]
    rates = {pair: sent[pair] * 8e-9 / lasted for pair, lasted in seconds.items() if lasted > 0}
    if not rates:
        sentence = "n/a between two nodes: only groups of ranks were measured."
        sentence = sentence if summary.links else missing(summary, "links")
        return View("links", title, missing=sentence)
    names = sorted({name for pair in rates for name in pair})
    rows = [
        (row, *(format_value(rates[row, to]) if (row, to) in rates else "" for to in names))
        for row in names
    ]
    caption = (
        "Gbit/s from the node of the row to that of the column, on the idle link; an empty cell "
        "was not measured."
    )
    columns = _text("from"), *(Metric(name, f"to {name}") for name in names)
    return View("links", title, caption, columns, rows)


def whatif_table(summary: Summary) -> View:
    """Predictions for the run and for other settings, the fastest first."""
    if summary.predictions is None:
        return View("whatif", LABEL, missing=missing(summary, "predictions", "steps"))
    return predictions_table(summary.predictions)


def predictions_table(predictions: Predictions) -> View:
    """Predictions as a table, the fastest first."""
    baseline, records = predictions.baseline, []
    known = [scenario for scenario in predictions.scenarios if scenario.step_ms is not None]
    for prediction in (baseline, *known):
        name = name_of(prediction, baseline)
        cells = {"setting": name, "position": str(prediction.position or "")}
        if prediction is baseline:
            error = format_value(predictions.error, "%", signed=True)
            measured = f"measured {in_ms(predictions.measured_ms)}; error of the simulation {error}"
            cells |= {"setting": f"{name} (this run)", "change": "", "remark": measured}
        else:
            cells["change"] = format_value(prediction.change, "%", signed=True)
            cells["remark"] = remark(prediction, predictions)
        records.append({**vars(prediction), **cells})
    sentences = [
        f"This step simulated with other settings: {where(baseline)}",
        "Accuracy is not predicted",
        *notes(predictions),
    ]
    caption = " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)
    return _view("whatif", LABEL, caption, _WHATIF_COLUMNS, records)


def run_table(summary: Summary) -> View:
    """Settings and versions of the run."""
    columns, rows = (_text("setting"), _text("value")), _settings("", summary.run)
    why_not = "" if rows else missing(summary, "step_ms")
    return View("run", "Configuration and versions", "", columns, rows, missing=why_not)


def _settings(prefix: str, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        label = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += _settings(f"{label}: ", value)
        elif isinstance(value, (list, tuple)):
            if name == "nodes":  # of every rank
                value = [f"{node} ({count(n, 'rank')})" for node, n in Counter(value).items()]
            rows.append((label, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((label, "none" if value in (None, "") else str(value)))
    return rows


def _text(name: str) -> Metric:
    return Metric(name, name, TEXT)


def _view(
    id: str, title: str, caption: str, keys: Sequence[str], records: Iterable[Mapping[str, Any]]
) -> View:
    """A table with a row for each record; text of a record stays as it is."""
    rows = []
    for record in records:
        cells = map(record.get, keys)
        rows.append(tuple(x if isinstance(x, str) else format_value(x) for x in cells))
    return View(id, title, caption, [METRICS[key] for key in keys], rows)
