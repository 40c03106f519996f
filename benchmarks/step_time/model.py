"""An alpha-beta model of a step between hosts, fitted to measurements, and its word on more hosts.

    python -m benchmarks.step_time.model RESULT.json ... [--curve] [--gbit 10] [--json PATH]
                                            [--plot PNG]

RESULT.json is written by `hierarchical.py`; results of `allreduce.py` may
stand beside it. Seconds that communication adds to a step:

    link   = inter_round_s x rounds between hosts
             + link_overhead_RATE x bytes over a host's link / rate
    inside = intra_round_s x rounds within a host + intra_byte_s x bytes into or out of a rank
             + sum over codecs of CODEC_element_s x elements through it in one rank x crowding
    T      = max(link, inside) + (1 - overlap) x min(link, inside)

with n gradients of c bytes each as the codec sends them (4 without one), H hosts, L ranks on each,
W ranks in all:

    form     codec      bytes over a host's link        rounds    bytes in a host   elements
    flat     linear     2 (W-1)/W c n                   2 (W-1)   hidden            n
    flat     other      (L (W-L) + W-1)/W c n           2 (W-1)   hidden            n
    sharded  linear     2 (H-1)/H c n/L from L ranks    2 (H-1)   2 (L-1)/L c' n    n/L, c': n
    sharded  other      the same; H = 2: c n            ; 1       the same          the same
    leader   any        as sharded, from one rank       the same  2 (L-1) c' n      n,   c': n

linear: the network adds (none, fp16, bf16: one ring; each of its edges sends the same, and the slow
one between hosts hides the fast ones inside). other: all_to_all of n/W to everybody, then a ring
all_gather; two peers gather instead. c': bytes of the codec within hosts, 2 (L-1) rounds there.
Where hosts differ in size L is that of the largest, and the busiest host counts. rounds: of a whole
step; what several buckets cost, beyond what they hide from one another, is in the coefficient.
RATE: every measured link has an overhead of its own, of headers and of what a shaped link wastes,
at least 1; a prediction takes that of the fastest. crowding: on the machine that measures ranks
share cores, so a codec takes (ranks that compress at once / cores) times as long, at least once; in
a prediction every rank has its own. Elements through a codec count the way in and out as one.

The fit is non-negative least squares (numpy; Lawson and Hanson) over all rows with a limited link,
every row divided by its measured time, so that it is the relative errors that are small and a slow
link weighs no more than a fast one. overlap, one number for all rows, is the best of a grid from 0
(one after the other) to 1 (at once); for each of them the fit and the choice of the longer side
take turns until they agree. Rounds are held near zero by a prior (1 ms counts as much as an error
of 5 % in one row), for they grow with the bytes where ranks are few. Measured time: median step -
the lowest median no-comm step of the layout's links, which contains what does not hide behind the
backward pass. Errors are printed and in the JSON; the bytes of the formulas are also held against
the interface's counter. Sparse and low-rank codecs have no fixed bytes per element and are left
out.

--curve: seconds and speed-up over flat fp32 for 2 to 1024 hosts. It is a PREDICTION, extrapolated
from a few hosts on one machine: no latency but this machine's own, no congestion, no switch, one
link per host, and memory traffic within "hosts" that is really between processes of one. --gbit is
the rate of the link, --intra-gbit replaces the fitted rate inside, --latency-us the fitted seconds
per round between hosts, which few ranks on one busy machine tell least about: it is the one
coefficient that many hosts multiply, so a line says how much of a prediction hangs on it.

JSON: in meta `coefficients`, `overlap`, `errors`, `byte_errors`, `label`; rows with `kind` "fit"
(measured_ms, predicted_ms, relative_error, byte_error) and "prediction" (hosts, ranks_per_host,
gbit, form, codec, predicted_ms and rounds_ms of it, speedup_vs_flat_fp32, round_us, round_given).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.launch import Layout
from benchmarks.harness.results import collect_meta, print_table, write_json
from benchmarks.step_time.rows import (
    COMPUTE_ROW,
    DDP_ROW,
    FLAT,
    FP16_ROW,
    GRADIENT_BYTES,
    LEADER,
    NO_FEEDBACK_SUFFIX,
    SHARDED,
    is_torch_row,
    levels,
)
from benchmarks.step_time.run import positive
from lightning_dist.profiling.whatif.formulas import collectives, inside, total


def fit_rows(cases: list[Case], model: Model) -> list[dict[str, Any]]:
    """What was measured beside what the model says."""
    errors = relative_errors(cases, model)
    return [
        {
            "kind": "fit",
            "layout": layout_of(case.row).name,
            **{name: case.row.get(name) for name in ("link_mbit", "form", "codec")},
            "measured_ms": case.seconds * 1e3,
            "predicted_ms": predict(model, terms_of(case)) * 1e3,
            "relative_error": error,
            "byte_error": byte_error(case),
        }
        for case, error in zip(cases, errors, strict=True)
    ]


def show_fit(rows: list[dict[str, Any]], model: Model) -> None:
    """The coefficients and every row's error."""
    print_table(
        "Communication of a step: measured, and by the model fitted to these rows",
        columns=("layout", "Mbit/s", "form", "codec", "measured ms", "model ms", "error %"),
        rows=(
            (
                row["layout"],
                f"{row['link_mbit']:g}",
                row["form"],
                row["codec"],
                row["measured_ms"],
                row["predicted_ms"],
                f"{row['relative_error'] * 100:+.1f}",
            )
            for row in rows
        ),
    )
    for name, value in {**model.coefficients, "overlap": model.overlap}.items():
        print(f"{name:20} {value:.4g}")
    for what, key in (("time", "relative_error"), ("bytes over a host's link", "byte_error")):
        of = summary_of([row[key] for row in rows])
        print(
            f"error of the {what}: median {of['median'] * 100:.1f} %, "
            f"largest {of['largest'] * 100:.1f} %, over {of['rows']:g} rows"
        )


