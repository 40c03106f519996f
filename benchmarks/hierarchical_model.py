"""An alpha-beta model of a step between hosts, fitted to measurements, and its word on more hosts.

    python -m benchmarks.hierarchical_model RESULT.json ... [--curve] [--gbit 10] [--json PATH]
                                            [--plot PNG]

RESULT.json is written by `benchmarks/hierarchical.py`; results of `benchmarks/allreduce.py` may
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
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: let `benchmarks` be found, as with `python -m`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.allreduce_arguments import positive
from benchmarks.hierarchical_curve import LABEL, curve, plot, show_curve
from benchmarks.hierarchical_fit import (
    Case,
    Model,
    byte_error,
    cases_of,
    fit,
    layout_of,
    predict,
    relative_errors,
    summary_of,
    terms_of,
)
from benchmarks.report import collect_meta, print_table, write_json


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
        sys.exit(f"benchmarks/hierarchical_model.py: {error}")
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
    add("result", type=Path, nargs="+", metavar="RESULT.json", help="of benchmarks.hierarchical")
    add("--curve", action="store_true", help="predict 2 to 1024 hosts")
    add("--ranks-per-host", type=positive, default=8, metavar="N", help="of the prediction (8)")
    add("--gbit", type=float, default=10.0, metavar="RATE", help="link of the prediction (10)")
    add("--intra-gbit", type=float, metavar="RATE", help="of a rank in its host; default: fitted")
    add("--latency-us", type=float, metavar="US", help="of a round between hosts; default: fitted")
    add("--json", type=Path, metavar="PATH", help="write fit and prediction here")
    add("--plot", type=Path, metavar="PNG", help="draw the prediction; needs matplotlib")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
