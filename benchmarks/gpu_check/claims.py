"""What is claimed of a GPU, each judged by rows of `gpu_check`, and the page that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks import codecs
from benchmarks.harness.tables import Rows, Table

Verdict = Literal["holds", "fails", "not run"]
Judged = tuple["Claim", Verdict, str]
_NEAR_COPY = 50.0  # % of the rate of a copy


@dataclass(frozen=True)
class Claim:
    """A sentence, and what its part's rows say of it.

    Args:
        part: whose rows decide.
        check: those that have been measured -> what speaks against it; empty if nothing does.
    """

    sentence: str
    part: str
    check: Callable[[Rows], Iterable[str]]

    def judge(self, rows: Rows) -> tuple[Verdict, str]:
        """The verdict, and why."""
        own = [row for row in rows if row["part"] == self.part]
        reasons = [row["not_run"] for row in own if "not_run" in row]
        errors = [row["error"] for row in own if "error" in row]
        measured = [row for row in own if not row.keys() & {"not_run", "error", "seconds"}]
        measured = [row for row in measured if row.get("launches") != 0]  # on a CPU
        if errors:
            return "fails", errors[0].splitlines()[-1]
        if reasons or not measured:
            return "not run", "; ".join(reasons) or "no rows"
        against = list(self.check(measured))
        return ("fails", "; ".join(against)) if against else ("holds", "")


def _differing(rows: Rows) -> Iterable[str]:
    return (f"{row['codec']}: {row['differing']:,} differ" for row in rows if row["differing"])


def _failed(rows: Rows) -> Iterable[str]:
    return (f"{name}: {why}" for row in rows for name, why in row["failed"].items())


def _slow(rows: Rows) -> Iterable[str]:
    return (
        f"{row['codec']}: {row['limit_pct']:.0f} % of a copy"
        for row in rows
        if row["mode"] == "fused" and row["limit_pct"] < _NEAR_COPY
    )


def _waits(rows: Rows) -> Iterable[str]:
    of_ddp = next(row["host_waits"] for row in rows if row["codec"] == "ddp")
    return (
        f"{row['codec']} on {row['ranks']}: {row['host_waits']} waits, DDP {of_ddp}"
        for row in rows
        if row["codec"] in ("none", "int8") and row["host_waits"] > of_ddp
    )


def _not_overlapped(rows: Rows) -> Iterable[str]:
    return (
        f"{row['codec']} on {row['ranks']}: {row['overlap']:.0%}"
        for row in rows
        if row["codec"] == "int8" and row["overlap"] is not None and row["overlap"] < 0.5
    )


def _changed(rows: Rows) -> Iterable[str]:
    return (f"{row['differing']} tensors differ" for row in rows if row["differing"])


CLAIMS = (
    Claim("The tests for GPUs pass", "tests", _failed),
    Claim("The kernels have the bits of their definitions", "passes", _differing),
    Claim(f"The kernels move bytes at {_NEAR_COPY:.0f} % of a copy or more", "speed", _slow),
    Claim("The kernels access no memory that is not theirs", "sanitizer", _differing),
    Claim("A step waits for the GPU no more often than DDP's", "step", _waits),
    Claim("Half of the work on gradients overlaps with the backward pass", "step", _not_overlapped),
    Claim("A checkpoint has the weights of its moment", "checkpoint", _changed),
)

_STEPS = Table(
    has="step_ms",
    columns=[
        ("gradients", "{codec!n}"),
        ("ranks", "{ranks}"),
        ("step", "{step_ms:.1f} ms"),
        ("launches", "{launches:,}"),
        ("waits of the host", "{host_waits}"),
        ("overlap", "{overlap:x100.0f} %"),
        ("peak memory", "{peak_gb:.1f} GB"),
        ("residuals", "{residuals_gb:.2f} GB"),
    ],
    text="A GPT of 124 M parameters; with 8 ranks, payloads of the others are copies.",
)


def page_of(meta: Mapping[str, Any], rows: Rows, judged: Sequence[Judged]) -> str:
    """The report, in Markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in meta["machine"].items())
    lines = [
        "# Check on a GPU",
        "",
        f"{meta['date']}, torch {meta['versions']['torch']}, {machine}",
    ]
    lines += ["", "| claim | | |", "|---|---|---|"]
    lines += [f"| {each.sentence} | {verdict} | {why} |" for each, verdict, why in judged]
    speed = [row for row in rows if row.get("kind") == "kernels"]
    shown = ((_STEPS, rows), (codecs.KERNELS, speed))
    tables = [table({"meta": meta, "rows": some}) for table, some in shown]
    return "\n".join([*lines, "", *(f"{each}\n" for each in tables if each)])