def main(argv: list[str] | None = None) -> None:
    """Fit, show, predict where asked, and write."""
    arguments = parse_arguments(argv)
    results = [json.loads(path.read_text()) for path in arguments.result]
    try:
        cases = [
            case
            for result in results
            for case in cases_of(result["rows"], cores=result["meta"]["machine"]["cores"])
        ]
        model = fit(cases)
    except ValueError as error:
        sys.exit(f"benchmarks/step_time/model.py: {error}")
    rows = fit_rows(cases, model)
    show_fit(rows, model)
    facts: dict[str, Any] = {
        "measured": [result["meta"] for result in results],
        "coefficients": model.coefficients,
        "overlap": model.overlap,
        "errors": summary_of([row["relative_error"] for row in rows]),
        "byte_errors": summary_of([row["byte_error"] for row in rows]),
        "label": LABEL,
    }
    if arguments.curve or arguments.plot:
        predicted = curve(
            model,
            ranks_per_host=arguments.ranks_per_host,
            gbit=arguments.gbit,
            intra_gbit=arguments.intra_gbit,
            latency_us=arguments.latency_us,
        )
        show_curve(predicted)
        rows += predicted
        if arguments.plot:
            plot(predicted, arguments.plot)
    if arguments.json:
        paths = ("result", "json", "plot")
        listed = {name: value for name, value in vars(arguments).items() if name not in paths}
        meta = collect_meta(seed=0, arguments=listed)
        write_json(arguments.json, meta={**meta, **facts}, rows=rows)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fit a model to hierarchical.py's result.")
    add = parser.add_argument
    add(
        "result",
        type=Path,
        nargs="+",
        metavar="RESULT.json",
        help="of benchmarks.step_time.hierarchical",
    )
    add("--curve", action="store_true", help="predict 2 to 1024 hosts")
    add("--ranks-per-host", type=positive, default=8, metavar="N", help="of the prediction (8)")
    add("--gbit", type=float, default=10.0, metavar="RATE", help="link of the prediction (10)")
    add("--intra-gbit", type=float, metavar="RATE", help="of a rank in its host; default: fitted")
    add("--latency-us", type=float, metavar="US", help="of a round between hosts; default: fitted")
    add("--json", type=Path, metavar="PATH", help="write fit and prediction here")
    add("--plot", type=Path, metavar="PNG", help="draw the prediction; needs matplotlib")
    return parser.parse_args(argv)


