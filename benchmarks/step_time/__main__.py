"""How long a training step takes on a slow link, by codec and by form of the exchange.

    python -m benchmarks.step_time codecs [--layout 2x1] [--link 200] [--row int8] ...
    python -m benchmarks.step_time forms [--layout 3+1] [--row hierarchical/bf16+int8] ...
    python -m benchmarks.step_time fsdp [--layout 2x2] [--row fsdp/int8@4] ...

Several hosts on one machine (`harness/testbed.py`; needs root), a DDP model of
10 x Linear(1024, 1024) (42 MB of fp32 gradients, DDP's default buckets), SGD; with --model gpt,
which `fsdp` has by default, the demo's byte-level GPT (5.6 MB) on windows of 64 bytes. A layout is
`2x2`, hosts x ranks of each, or `3+1`, the ranks of every host. For each layout one set of
processes holds all rows: every row has a DDP instance of its own in it, and the rows take turns
step by step, a different one first in each round. Between links only the limit changes. Names of
rows are those of `harness/rows.py`: no-comm, ddp and torch-fp16-hook are always measured; torch's
other hooks are tried in processes of their own before, and where one fails there its figures are
null and `reason` says why. A micro-batch has --batch samples.

`codecs` measures by default every codec in layouts of one rank per host, `forms` some codecs in
all forms, `fsdp` those of sharded models, with the three of DDP. In a row of the JSON:

    step_ms_median, _p10, _p90
                   from before the forward to after the optimizer step, of the slowest rank, without
                   the barriers before and after; of `rounds` rounds: on a slow link few, as many as
                   fit into --seconds
    wire_bytes     bytes sent in a step by the host that sends most, by the median of its
                   interface's own counter, divided by the mean number of ranks per host: with
                   headers, acknowledgements and the barrier (some 100 bytes)
    counted_wire_bytes, inter_bytes, intra_bytes
                   by lightning_dist's own counters, without headers, null for torch's rows: the
                   same; what all ranks of host 0 sent to other hosts, and within, in the last step
    lo_bytes       bytes that host 0's loopback sent in a step (median), also for torch's rows
    raw_bytes      what an fp32 allreduce would send per rank, within hosts too: our counter of rank
                   0; for torch's rows 2 (W - 1) / W times the gradients
    wire_limit_pct (bytes sent by a host / link rate) / (median step - median step of the floor, a
                   no-comm row) x 100; null where that was not measured:
                   how much of the link is used in the time that communication adds to the step.
                   Overlap with the backward pass can bring it above 100; headers keep plain TCP at
                   about 96 without
    tail_ms        from the last bucket's last gradient to the last mean, of the slowest rank
                   (median); null for torch's rows
    last_bucket_ms bytes of the last bucket sent by a host / link rate: what the tail has to send
    bound_ms       median step of the floor + bytes sent by a host / link rate: the step if encoding
                   cost nothing and nothing overlapped
    replicas_identical
                   whether after every timed step all ranks held the same parameters, bit by bit;
                   null where no rank has what another has
    reason         why a row could not be measured

Hosts share the machine's cores and its memory bus: with more ranks than cores the times are an
upper bound. A rank takes about 700 MB of memory and 170 MB for every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.launch import Layout, RankFailed
from benchmarks.harness.results import parser_of, positive, rate, recording, require_testbeds, say
from benchmarks.harness.rows import (
    ALL,
    ALL_INT8,
    BASELINES,
    COMPUTE_ROW,
    DDP_ROW,
    DEFERRED,
    FP16_ROW,
    FSDP,
    NATIVE,
    RISKY_BASELINES,
    RowName,
    split_row,
)
from benchmarks.harness.testbed import Testbed
from benchmarks.step_time.rank import FEWEST_ROUNDS, MOST_ROUNDS, Samples, run
from benchmarks.step_time.tables import forms, sharded, step_times
from lightning_dist.codecs import CODECS

Row = dict[str, Any]

CODEC_ROWS = [*RISKY_BASELINES]
for _name in CODECS:
    CODEC_ROWS += [_name, f"{_name}-noef"] if _name in ("int8", "int4") else [_name]
FORM_ROWS = [
    *(f"flat/{codec}" for codec in ("none", "int8")),
    *(
        f"hierarchical/{codec}"
        for codec in ("none", "bf16", "int8", "int4", "bf16+int8", "bf16+int4")
    ),
    *(f"leader/{codec}" for codec in ("none", "bf16", "int8", "int4")),
]
_SHARDED = (COMPUTE_ROW, NATIVE, ALL, ALL_INT8, "none", "bf16", "int8", "int4")
SHARDED_ROWS = [
    *(f"{FSDP}/{name}" for name in _SHARDED),
    *(f"{FSDP}/{name}@4" for name in (DEFERRED, *_SHARDED)),
]
SUBJECTS = {
    "codecs": (step_times, CODEC_ROWS, ["2x1", "4x1"]),
    "forms": (forms, FORM_ROWS, ["2x2", "4x1", "3+1"]),
    "fsdp": (sharded, SHARDED_ROWS, ["2x2"]),
}
"""A table, and the rows and layouts that are measured where the command line has none."""
LINKS: list[float | None] = [1000.0, 200.0, 50.0]  # fast first: the warm-up is cheap there


def parse_arguments() -> argparse.Namespace:
    """The command line, with what depends on the subject filled in."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("subject", choices=SUBJECTS, help="which rows and layouts are measured by default")
    add("--layout", action="append", help="2x2: hosts x ranks, 3+1: ranks of each; repeatable")
    add("--link", type=rate, action="append", metavar="MBIT", help="Mbit/s or none; repeatable")
    add("--row", action="append", help="beside no-comm, ddp and torch-fp16-hook; repeatable")
    bounds = f"default: what --seconds buys, {FEWEST_ROUNDS} to {MOST_ROUNDS}"
    add("--rounds", type=positive, metavar="N", help=f"timed steps of each row; {bounds}")
    add("--seconds", type=float, default=150.0, metavar="S", help="for each link (%(default)s)")
    add("--warmup", type=positive, default=3, metavar="N", help="untimed steps of the first link")
    add("--model", choices=("linear", "gpt"), help="linear; of fsdp gpt")
    add("--batch", type=positive, metavar="N", help="samples per rank and micro-batch (16; gpt 1)")
    add("--timeout", type=float, default=3600.0, metavar="S", help="for a layout (%(default)s)")
    add("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args()
    _, rows, layouts = SUBJECTS[given.subject]
    given.layout, given.link = given.layout or layouts, given.link or LINKS
    given.model = given.model or ("gpt" if given.subject == "fsdp" else "linear")
    given.batch = given.batch or (1 if given.model == "gpt" else 16)
    given.row = list(dict.fromkeys([*BASELINES, *(given.row or rows)]))
    require_testbeds(parser, given.link, given.layout)
    return given


def main() -> None:
    """Measure, show, and write."""
    given = parse_arguments()
    with recording(given, seed=given.seed) as record:
        for text in given.layout:
            rows = measure(Layout.parse(text), given)
            record.add(list(rows), SUBJECTS[given.subject][0])


def impossible(row: str, layout: Layout) -> str | None:
    """Why a row cannot be measured in this layout; None where it can."""
    form, _ = split_row(row)
    if form == FSDP and not layout.even:
        return "the hosts hold different numbers of ranks, and shards are as many in each"
    if form in ("hierarchical", "leader") and max(layout.counts) == 1:
        return "one rank per host: there is nothing to add up within a host"
    if form == "hierarchical" and not layout.even:
        return "the hosts hold different numbers of ranks, which needs the leader form"
    return None


def floor_of(row: str) -> str:
    """The row of the same computation whose hosts do not communicate."""
    form, codec = split_row(row)
    _, mark, micro_batches = codec.partition("@")
    return f"{FSDP}/{COMPUTE_ROW}{mark}{micro_batches}" if form == FSDP else COMPUTE_ROW


def measure(layout: Layout, given: argparse.Namespace) -> Iterator[Row]:
    """Rows of the JSON: all links in this layout."""
    say(f"layout {layout.name}")
    reasons = {row: why for row in given.row if (why := impossible(row, layout))}
    risky = [row for row in given.row if row in RISKY_BASELINES]
    with Testbed(layout.hosts, link_mbit=None) as testbed:
        common = {name: getattr(given, name) for name in ("batch", "seed", "model")}
        common["shaped"] = testbed.shaped
        launch = partial(testbed.run, run, ranks_per_host=layout.counts, **common)
        for row in risky:
            # Fast also for slower links: PowerSGD's first two steps are plain fp32. A wrong order
            # is a matter of luck, so the rounds are not too few.
            alone = {"rows": [row], "links": [1000.0], "warmup": 3, "rounds": 8, "seconds": 0}
            try:
                launch(timeout_s=45.0, echo=False, **alone)
            except RankFailed as error:
                reasons[row] = error.reason
        for row, why in reasons.items():
            say(f"  {row}: {why}")

        def together() -> list[Samples]:
            return launch(
                rows=[row for row in given.row if row not in reasons],
                links=given.link,
                warmup=given.warmup,
                rounds=given.rounds,
                seconds=given.seconds,
                timeout_s=given.timeout,
            )[0]

        try:
            samples = together()
        except RankFailed as error:
            # What worked alone may still meet the wrong collective among twenty others: without it
            # the rest is measured again, and an error of ours then ends the run as it should.
            ended = f"worked alone, ended the common run: {error.reason}"
            worked = [row for row in risky if row not in reasons]
            if not worked:
                raise
            say(f"  {', '.join(worked)}: {ended}")
            reasons |= dict.fromkeys(worked, ended)
            samples = together()
    for link, of_link in zip(given.link, samples, strict=True):
        yield from summarize(of_link, layout=layout, link_mbit=link, reasons=reasons)


def summarize(
    samples_of: Samples, *, layout: Layout, link_mbit: float | None, reasons: Mapping[str, str]
) -> Iterator[Row]:
    """The samples of one link as rows of the JSON, one per row measured.

    reasons: the rows that could not be measured, and why not. Bytes are those of the host that
    sends most, divided by the mean number of ranks: no share of a host with fewer or more ranks.
    """
    steps_ms = {name: [1e3 * s["step_s"] for s in found] for name, found in samples_of.items()}
    medians = {name: median(steps) for name, steps in steps_ms.items()}
    known = {
        "hosts": layout.hosts,
        "ranks_per_host": layout.ranks_per_host,
        "layout": layout.name,
        "link_mbit": link_mbit,
    }
    ranks = layout.world_size / layout.hosts
    row: Row = {}
    for name, samples in samples_of.items():
        form, codec = split_row(name)
        row_name = RowName.parse(name)
        step_ms, silent, last = medians[name], row_name.silent, samples[-1]
        floor_ms = medians.get(floor_of(name))
        host_bytes = float(np.median([s["tx_bytes"] for s in samples], axis=0).max())
        inter_bytes = last["inter_bytes"]
        limit_pct = bound_ms = tail_ms = last_bucket_ms = None
        if last["tail_s"] is not None:
            tail_ms = median(1e3 * sample["tail_s"] for sample in samples)
            if link_mbit is not None:
                last_bucket_ms = max(last["last_bucket_bytes"]) * 8 / (link_mbit * 1e3)
        if link_mbit is not None and not silent and floor_ms is not None:
            wire_ms, added_ms = host_bytes * 8 / (link_mbit * 1e3), step_ms - floor_ms
            bound_ms = floor_ms + wire_ms
            limit_pct = wire_ms / added_ms * 100 if added_ms > 0 else None
        row = {
            "codec": codec,
            "form": form,
            "micro_batches": row_name.micro_batches,
            **known,
            "rounds": len(samples),
            "step_ms_median": step_ms,
            "step_ms_p10": float(np.quantile(steps_ms[name], 0.1)),
            "step_ms_p90": float(np.quantile(steps_ms[name], 0.9)),
            "wire_bytes": round(host_bytes / ranks),
            "counted_wire_bytes": inter_bytes and round(max(inter_bytes) / ranks),
            "raw_bytes": last["raw_bytes"],
            # Of host 0, in the last step: our counters say the same in every one.
            "inter_bytes": inter_bytes and inter_bytes[0],
            "intra_bytes": last["intra_bytes"] and last["intra_bytes"][0],
            "lo_bytes": round(median(sample["lo_bytes"] for sample in samples)),
            "wire_limit_pct": limit_pct,
            "tail_ms": tail_ms,
            "last_bucket_ms": last_bucket_ms,
            "bound_ms": bound_ms,
            "speedup_vs_fp32": medians[DDP_ROW] / step_ms,
            "speedup_vs_fp16": medians[FP16_ROW] / step_ms,
            "replicas_identical": None
            if silent or row_name.all_ranks
            else all(s["identical"] for s in samples),
            "reason": None,
        }
        yield row
    for name, reason in reasons.items():
        form, codec = split_row(name)
        yield {**dict.fromkeys(row), **known, "codec": codec, "form": form, "reason": reason}


if __name__ == "__main__":
    main()
