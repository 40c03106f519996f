"""An alpha-beta model of a step between hosts, fitted to measurements, and its word on more hosts.

    python -m benchmarks.step_time.model RESULT.json ... [--curve] [--gbit 10]

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

The fit is non-negative least squares (scipy) over all rows with a limited link,
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

JSON: in meta `coefficients`, `overlap`, `errors`, `byte_errors`, `label`; rows are predictions
(hosts, ranks_per_host, gbit, form, codec, predicted_ms, speedup_vs_flat_fp32, round_us, and
rounds_share, what of a prediction hangs on it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.launch import Layout
from benchmarks.harness.results import collect_meta, error_sizes, positive, write_json
from benchmarks.harness.tables import Column, markdown, pivot
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
from lightning_dist.profiling.whatif.simulator import Collective, collectives, inside

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

ELEMENTS = GRADIENT_BYTES // 4
ROUND = "inter_round_s"
INTRA_BYTE = "intra_byte_s"
_OVERHEAD = "link_overhead_"  # and the rate
_INTRA_ROUND = "intra_round_s"
_PLAIN = "none"
_TORCH_CODECS = {DDP_ROW: _PLAIN, FP16_ROW: "fp16"}
_PRIOR = 50.0  # a round of 1 ms counts as much as an error of 5 % in one row
_GRID = 20  # of the overlap
_MOST_TURNS = 50

Row = Mapping[str, Any]
Coefficients = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured row; the seconds that communication adds to its step, and their terms."""

    row: Row
    seconds: float
    terms: Coefficients


