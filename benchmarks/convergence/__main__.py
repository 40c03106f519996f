"""Do models trained with compressed gradients end where fp32 DDP's end?

    python -m benchmarks.convergence [--codec NAME ...] [--task gpt] [--json PATH]

Two small trainings over real gloo groups between processes on this machine, one thread each, whose
ranks see differently distributed data: averaging gradients that agree anyway would hide what a
codec loses.

    gpt      the demo's byte-level GPT with 0.12 M parameters, 160 steps of AdamW with clipping.
             Ranks train on different packages of Python's standard library. val_loss: nats per byte
             on 256 fixed windows from files that no rank trains on
    digits   an MLP with 0.03 M parameters on scikit-learn's digits, 300 steps of SGD with momentum.
             80 % of a rank's images are of its own labels only. test_accuracy (percent) and
             test_loss on 449 images

The batch is divided among the ranks. Names of rows are those of `harness/rows.py`; ddp is always
there. Rows of a codec have its default error feedback, and bring along

    -noef           where the codec has error feedback (2 ranks only)
    -warm           the first fifth of the steps uncompressed, for codecs that keep little of a
                    gradient
    onebit-adam:    (gpt) `OneBitAdam` in place of AdamW, its variance frozen after a fifth of the
                    steps and momenta through the codec; with `none` what the frozen variance alone
                    does. Not clipped, unlike AdamW

With local updates each rank steps alone on its part of the batch, and the anchor is evaluated.
Sharded models (fsdp) are so over pairs of 4 ranks.

All rows of a task start a seed with the same weights and see the same batches with the same
learning rates, tuned for no row; differences to ddp are paired by seed. A codec that brings
momentum of its own (dgc) runs with SGD without momentum, and not in gpt: beside AdamW it is
refused. `min_compress_numel` is lowered to 256 (or to the codec's own, if that is lower): with the
defaults some of these small matrices would travel uncompressed. In a row of the JSON:

    metrics              the values of all seeds after the last step, their mean and standard
                         deviation; diff_pct_of_ddp: of (row - ddp) / ddp x 100 over seeds;
                         within_ddp_spread: whether |mean(row - ddp)| <= the standard deviation of
                         ddp over seeds. A large spread makes that easy
    bytes_ratio          fp32 DDP's bytes divided by those sent, by rank 0's own counter
    replicas_identical   whether after every run all ranks held the same parameters, bit by bit
    seconds_per_run      set-up and evaluation included; ranks share cores, so no measure of speed
    reason               why a row did not run (its settings were refused) or what broke it

The JSON is written after every row, so that an interrupted run keeps what it finished.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any

from benchmarks.convergence.rank import Job, named, train
from benchmarks.convergence.tables import convergence
from benchmarks.harness.launch import RankFailed, run_ranks
from benchmarks.harness.results import Record, parser_of, positive, recording, say
from benchmarks.harness.rows import DDP_ROW, NO_FEEDBACK_SUFFIX, ONEBIT_PREFIX, WARM_SUFFIX
from lightning_dist.codecs import CODECS, resolve_codec

TASKS = ("gpt", "digits")
WARM_CODECS = ("sign", "topk", "powersgd")
ONEBIT_CODECS = ("none", "sign")
MIN_COMPRESS_NUMEL = 256
"""Codecs leave tensors below some thousand elements alone, which are most of these small models."""

_START_S, _RUN_S = 300.0, 120.0  # imports on a busy machine, and a run; only a hang gets there

Row = dict[str, Any]
Result = Mapping[str, Any]
"""A training as `rank.py` reports it; ``reason``: why it was refused, or what broke it."""


def jobs_of(task: str, codecs: Sequence[str], *, ranks: int) -> Iterator[Job]:
    """DDP first, then every codec as it is, and the rows that show what its setting does."""
    yield task, DDP_ROW
    for name in codecs:
        try:
            codec = resolve_codec(name)
        except ValueError:
            yield task, name  # the row itself will say why
            continue
        if codec.momentum_correction and task == "gpt":
            continue
        yield task, name
        if codec.name in WARM_CODECS:
            yield task, name + WARM_SUFFIX
        has_feedback = codec.keeps_residual and not codec.lossless
        if has_feedback and not codec.momentum_correction and ranks == 2:
            yield task, name + NO_FEEDBACK_SUFFIX
        if task == "gpt" and codec.name in ONEBIT_CODECS:
            yield task, ONEBIT_PREFIX + name


def measure(given: argparse.Namespace, record: Record) -> None:
    """Add all rows as they come. One that breaks its ranks does not stop the rest."""
    results: list[Result] = []
    chosen = {name: getattr(given, name) for name in ("steps", "batch", "lr")}
    changed = {name: value for name, value in chosen.items() if value is not None}

    def add(result: Result, ranks: int) -> None:
        results.append({"ranks": ranks, **result})
        if result["seed"] in (None, given.seeds - 1):
            outcome = result.get("reason", "done")
            say(f"{ranks} ranks, {result['task']}, {result['row']}: {outcome}")
            record.rows = summarize(results)
            record.write()

    for ranks in given.ranks:
        left = [job for task in given.task for job in jobs_of(task, given.codec, ranks=ranks)]
        while left:
            before = len(results)
            try:
                run_ranks(
                    train,
                    ranks=ranks,
                    timeout_s=_START_S + _RUN_S * len(left) * given.seeds,
                    on_result=partial(add, ranks=ranks),
                    jobs=left,
                    seeds=list(range(given.seeds)),
                    tasks=dict.fromkeys(TASKS, changed),
                    min_compress_numel=MIN_COMPRESS_NUMEL,
                )
                left = []
            except RankFailed as error:
                if not results:
                    raise  # nothing runs here
                broken = (len(results) - before) // given.seeds
                add(
                    {**named(left[broken]), "seed": None, "reason": f"broke: {error.reason}"}, ranks
                )
                left = left[broken + 1 :]


def parse_arguments() -> argparse.Namespace:
    """The command line, with what is repeatable filled in."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--codec", action="append", metavar="NAME", help="default: all there are; repeatable")
    add("--task", action="append", choices=TASKS, help="default: both; repeatable")
    add("--ranks", action="append", type=int, choices=(2, 4), help="default: 2 and 4; repeatable")
    add("--steps", type=int, metavar="N", help="of every training; default: the task's own")
    add("--batch", type=positive, metavar="N", help="samples of a step; default: the task's own")
    add("--lr", type=float, metavar="RATE", help="of all rows; default: the task's own")
    add("--seeds", type=positive, default=5, metavar="N", help="0 to N - 1 (%(default)s)")
    given = parser.parse_args()
    given.codec = list(dict.fromkeys(given.codec or [*CODECS, "powersgd:two_phase=true"]))
    given.task = list(dict.fromkeys(given.task or TASKS))
    given.ranks = list(dict.fromkeys(given.ranks or (2, 4)))
    return given


