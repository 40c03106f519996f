"""How long training takes on a slow link until the validation loss is as low as fp32 DDP's.

    python -m benchmarks.convergence.time_to_accuracy [--link MBIT] [--codec NAME ...]

Two hosts on one machine (`harness/testbed.py`; needs root) train the demo's byte-level GPT, with
1.4 M parameters (5.6 MB of fp32 gradients), each on other packages of Python's standard library.
AdamW with warm-up and clipping, then a constant learning rate, the same for all rows, whose names
are those of `harness/rows.py`: no-comm, ddp and torch-fp16-hook are always there, no-comm has no
target.

Every seed trains all rows from the same weights over the same batches, in blocks of `--every` steps
by turns. After each block the row is evaluated on 64 fixed windows of files that nobody trains on;
its loss is the mean of the last three evaluations, because a single one goes up and down. The
target of a seed is the loss of ddp after `--steps` steps plus 0.2 %, without which rows that follow
ddp to the fifth digit would need one block more by chance. Rows that are not there by then train on
until they have done four times as many steps. In a row of the JSON:

    seconds_to_target    the training steps up to the first evaluation with a loss <= target, of the
                         slowest rank. Not counted: evaluations, set-up, compiling of kernels
    steps_to_target      the same in steps. Both know only multiples of `--every`
    wire_bytes_to_target
                         bytes that host 0 sent meanwhile, from its interface's own counter
    step_ms              median over blocks
    speedup_vs_fp32, speedup_vs_fp16
                         ddp's, and the hook's, seconds_to_target divided by this row's: geometric
                         mean over seeds; null where a seed did not reach its target

and in meta communication_share_pct, (ddp - no-comm) / ddp of step_ms: the link is chosen so that it
is above 80, training that waits for its network. Hosts share the machine's cores.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, mean, median
from typing import Any

from benchmarks.convergence.rank import smoothed, train
from benchmarks.convergence.tables import TIME_TO_ACCURACY
from benchmarks.convergence.tasks import DEMO_GPT
from benchmarks.harness.results import parser_of, positive, recording, require_testbeds
from benchmarks.harness.rows import BASELINES, COMPUTE_ROW, DDP_ROW, FP16_ROW
from benchmarks.harness.testbed import Testbed
from lightning_dist.codecs import CODECS

HOSTS = 2
# Of the sparse and low-rank ones less drastic settings than their defaults: at 1 % a gradient waits
# a hundred steps, and that is longer than this training.
WANTED_CODECS = ("int8", "int4", "qsgd", "terngrad", "powersgd:rank=16", "topk:ratio=0.05")
WANTED_SHARE_PCT = 80.0
PATIENCE = 4.0
_SETUP_S = 600.0  # imports and, with a cold cache, compiling every codec's kernels
_STEP_S = 3.0  # of the slowest row; only a hang gets there

Row = dict[str, Any]
Result = Mapping[str, Any]
"""A training as `rank.py` reports it; ``reason``: why it was refused."""


def measure(given: argparse.Namespace) -> list[Result]:
    """All trainings of all seeds."""
    jobs = [("gpt", name) for name in (*BASELINES, *given.codec)]
    with Testbed(HOSTS, link_mbit=given.link) as testbed:
        return testbed.run(
            train,
            timeout_s=_SETUP_S + _STEP_S * given.seeds * len(jobs) * PATIENCE * given.steps,
            jobs=jobs,
            seeds=list(range(given.seeds)),
            tasks={"gpt": {**DEMO_GPT, "steps": given.steps}},
            interleaved=True,
            evaluate_every=given.every,
            patience=PATIENCE,
            compile_kernels=given.compile_kernels,
        )[0]


def parse_arguments() -> argparse.Namespace:
    """The command line, with the codecs filled in."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--link", type=float, default=100.0, metavar="MBIT", help="Mbit/s (100)")
    add("--codec", action="append", metavar="NAME", help="of lightning_dist; repeatable")
    add("--seeds", type=positive, default=3, metavar="N", help="0 to N - 1 (%(default)s)")
    add("--steps", type=positive, default=80, metavar="N", help="of ddp (%(default)s)")
    add("--every", type=positive, default=5, metavar="N", help="steps between evaluations (5)")
    add(
        "--compile-kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fuse the codecs' kernels before the start, 20 s each the first time",
    )
    given = parser.parse_args()
    there = [name for name in WANTED_CODECS if name.partition(":")[0] in CODECS]
    given.codec = list(dict.fromkeys(given.codec or there))
    if given.steps % given.every:
        parser.error("--steps must be a multiple of --every")
    if taken := set(given.codec) & set(BASELINES):
        parser.error(f"--codec: {', '.join(taken)} is always measured; name codecs of ours")
    require_testbeds(parser, [given.link], [f"{HOSTS}x1"])
    return given