@dataclass(frozen=True, kw_only=True)
class Model:
    """What was fitted. overlap: how much of the shorter side hides behind the longer, 0 to 1."""

    coefficients: Coefficients
    overlap: float

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Of a step. A codec that was not measured is a KeyError."""
        sides = {True: 0.0, False: 0.0}
        for name, count in terms.items():
            sides[_of_link(name)] += self.coefficients[name] * count
        return max(sides.values()) + (1 - self.overlap) * min(sides.values())


def _total(parts: Sequence[Collective]) -> Collective:
    return Collective(sum(each.nbytes for each in parts), sum(each.rounds for each in parts))


def terms_of(
    form: str, codec: str, layout: Layout, *, link_mbit: float, cores: int | None = None
) -> Coefficients | None:
    """By what each coefficient is multiplied; None where bytes are not fixed per element.

    cores: that all ranks share; None: each has its own.
    """
    within, between = levels(codec)
    within_codec, between_codec = _codec(within or _PLAIN), _codec(between)
    if within_codec is None or between_codec is None:
        return None
    nbytes, linear = between_codec
    exchange = "allreduce" if linear else "two_shot"
    counts, local, busy = layout.counts, 1, layout.world_size
    terms = {ROUND: 0.0, _overhead(link_mbit): 0.0, _INTRA_ROUND: 0.0, INTRA_BYTE: 0.0}
    if form != FLAT:
        # L ranks of a host exchange an L-th each, or one of them exchanges all.
        counts, local, leader = (1,) * layout.hosts, max(layout.counts), form == LEADER
        if not leader and not layout.even:
            raise ValueError(f"the sharded form needs hosts of equal size, got {layout.name}")
        way = inside(ELEMENTS * within_codec[0], local, leader=leader)
        terms |= {_INTRA_ROUND: 2 * way.rounds, INTRA_BYTE: 2 * way.nbytes}
        if leader:
            local, busy = 1, layout.hosts
    across = _total(collectives(exchange, ELEMENTS * nbytes, counts))
    terms |= {ROUND: across.rounds, _overhead(link_mbit): across.nbytes * 8 / (link_mbit * 1e6)}
    crowding = 1.0 if cores is None else max(1.0, busy / cores)
    passes = ((between, ELEMENTS / local), (within if form != FLAT else None, ELEMENTS))
    for name, elements in passes:
        if name not in (None, _PLAIN):  # what travels as it is costs nothing
            key = f"{name}_element_s"
            terms[key] = terms.get(key, 0.0) + elements * crowding
    return terms


def cases_of(rows: Iterable[Row], *, cores: int) -> list[Case]:
    """The rows the model can speak of: measured, on a limited link, of a fixed size per element."""
    rows = [row for row in rows if row["reason"] is None and row["link_mbit"] is not None]
    floor_ms: dict[str, float] = {}
    for row in rows:
        if row["codec"] == COMPUTE_ROW:  # the same on any link: the least disturbed
            place = _layout(row).name
            floor_ms[place] = min(row["step_ms_median"], floor_ms.get(place, float("inf")))
    cases = []
    for row in rows:
        layout, codec = _layout(row), _TORCH_CODECS.get(row["codec"], row["codec"])
        form, link_mbit = row.get("form") or FLAT, row["link_mbit"]
        terms = terms_of(form, codec, layout, link_mbit=link_mbit, cores=cores)
        seconds = (row["step_ms_median"] - floor_ms[layout.name]) / 1e3
        if terms is not None and seconds > 0:
            cases.append(Case(row=row, seconds=seconds, terms=terms))
    return cases


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
    return [model.seconds(case.terms) / case.seconds - 1 for case in cases]


def byte_error(case: Case) -> float:
    """(formula - interface's counter) / counter of the bytes over the busiest host's link."""
    layout, link_mbit = _layout(case.row), case.row["link_mbit"]
    counted: float = case.row["wire_bytes"] * layout.world_size / layout.hosts
    return case.terms[_overhead(link_mbit)] * link_mbit * 1e6 / 8 / counted - 1


def curve(
    model: Model,
    *,
    ranks_per_host: int,
    gbit: float,
    intra_gbit: float | None = None,
    latency_us: float | None = None,
) -> list[dict[str, Any]]:
    """A row for every number of hosts and line whose codecs were measured; each rank has a core.

    intra_gbit, latency_us: instead of the fitted rate within hosts and round between them. A rate
    between hosts that was not measured wastes what the fastest one that was does.
    """
    rates = [
        float(name.removeprefix(_OVERHEAD)) for name in model.coefficients if _OVERHEAD in name
    ]
    fastest = model.coefficients[_overhead(max(rates))]
    used = {_overhead(gbit * 1e3): fastest, **model.coefficients}
    if intra_gbit is not None:
        used[INTRA_BYTE] = 8 / (intra_gbit * 1e9)
    if latency_us is not None:
        used[ROUND] = latency_us / 1e6
    model, rows = replace(model, coefficients=used), []
    for hosts in HOSTS:
        layout = Layout.of(ranks_per_host, hosts=hosts)
        plain_s = None
        for form, codec in LINES:
            terms = terms_of(form, codec, layout, link_mbit=gbit * 1e3)
            if terms is None or not terms.keys() <= used.keys():
                continue  # no row of that codec was measured
            seconds = model.seconds(terms)
            plain_s = plain_s or seconds
            rows.append(
                {
                    "hosts": hosts,
                    "ranks_per_host": ranks_per_host,
                    "gbit": gbit,
                    "form": form,
                    "codec": codec,
                    "predicted_ms": seconds * 1e3,
                    "round_us": used[ROUND] * 1e6,
                    "rounds_share": terms[ROUND] * used[ROUND] / seconds,
                    "speedup_vs_flat_fp32": plain_s / seconds,
                }
            )
    return rows


def show_fit(cases: Sequence[Case], model: Model) -> None:
    """The coefficients and every row's error."""
    rows = [
        {
            **case.row,
            "layout": _layout(case.row).name,
            "measured_ms": case.seconds * 1e3,
            "model_ms": model.seconds(case.terms) * 1e3,
            "error": error,
        }
        for case, error in zip(cases, relative_errors(cases, model), strict=True)
    ]
    columns: list[Column] = [
        ("layout", "{layout}"),
        ("Mbit/s", "{link_mbit:g}"),
        ("form", lambda row: row.get("form") or "-"),
        ("codec", "{codec}"),
        ("measured ms", "{measured_ms:,.1f}"),
        ("model ms", "{model_ms:,.1f}"),
        ("error %", "{error:x100+.1f}"),
    ]
    title = "Communication of a step: measured, and by the model fitted to these rows"
    print(f"\n{title}\n\n{markdown(columns, rows)}")
    for name, value in {**model.coefficients, "overlap": model.overlap}.items():
        print(f"{name:20} {value:.4g}")


def show_curve(rows: Sequence[Row]) -> None:
    """One line for every number of hosts."""
    lines = list(dict.fromkeys((row["form"], row["codec"]) for row in rows))
    columns: list[Column] = [("hosts", "{hosts}")]
    cell = "{predicted_ms:,.0f} ({speedup_vs_flat_fp32:.1f}x)"
    columns += [(" ".join(line), cell, line) for line in lines]
    title = (
        f"{LABEL}\n{ELEMENTS * 4 / 1e6:.0f} MB of gradients, {rows[0]['ranks_per_host']} ranks per "
        f"host, {rows[0]['gbit']:g} Gbit/s per host: ms of communication, and times flat none"
    )
    placed = [{**row, "line": (row["form"], row["codec"])} for row in rows]
    print(f"\n{title}\n\n{markdown(columns, pivot(placed, of=['hosts'], by='line'))}")
    last = rows[-1]
    print(
        f"a round between hosts at {last['round_us']:,.0f} us: {last['rounds_share']:.0%} of "
        f"{last['form']} {last['codec']} on {last['hosts']} hosts"
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
        sys.exit(f"model: {error}")
    show_fit(cases, model)
    facts: dict[str, Any] = {
        "measured": [result["meta"] for result in results],
        "coefficients": model.coefficients,
        "overlap": model.overlap,
        "errors": error_sizes(relative_errors(cases, model)),
        "byte_errors": error_sizes([byte_error(case) for case in cases]),
        "label": LABEL,
    }
    for what, key in (("time", "errors"), ("bytes over a host's link", "byte_errors")):
        of = facts[key]
        print(
            f"error of the {what}: median {of['median'] * 100:.1f} %, "
            f"largest {of['largest'] * 100:.1f} %, over {of['rows']:g} rows"
        )
    rows = []
    if arguments.curve:
        names = ("ranks_per_host", "gbit", "intra_gbit", "latency_us")
        rows = curve(model, **{name: getattr(arguments, name) for name in names})
        show_curve(rows)
    if arguments.json:
        listed = {k: v for k, v in vars(arguments).items() if k not in ("result", "json")}
        meta = collect_meta(seed=0, arguments=listed)
        write_json(arguments.json, meta={**meta, **facts}, rows=rows)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fit a model to the result of hierarchical.py.")
    add = parser.add_argument
    add("result", type=Path, nargs="+", metavar="RESULT.json", help="of step_time.hierarchical")
    add("--curve", action="store_true", help="predict 2 to 1024 hosts")
    add("--ranks-per-host", type=positive, default=8, metavar="N", help="of the prediction (8)")
    add("--gbit", type=float, default=10.0, metavar="RATE", help="link of the prediction (10)")
    add("--intra-gbit", type=float, metavar="RATE", help="of a rank in its host; default: fitted")
    add("--latency-us", type=float, metavar="US", help="of a round between hosts; default: fitted")
    add("--json", type=Path, metavar="PATH", help="write fit and prediction here")
    return parser.parse_args(argv)


def _codec(name: str) -> tuple[float, bool] | None:
    """Bytes per element, and whether the network adds the payloads: a ring allreduce."""
    if name == _PLAIN:
        return 4.0, True
    if is_torch_row(name):
        return None
    import torch

    from lightning_dist.codecs import BlockCodec, resolve_codec

    codec = resolve_codec(name.removesuffix(NO_FEEDBACK_SUFFIX))
    if not isinstance(codec, BlockCodec) or codec.exchange == "gather":
        return None
    nbytes = sum(plane.bytes_per_block for plane in codec.planes(torch.float32)) / codec.block
    return nbytes, codec.exchange == "allreduce"


def _fit(cases: Sequence[Case], *, overlap: float) -> Model:
    from scipy.optimize import nnls

    first = (ROUND, _INTRA_ROUND, INTRA_BYTE)
    names = list(dict.fromkeys([*first, *(name for case in cases for name in case.terms)]))
    matrix = np.array([[case.terms.get(name, 0.0) for name in names] for case in cases])
    matrix /= np.array([case.seconds for case in cases])[:, None]
    of_link = np.array([_of_link(name) for name in names])
    prior = _PRIOR * np.diag([float(name in (ROUND, _INTRA_ROUND)) for name in names])
    least = np.array([float(name.startswith(_OVERHEAD)) for name in names])
    link_longer = np.ones(len(cases), dtype=bool)
    for _ in range(_MOST_TURNS):
        shorter = link_longer[:, None] != of_link
        weighted = np.where(shorter, 1 - overlap, 1.0) * matrix
        rest = np.concatenate([1 - weighted @ least, np.zeros(len(names))])
        stacked = np.concatenate([weighted, prior])
        scale = np.linalg.norm(stacked, axis=0)  # seconds per byte beside seconds per round
        scale[scale == 0] = 1.0
        found = least + nnls(stacked / scale, rest)[0] / scale
        before = link_longer
        link_longer = matrix[:, of_link] @ found[of_link] >= matrix[:, ~of_link] @ found[~of_link]
        if (link_longer == before).all():
            break
    return Model(coefficients=dict(zip(names, found.tolist(), strict=True)), overlap=overlap)


def _layout(row: Row) -> Layout:
    return Layout.of(row["ranks_per_host"], hosts=row["hosts"])


def _overhead(link_mbit: float) -> str:
    """The coefficient of the bytes over a link of this rate."""
    return f"{_OVERHEAD}{link_mbit:g}"


def _of_link(name: str) -> bool:
    return name == ROUND or name.startswith(_OVERHEAD)


if __name__ == "__main__":
    main()