def main() -> None:
    """Measure, show, and write."""
    given = parse_arguments()
    with recording(given) as record:
        measure(given, record)
        record.show(*(partial(convergence, task=task) for task in given.task))


def summarize(results: Sequence[Result]) -> list[Row]:
    """One row of the JSON for every row of a task and a world, beside DDP with the same seeds."""
    cells: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        key = result["task"], result["ranks"], result["row"]
        cells.setdefault(key, []).append(result)
    return [
        _row(found, [run for run in cells[task, ranks, DDP_ROW] if "curve" in run])
        for (task, ranks, _), found in cells.items()
    ]


def _row(found: Sequence[Result], reference: Sequence[Result]) -> Row:
    runs = [result for result in found if "curve" in result]
    names = [name for name in runs[0]["curve"][-1] if name not in _COUNTED] if runs else []
    mean_s = _mean([run["seconds"] for run in runs])
    return {
        **{key: found[0][key] for key in ("task", "ranks", "row", "codec")},
        "error_feedback": runs[0]["error_feedback"] if runs else None,
        "seeds": [run["seed"] for run in runs],
        "metrics": {name: _metric(name, runs, reference) for name in names},
        "bytes_ratio": _mean([run["bytes_ratio"] for run in runs]),
        "replicas_identical": all(run["identical"] for run in runs)
        if runs and runs[0]["identical"] is not None
        else None,
        "seconds_per_run": mean_s and round(mean_s, 2),
        "reason": next((result["reason"] for result in found if "reason" in result), None),
    }


_COUNTED = ("step", "seconds", "tx_bytes")


def _metric(name: str, runs: Sequence[Result], reference: Sequence[Result]) -> dict[str, Any]:
    """Statistics of one metric; None for what an infinite or missing value leaves undefined."""
    ours, ddp = ({run["seed"]: run["curve"][-1][name] for run in of} for of in (runs, reference))
    off = {seed: ours[seed] - ddp[seed] for seed in ours if seed in ddp}
    percent = [100 * off[seed] / ddp[seed] for seed in off]
    spread, difference = _std([*ddp.values()]), _mean([*off.values()])
    within = difference is not None and spread is not None and abs(difference) <= spread
    return {
        "values": [value if math.isfinite(value) else None for value in ours.values()],
        "mean": _mean([*ours.values()]),
        "std": _std([*ours.values()]),
        "diff_pct_of_ddp": _mean(percent),
        "diff_pct_std": _std(percent),
        "within_ddp_spread": None if spread is None or not off else within,
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values and all(map(math.isfinite, values)) else None


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


if __name__ == "__main__":
    main()
