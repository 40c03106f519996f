"""The simulator of a step, fitted to measured steps, and its prediction for more hosts.

    python -m benchmarks.step_time.model RESULT.json [--gbit 10] [--intra-gbit 200]

RESULT.json is written by `step_time forms`. The model is `simulate_step` of `lightning-dist profile
whatif`, with costs from a fit instead of a profile: least squares of the relative errors of all
rows with a limited link, against median step - lowest median no-comm step of the layout. Fitted are
`overhead`, what headers and shaping add to the bytes of a link; `inside_ns`, per byte inside a
host; `CODEC_ns`, per element to encode (a quarter to decode a payload, half to store; `none`: a
copy). Ranks that share cores take longer for it; in a prediction each has its own. The latency of a
round is not fitted: few ranks on one machine do not tell it. JSON: in meta `coefficients`,
`errors`, `label`; rows of 2 to 1,024 hosts, form, codec, predicted_ms, speedup_vs_flat_fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.harness.launch import Layout
from benchmarks.harness.results import error_sizes, parser_of, positive, recording
from benchmarks.step_time import tables
from benchmarks.step_time.rank import COMPUTE_ROW, FP16_ROW, GRADIENT_BYTES, levels
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.whatif import simulator
from lightning_dist.profiling.whatif.simulator import DDP, FLAT, LEADER, SHARDED, Bucket, Link

LABEL = "Predicted (simulated), extrapolated from 2 to 4 hosts on one machine"
LINES = [(FLAT, "none"), (FLAT, "int4"), (SHARDED, "none"), (SHARDED, "int8")]
LINES += [(SHARDED, "int4"), (SHARDED, "bf16+int4"), (LEADER, "int4")]
"""Form and codec of every line; the first is what the others are compared with."""

BUCKETS = [Bucket(0.0, GRADIENT_BYTES / simulator.ELEMENT_BYTES / 2)] * 2

Row = dict[str, Any]


def cases_of(rows: Iterable[Row], *, cores: int) -> list[tuple[Row, float]]:
    """Arguments of :func:`seconds` and what was measured, of all rows with a limited link."""
    rows = [row for row in rows if row["reason"] is None and row["link_mbit"] is not None]
    plain = [row for row in rows if row["codec"] == COMPUTE_ROW]  # the same on any link
    cases = []
    for row in (row for row in rows if row not in plain):
        floor = min(x["step_ms_median"] for x in plain if x["layout"] == row["layout"])
        case = {"form": row["form"] or FLAT, "gbit": row["link_mbit"] / 1e3, "cores": cores}
        case["codec"] = "fp16" if row["codec"] == FP16_ROW else row["codec"]
        case["counts"] = Layout.parse(row["layout"]).counts
        cases.append((case, (row["step_ms_median"] - floor) / 1e3))
    return cases


def seconds(
    found: Mapping[str, float],
    form: str,
    codec: str,
    counts: tuple[int, ...],
    *,
    gbit: float,
    intra_gbit: float | None = None,
    latency_us: float = 0.0,
    cores: float = np.inf,
) -> float:
    """Communication of a step. cores: that all ranks share; intra_gbit: not the fitted rate."""
    crowding = max(1.0, (len(counts) if form == LEADER else sum(counts)) / cores)
    within, between = levels(codec)

    def cost(name: str) -> CodecCost:
        ns = found[f"{name}_ns"] * 1e-9 * crowding
        return CodecCost(name, *_sent(name), encode=ns, decode=ns / 4, store=ns / 2)

    link = Link(gbit * 1e9 / 8 / (1 + found["overhead"]), latency_us / 1e6)
    inside = Link(intra_gbit * 1e9 / 8 if intra_gbit else 1e9 / found["inside_ns"])
    return simulator.simulate_step(
        BUCKETS,
        simulator.Scenario(between, form, counts, link, inside),
        cost=None if codec == DDP else cost(between),
        inside_cost=cost(within or "none"),
    ).done


def fit(cases: Sequence[tuple[Row, float]]) -> tuple[dict[str, float], list[float]]:
    """Coefficients of the least relative errors, every row weighing the same; and these errors."""
    codecs = {name or "none" for case, _ in cases for name in levels(case["codec"])} - {DDP}
    names = ["overhead", *(f"{name}_ns" for name in sorted({"inside", *codecs}))]

    def errors(values: Iterable[float]) -> list[float]:
        found = dict(zip(names, values, strict=True))
        return [seconds(found, **case) / measured - 1 for case, measured in cases]

    first = [0.1] + [2.0] * (len(names) - 1)
    found = least_squares(errors, first, bounds=(0, np.inf), x_scale=first, diff_step=1e-3)
    return dict(zip(names, found.x.tolist(), strict=True)), found.fun.tolist()


def curve(found: Mapping[str, float], *, ranks_per_host: int, **network: Any) -> list[Row]:
    """Rows for every number of hosts and every line whose codecs were measured."""
    lines = [line for line in LINES if all(f"{n or 'none'}_ns" in found for n in levels(line[1]))]
    rows = []
    for hosts in (2**power for power in range(1, 11)):
        took = [seconds(found, *line, (ranks_per_host,) * hosts, **network) for line in lines]
        for (form, codec), each in zip(lines, took, strict=True):
            row = {"hosts": hosts, "form": form, "codec": codec, "predicted_ms": each * 1e3}
            rows.append({**row, "speedup_vs_flat_fp32": took[0] / each})
    return rows


@cache
def _sent(name: str) -> tuple[str, float]:
    """Exchange of a codec, and its bytes per element."""
    from lightning_dist.codecs import resolve_codec

    codec = resolve_codec(name)
    nbytes = codec.payload_bytes((1024, 1024))
    if nbytes is None or codec.whole_tensors:
        raise ValueError(f"codec must send a fixed number of bytes per element, got {name!r}")
    return codec.exchange, nbytes / 1024**2


def main(argv: list[str] | None = None) -> None:
    """Fit, predict, show, and write."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("result", type=Path, metavar="RESULT.json", help="of step_time forms")
    add("--ranks-per-host", type=positive, default=8, metavar="N", help="of the prediction (8)")
    add("--gbit", type=float, default=10.0, metavar="RATE", help="link of the prediction (10)")
    add("--intra-gbit", type=float, metavar="RATE", help="of a rank in its host; default: fitted")
    add("--latency-us", type=float, default=0.0, metavar="US", help="of a round between hosts (0)")
    given = parser.parse_args(argv)
    result = json.loads(given.result.read_text())
    cases = cases_of(result["rows"], cores=result["meta"]["machine"]["cores"])
    found, errors = fit(cases)
    print("\n".join(f"{name:16} {value:.4g}" for name, value in found.items()))
    network = {name: vars(given)[name] for name in ("gbit", "intra_gbit", "latency_us")}
    with recording(given) as record:
        record.meta |= {"measured": [result["meta"]], "label": LABEL}
        record.meta |= {"coefficients": found, "errors": error_sizes(errors)}
        record.rows = curve(found, ranks_per_host=given.ranks_per_host, **network)
        record.show(tables.curve)


if __name__ == "__main__":
    main()
