"""Tables: parts, ranks, buckets, and what ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lightning_dist.profiling.analysis.headline import count
from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS, RankSummary, Summary
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.report.text import MISSING, finite, ms, number, percent, why
from lightning_dist.profiling.report.view import Column, Table
from lightning_dist.profiling.report.words import PART_WORDS


def parts_table(summary: Summary) -> Table:
    """The mean step, in parts."""
    title, short = "Parts of the mean step", "Parts"
    columns = (
        Column("part", is_number=False),
        Column("time", "ms"),
        Column("of the step"),
        Column("what it is", is_number=False),
    )
    total = summary.parts_step_ms
    known = [name for name in PARTS if finite(summary.parts_ms.get(name)) is not None]
    if not summary.steps or not known:
        missing = f"n/a: {why(summary, 'parts_ms', 'step_ms')}."
        return Table("parts", title, short, columns, (), missing=missing)
    rows = []
    for name in (each for each in PARTS if each in summary.parts_ms):
        value, words = finite(summary.parts_ms[name]), PART_WORDS[name]
        share = percent(value / total) if total and value is not None else percent(None)
        meaning = words.meaning if name in known else f"{MISSING}: {why(summary, name)}"
        rows.append((words.name, number(value), share, meaning))
    how = "with its phases" if "parts_ms" in summary.reasons else "in detail"
    of_steps = f"of {count(summary.parts_steps, 'step')}"
    rows.append((f"a step {how}", number(total), percent(1.0 if total else None), of_steps))
    if any(name in EXPOSED for name in known):
        exposed = number(summary.exposed_ms)
        caption = f"The exposed parts are {exposed} ms together."
    else:
        caption = f"What of it is exposed is {MISSING}: {why(summary, 'parts_ms')}."
    of_all = " and ".join(
        f"{name} {ms(summary.step_ms[name])}"
        for name in ("mean", "median")
        if name in summary.step_ms
    )
    caption += (
        f" Shares are of the mean step {how}, which is the sum of its parts; all "
        f"{count(summary.steps, 'step')}: {of_all}."
    )
    return Table("parts", title, short, columns, rows, caption)


def ranks_table(summary: Summary) -> Table:
    """Every rank."""
    columns = (
        Column("rank"),
        Column("host", is_number=False),
        Column("step", "ms"),
        Column("exposed", "ms"),
        Column("waited", "ms"),
        Column("others waited for it", "ms"),
        *(Column(PART_WORDS[name].name, "ms") for name in PHASES),
        Column("clock, give or take", "ms"),
        Column("inside its host", "Gbit/s"),
        Column("to other hosts", "Gbit/s"),
    )
    if not summary.ranks:
        missing = f"n/a: {why(summary, 'step_ms')}."
        return Table("ranks", "Ranks", "Ranks", columns, (), missing=missing)
    caption = "Per step in detail. Waiting is hidden or not; that of others is added up over them."
    if summary.straggler is not None:
        caption += f" Most of the waiting is for rank {summary.straggler}."
    rows = [_rank(each) for each in summary.ranks]
    return Table("ranks", "Ranks", "Ranks", columns, rows, caption)


def _rank(each: RankSummary) -> Sequence[str]:
    return (
        str(each.rank),
        each.host,
        *map(number, (each.step_ms, each.exposed_ms, each.wait_ms, each.caused_ms)),
        *(number(each.phases_ms.get(name)) for name in PHASES),
        "reference" if each.rank == 0 else number(each.clock_uncertainty_ms),
        *map(number, (each.intra_gbps, each.inter_gbps)),
    )


def buckets_table(summary: Summary) -> Table:
    """Every bucket, with the error of its compression if it was measured."""
    columns = [
        Column("bucket"),
        Column("codec", is_number=False),
        Column("raw", "MB"),
        Column("wire", "MB"),
        Column("ready", "ms"),
        Column("encode", "ms"),
        Column("wait", "ms"),
        Column("transfer", "ms"),
        Column("decode", "ms"),
        Column("end after last gradient", "ms"),
    ]
    if not summary.buckets:
        missing = f"n/a: {why(summary, 'buckets')}."
        return Table("buckets", "Buckets", "Buckets", columns, (), missing=missing)
    errors = _error_of_bucket(summary.errors)
    if errors:
        columns.append(Column("relative error, median"))
    rows = []
    for each in summary.buckets:
        times = each.ready_ms, each.encode_ms, each.wait_ms, each.transfer_ms, each.decode_ms
        row = [str(each.index), each.codec or "none"]
        row += map(number, (each.raw_mb, each.wire_mb, *times, each.exposed_ms))
        rows.append([*row, number(errors.get(each.index))] if errors else row)
    caption = (
        "Means over steps and ranks. Buckets share the link: times of several do not add up to "
        "time of the step. Ready counts from the begin of the step."
    )
    return Table("buckets", "Buckets", "Buckets", columns, rows, caption)


def _error_of_bucket(errors: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    values = defaultdict(list)
    for error in errors:
        if (value := finite(error.get("relative_l2"))) is not None:
            values[int(error["bucket"])].append(value)
    return {bucket: median(found) for bucket, found in values.items()}


def run_table(summary: Summary) -> Table:
    """What ran, and with which versions."""
    columns = Column("setting", is_number=False), Column("value", is_number=False)
    rows = list(_settings("", summary.run))
    missing = "" if rows else f"n/a: {why(summary, 'step_ms')}."
    title = "Configuration and versions"
    return Table("run", title, "Configuration", columns, rows, missing=missing)


def _settings(prefix: str, settings: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        words = f"{prefix}{str(name).replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += _settings(f"{words}: ", value)
        elif isinstance(value, (list, tuple)):
            rows.append((words, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((words, "none" if value in (None, "") else str(value)))
    return rows