def main() -> None:
    """Measure, show, and write."""
    given = parse_arguments()
    with recording(given) as record:
        results = measure(given)
        record.rows = summarize(results, [*BASELINES, *given.codec])
        step_ms = {row["row"]: row["step_ms"] for row in record.rows}
        share = 100 * (1 - step_ms[COMPUTE_ROW] / step_ms[DDP_ROW])
        parameters = next(result["parameters"] for result in results if "curve" in result)
        record.meta |= {"parameters": parameters, "communication_share_pct": share}
        record.show(TIME_TO_ACCURACY)
        if share < WANTED_SHARE_PCT:
            print(f"less than {WANTED_SHARE_PCT:g} % communication: choose a slower --link")


_TO_TARGET = ("steps_to_target", "seconds_to_target", "wire_bytes_to_target")
_MEASURED = ("step_ms", "wire_bytes_per_step", *_TO_TARGET, "replicas_identical")


def summarize(results: Sequence[Result], names: Sequence[str]) -> list[Row]:
    """One row of the JSON for every row; what each seed came to is kept beside the means."""
    rows = [_row(name, [each for each in results if each["row"] == name]) for name in names]
    for key, reference in (("speedup_vs_fp32", DDP_ROW), ("speedup_vs_fp16", FP16_ROW)):
        (theirs,) = (row["runs"] for row in rows if row["row"] == reference)
        for row in rows:
            row[key] = _speedup(row["runs"], theirs)
    return rows


def _row(name: str, results: Sequence[Result]) -> Row:
    if reason := next((result["reason"] for result in results if "reason" in result), None):
        return {"row": name, "reason": reason, **dict.fromkeys(_MEASURED), "runs": []}
    curves = [result["curve"] for result in results]
    # Every block but the first, in which buffers are made.
    blocks = [pair for curve in curves for pair in itertools.pairwise(curve)]
    runs = [_to_target(result) for result in results]
    return {
        "row": name,
        "reason": None,
        "step_ms": 1e3
        * median((b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in blocks),
        "wire_bytes_per_step": mean(curve[-1]["tx_bytes"] / curve[-1]["step"] for curve in curves),
        **{key: _mean([run[key] for run in runs]) for key in _TO_TARGET},
        "replicas_identical": (
            None if name == COMPUTE_ROW else all(run["replicas_identical"] for run in runs)
        ),
        "runs": runs,
    }


def _to_target(result: Result) -> Row:
    """The first evaluation at which the loss was as low as the target."""
    evaluated = [point for point in result["curve"] if "val_loss" in point]
    pairs = zip(evaluated, smoothed([point["val_loss"] for point in evaluated]), strict=True)
    there = next((point for point, loss in pairs if loss <= result["target"]), {})
    return {
        "seed": result["seed"],
        "target_loss": result["target"],
        "steps_to_target": there.get("step"),
        "seconds_to_target": there.get("seconds"),
        "wire_bytes_to_target": there.get("tx_bytes"),
        "replicas_identical": result["identical"],
    }


def _speedup(runs: Sequence[Row], reference: Sequence[Row]) -> float | None:
    """The geometric mean over seeds of the reference's seconds by these."""
    seconds = [[run["seconds_to_target"] for run in of] for of in (reference, runs)]
    if not runs or None in seconds[0] + seconds[1]:
        return None
    return geometric_mean([theirs / ours for theirs, ours in zip(*seconds, strict=True)])


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else mean(values)


if __name__ == "__main__":
    main()