@dataclass(frozen=True, kw_only=True)
class CodecFacts:
    """What the model has to know of a codec."""

    name: str
    bytes_per_element: float
    linear: bool  # the network adds the payloads: a ring allreduce


PLAIN = CodecFacts(name="none", bytes_per_element=4.0, linear=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of the busiest rank, or of the busiest host where it says so."""

    inter_bytes: float  # over one host's link
    inter_rounds: int
    intra_bytes: float = 0.0  # into or out of one rank
    intra_rounds: int = 0
    elements: dict[str, float] = field(default_factory=dict)  # through each codec, in one rank
    busy_ranks: int  # that run the codec between hosts at once, on all hosts


def codec_facts(codec: str) -> CodecFacts | None:
    """The facts of a codec of this package; None where its bytes are not fixed per element."""
    if is_torch_row(codec):
        return None
    import torch

    from lightning_dist.codecs import BlockCodec, resolve_codec

    resolved = resolve_codec(codec.removesuffix(NO_FEEDBACK_SUFFIX))
    if not isinstance(resolved, BlockCodec) or resolved.exchange == "gather":
        return None
    row = sum(plane.bytes_per_block for plane in resolved.planes(torch.float32))
    return CodecFacts(
        name=codec,
        bytes_per_element=row / resolved.block,
        linear=resolved.exchange == "allreduce",
    )


def facts_of(codec: str) -> tuple[CodecFacts, CodecFacts] | None:
    """The codecs within and between hosts of a row's `codec`."""
    intra, inter = levels(codec)
    found = (PLAIN if intra is None else codec_facts(intra), codec_facts(inter))
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def work(
    form: str,
    layout: Layout,
    *,
    inter: CodecFacts,
    intra: CodecFacts = PLAIN,
    elements: float,
) -> Work:
    """What a form has to do for `elements` gradients, with these codecs between and within hosts.

    form: as in `hierarchical_settings.FORMS`; the sharded one needs an even layout.
    """
    size = elements * inter.bytes_per_element
    exchange = "allreduce" if inter.linear else "two_shot"
    if form == FLAT:
        whole = total(collectives(exchange, size, layout.counts))
        return Work(
            inter_bytes=whole.nbytes,
            inter_rounds=whole.rounds,
            elements=_through((inter, elements)),
            busy_ranks=layout.world_size,
        )
    local = max(layout.counts)
    leader = form == LEADER
    if not leader and not layout.even:
        raise ValueError(f"the sharded form needs hosts of equal size, got {layout.name}")
    share = 1 if leader else local
    across = total(collectives(exchange, size, (1,) * layout.hosts))
    way = inside(elements * intra.bytes_per_element, local, leader=leader)
    return Work(
        # L ranks of a host exchange an L-th each, or one of them exchanges all.
        inter_bytes=across.nbytes,
        inter_rounds=across.rounds,
        intra_bytes=2 * way.nbytes,
        intra_rounds=2 * way.rounds,
        elements=_through((inter, elements / share), (intra, elements)),
        busy_ranks=layout.hosts if leader else layout.world_size,
    )


def _through(*passes: tuple[CodecFacts, float]) -> dict[str, float]:
    """Elements by codec; what travels as it is costs nothing."""
    elements: dict[str, float] = {}
    for codec, count in passes:
        if codec.name != PLAIN.name:
            elements[codec.name] = elements.get(codec.name, 0.0) + count
    return elements


ELEMENTS = GRADIENT_BYTES // 4
ROUND = "inter_round_s"
_OVERHEAD = "link_overhead_"  # and the rate
INTRA_BYTE = "intra_byte_s"
_INTRA_ROUND = "intra_round_s"
_INSIDE = (_INTRA_ROUND, INTRA_BYTE)  # and the codecs
_PRIOR = 50.0  # a round of 1 ms counts as much as an error of 5 % in one row
_GRID = 20  # of the overlap
_MOST_TURNS = 50
_TORCH_CODECS = {DDP_ROW: PLAIN.name, FP16_ROW: "fp16"}

Row = Mapping[str, Any]
Coefficients = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured row, as the model sees it."""

    row: Row
    work: Work
    seconds: float  # that communication adds to the step
    crowding: float  # ranks that want to compress, per core, and at least 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """What was fitted. overlap: how much of the shorter side hides behind the longer, 0 to 1."""

    coefficients: Coefficients
    overlap: float


def cases_of(rows: Iterable[Row], *, cores: int) -> list[Case]:
    """The rows the model can speak of: measured, on a limited link, of a fixed size per element."""
    rows = [row for row in rows if row["reason"] is None and row["link_mbit"] is not None]
    floor_ms: dict[str, float] = {}
    for row in rows:
        if row["codec"] == COMPUTE_ROW:  # the same on any link: the least disturbed
            place, step_ms = layout_of(row).name, row["step_ms_median"]
            floor_ms[place] = min(step_ms, floor_ms.get(place, step_ms))
    cases = []
    for row in rows:
        codec: str = row["codec"]
        facts = facts_of(_TORCH_CODECS.get(codec, codec))
        seconds = (row["step_ms_median"] - floor_ms[layout_of(row).name]) / 1e3
        if facts is None or seconds <= 0:
            continue
        intra, inter = facts
        done = work(
            row.get("form") or FLAT,
            layout_of(row),
            inter=inter,
            intra=intra,
            elements=ELEMENTS,
        )
        crowding = max(1.0, done.busy_ranks / cores)
        cases.append(Case(row=row, work=done, seconds=seconds, crowding=crowding))
    return cases


def terms(done: Work, *, link_mbit: float, crowding: float = 1.0) -> Coefficients:
    """By what each coefficient is multiplied."""
    return {
        ROUND: done.inter_rounds,
        overhead_at(link_mbit): done.inter_bytes * 8 / (link_mbit * 1e6),
        _INTRA_ROUND: done.intra_rounds,
        INTRA_BYTE: done.intra_bytes,
        **{_cost(name): count * crowding for name, count in done.elements.items()},
    }


def overhead_at(link_mbit: float) -> str:
    """The coefficient of the bytes over a link of this rate."""
    return f"{_OVERHEAD}{link_mbit:g}"


def extended(model: Model, *, link_mbit: float) -> Model:
    """The model for a rate that was not measured: as the fastest one that was."""
    rates = (name.removeprefix(_OVERHEAD) for name in model.coefficients if _OVERHEAD in name)
    fastest = model.coefficients[overhead_at(max(float(rate) for rate in rates))]
    return replace(model, coefficients={overhead_at(link_mbit): fastest, **model.coefficients})


def predict(model: Model, of: Mapping[str, float]) -> float:
    """Seconds. A codec that was not measured is a KeyError."""
    link = sum(model.coefficients[name] * of[name] for name in of if _of_link(name))
    inside = sum(model.coefficients[name] * of[name] for name in of if not _of_link(name))
    return max(link, inside) + (1 - model.overlap) * min(link, inside)


def fit(cases: Sequence[Case]) -> Model:
    """Non-negative least squares of the relative errors: every row weighs the same.

    A link is no faster than its rate: of its overhead what is above 1 is fitted. Rounds have a
    prior of about a millisecond: with a few ranks they and bytes grow together, and what a fit
    gives to rounds by chance a prediction multiplies by thousands.

    Which of the two sides of a row is the longer one follows from the coefficients, and the other
    way round: they are fitted in turn until nothing changes. `overlap` is the best of a grid.
    """
    if not cases:
        raise ValueError("no measured row that the model can speak of")
    found = [_fit(cases, overlap=step / _GRID) for step in range(_GRID + 1)]
    return min(found, key=lambda model: sum(e * e for e in relative_errors(cases, model)))


def relative_errors(cases: Sequence[Case], model: Model) -> list[float]:
    """(predicted - measured) / measured of every case."""
    return [predict(model, terms_of(case)) / case.seconds - 1 for case in cases]


def summary_of(errors: Sequence[float]) -> dict[str, float]:
    """What the errors look like, without their signs."""
    sizes = [abs(error) for error in errors]
    return {"rows": len(sizes), "median": median(sizes), "largest": max(sizes)}


def byte_error(case: Case) -> float:
    """(formula - interface's counter) / counter of the bytes over the busiest host's link."""
    layout = layout_of(case.row)
    counted: float = case.row["wire_bytes"] * layout.world_size / layout.hosts
    return case.work.inter_bytes / counted - 1


def layout_of(row: Row) -> Layout:
    """Rows of `allreduce.py` have no `layout`."""
    return Layout.of(row["ranks_per_host"], hosts=row["hosts"])


def terms_of(case: Case) -> Coefficients:
    """By what each coefficient is multiplied for a measured row."""
    return terms(case.work, link_mbit=case.row["link_mbit"], crowding=case.crowding)


def _fit(cases: Sequence[Case], *, overlap: float) -> Model:
    factors = [terms_of(case) for case in cases]
    names = list(dict.fromkeys([ROUND, *_INSIDE, *(name for of in factors for name in of)]))
    matrix = np.array([[of.get(name, 0.0) for name in names] for of in factors])
    matrix /= np.array([case.seconds for case in cases])[:, None]
    of_link = np.array([_of_link(name) for name in names])
    prior = _PRIOR * np.diag([float(name in (ROUND, _INTRA_ROUND)) for name in names])
    least = np.array([float(name.startswith(_OVERHEAD)) for name in names])
    link_longer = np.ones(len(cases), dtype=bool)
    for _ in range(_MOST_TURNS):
        shorter = link_longer[:, None] != of_link
        weighted = np.where(shorter, 1 - overlap, 1.0) * matrix
        rest = np.concatenate([1 - weighted @ least, np.zeros(len(names))])
        found = least + nonnegative_least_squares(np.concatenate([weighted, prior]), rest)
        before = link_longer
        link_longer = matrix[:, of_link] @ found[of_link] >= matrix[:, ~of_link] @ found[~of_link]
        if (link_longer == before).all():
            break
    return Model(coefficients=dict(zip(names, found.tolist(), strict=True)), overlap=overlap)


def _of_link(name: str) -> bool:
    return name == ROUND or name.startswith(_OVERHEAD)


def _cost(codec: str) -> str:
    return f"{codec}_element_s"


LABEL = "PREDICTION, not measured: extrapolated from 2 to 4 hosts on one machine"
HOSTS = tuple(2**power for power in range(1, 11))
LINES = (
    (FLAT, "none"),
    (FLAT, "int4"),
    (SHARDED, "none"),
    (SHARDED, "int8"),
    (SHARDED, "int4"),
    (SHARDED, "bf16+int4"),
    (LEADER, "int4"),
)
"""The form and codec of every line; the first is what the others are compared with."""


def curve(
    model: Model,
    *,
    ranks_per_host: int = 8,
    gbit: float = 10.0,
    intra_gbit: float | None = None,
    latency_us: float | None = None,
    hosts: Sequence[int] = HOSTS,
) -> list[dict[str, Any]]:
    """A row for every number of hosts and line whose codecs were measured; each rank has a core.

    intra_gbit, latency_us: instead of the fitted rate within hosts and round between them.
    """
    given = {}
    if intra_gbit is not None:
        given[INTRA_BYTE] = 8 / (intra_gbit * 1e9)
    if latency_us is not None:
        given[ROUND] = latency_us / 1e6
    used = extended(model, link_mbit=gbit * 1e3)
    used = replace(used, coefficients={**used.coefficients, **given})
    rows = []
    for count in hosts:
        layout = Layout.of(ranks_per_host, hosts=count)
        plain_s = predict(used, _terms(FLAT, PLAIN.name, layout, gbit=gbit))
        for form, codec in LINES:
            of = _terms(form, codec, layout, gbit=gbit)
            try:
                seconds = predict(used, of)
            except KeyError:  # no row of that codec was measured
                continue
            rows.append(
                {
                    "kind": "prediction",
                    "label": LABEL,
                    "hosts": count,
                    "ranks_per_host": ranks_per_host,
                    "gbit": gbit,
                    "form": form,
                    "codec": codec,
                    "predicted_ms": seconds * 1e3,
                    "round_us": used.coefficients[ROUND] * 1e6,
                    "round_given": latency_us is not None,
                    "rounds_ms": of[ROUND] * used.coefficients[ROUND] * 1e3,
                    "speedup_vs_flat_fp32": plain_s / seconds,
                }
            )
    return rows


def show_curve(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for every number of hosts."""
    lines = _lines(rows)
    by_place = {(row["hosts"], row["form"], row["codec"]): row for row in rows}
    first = rows[0]
    print_table(
        f"{LABEL}\n{ELEMENTS * 4 / 1e6:.0f} MB of gradients, {first['ranks_per_host']} ranks per "
        f"host, {first['gbit']:g} Gbit/s per host: ms of communication, and times flat none",
        columns=("hosts", *(f"{form} {codec}" for form, codec in lines)),
        rows=(
            (count, *(_cell(by_place[count, form, codec]) for form, codec in lines))
            for count in dict.fromkeys(row["hosts"] for row in rows)
        ),
    )
    last = rows[-len(lines)]
    print(
        f"a round between hosts at {last['round_us']:,.0f} us "
        f"({'given' if last['round_given'] else 'fitted to few ranks on a busy machine'}): "
        f"{last['rounds_ms'] / last['predicted_ms']:.0%} of {last['form']} {last['codec']} on "
        f"{last['hosts']} hosts"
    )


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speed-up over flat fp32 by the number of hosts, as a picture; exits without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("benchmarks/step_time/model.py: --plot needs matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for form, codec in _lines(rows):
        of = [row for row in rows if (row["form"], row["codec"]) == (form, codec)]
        axes.plot(
            [row["hosts"] for row in of],
            [row["speedup_vs_flat_fp32"] for row in of],
            marker="o",
            label=f"{form} {codec}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"hosts, {rows[0]['ranks_per_host']} ranks each, {rows[0]['gbit']:g} Gbit/s")
    axes.set_ylabel("communication of a step, times faster than flat fp32")
    axes.set_title(LABEL, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _terms(form: str, codec: str, layout: Layout, *, gbit: float) -> dict[str, float]:
    facts = facts_of(codec)
    assert facts is not None, f"{codec} has no fixed size per element"
    intra, inter = facts
    done = work(form, layout, inter=inter, intra=intra, elements=ELEMENTS)
    return terms(done, link_mbit=gbit * 1e3)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["form"], row["codec"]) for row in rows))


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['predicted_ms']:,.0f} ({row['speedup_vs_flat_fp32']:.1f}x)"


_TOLERANCE = 1e-12


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """argmin |matrix x - target| with x >= 0: Lawson and Hanson's active set."""
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    scaled = matrix / scale  # seconds per byte beside seconds per round
    count = scaled.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= _TOLERANCE * max(1.0, float(np.linalg.norm(target))):
            break
        free[gradient.argmax()] = True
        while True:
            solution = np.zeros(count)
            solution[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            pairs = zip(x[negative], solution[negative], strict=True)
            # Go towards the solution until the first coefficient is 0, and leave that out.
            step = min(a / (a - b) if a > 0 else 0.0 for a, b in pairs)
            x = x + step * (solution - x)
            free &= x > _TOLERANCE
            x[~free] = 0.0
        x = solution
    return x / scale


if __name__ == "__main__":
    main()
