"""What it is worth to add up within hosts first, and to compress only what leaves them.

    python -m benchmarks.step_time.hierarchical [--quick] [--layout 2x2 --layout 3+1] [--link 200]
                                      [--form sharded --codec int8] [--json PATH]

The model and the loop of `allreduce.py`, whose columns mean the same here: hosts on one
machine (`harness/testbed.py`; needs root), 42 MB of fp32 gradients, all rows in one set of
processes for each layout, taking turns step by step. A layout is `2x2`, hosts x ranks of each, or
`3+1`, the ranks of every host. Rows:

    no-comm, ddp, torch-fp16-hook
                   torch's own, as there; their `form` is null
    flat           `compress_ddp(ddp, CODEC, hierarchical=False)`: hosts do not matter
    sharded        hierarchical=True: reduce-scatter within hosts, the compressed exchange between
                   the ranks of one local number, all-gather within hosts
    leader         hierarchical="leader": reduce to one rank of each host, which exchanges for all,
                   and broadcast
    INTRA+INTER    as codec: `{"intra": INTRA, "inter": INTER}`. Other codecs are between hosts
                   only, with nothing compressed within

Where a row is not possible in a layout its figures are null and `reason` says why: hierarchical
forms with one rank per host, the sharded form on hosts of different size.

What is measured besides step_ms (of the slowest rank), replicas_identical and so on:

    wire_bytes     bytes sent in a step by the host that sends most, by the median of its
                   interface's own counter, divided by the mean number of ranks per host. In an
                   uneven layout no host's own number of ranks is right: with leaders both hosts
                   send alike, whoever holds more. wire_limit_pct and bound_ms take the bytes of
                   that host undivided. counted_wire_bytes: our counters in the same way
    inter_bytes    what all ranks of host 0 together sent to other hosts in the last step, by
                   `comm_stats()`; null for torch's rows
    intra_bytes    the same within the host
    lo_bytes       bytes that host 0's loopback sent in a step (median), from
                   /sys/class/net/lo/statistics in its namespace: what intra_bytes should be, with
                   headers and the barrier; torch's rows have it too
    raw_bytes      what an fp32 allreduce would send per rank, as in `allreduce.py`

All ranks share the machine's cores and its memory bus, so what is inside a host is slower here than
between devices of one machine, and the more ranks compress at once the longer each takes. What
was measured can be put into a model with `model.py`.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.harness.launch import Layout
from benchmarks.harness.testbed import Testbed
from benchmarks.step_time.rows import FORMS, impossible, rows_of
from benchmarks.step_time.run import (
    LINKS,
    JsonRow,
    add_shared,
    check_hosts,
    estimate,
    measure_rows,
    run_layouts,
    say,
)


def measure(layout: Layout, *, arguments: argparse.Namespace) -> list[JsonRow]:
    """All links in this layout: the rows of the JSON."""
    reasons = {row: why for row in arguments.rows if (why := impossible(row, layout)) is not None}

    with Testbed(layout.hosts, link_mbit=arguments.link[0]) as testbed:
        return measure_rows(
            testbed,
            arguments,
            rows=[row for row in arguments.rows if row not in reasons],
            layout=layout,
            reasons=reasons,
        )


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    arguments = parse_arguments(argv)
    layouts = [Layout.parse(text) for text in arguments.layout]
    say(estimate(arguments, layouts=layouts, rows=len(arguments.rows)))
    run_layouts(
        "step_time.hierarchical",
        arguments,
        layouts=layouts,
        measure=partial(measure, arguments=arguments),
    )


LAYOUTS = ("2x2", "4x1", "3+1")
QUICK_LAYOUTS = ("2x2",)
QUICK_LINKS = (200.0,)
_QUICK_ROUNDS = 3


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults that depend on --quick filled in; `rows` are added."""
    parser = argparse.ArgumentParser(
        description="Time of a DDP training step with several ranks on a host, per form and codec."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="2x2 at 200 Mbit/s, few rounds, fewer rows")
    add(
        "--layout",
        action="append",
        metavar="LAYOUT",
        help=f"2x2: hosts x ranks, 3+1: ranks of each; repeatable ({', '.join(LAYOUTS)})",
    )
    add("--form", action="append", choices=list(FORMS), help="repeatable (all)")
    add(
        "--codec",
        action="append",
        metavar="NAME",
        help="of lightning_dist, in every form; INTRA+INTER: one within hosts; repeatable",
    )
    add_shared(parser)
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    arguments.layout = arguments.layout or list(QUICK_LAYOUTS if quick else LAYOUTS)
    arguments.link = arguments.link or list(QUICK_LINKS if quick else LINKS)
    arguments.rounds = arguments.rounds or (_QUICK_ROUNDS if quick else None)
    for text in arguments.layout:
        try:
            layout = Layout.parse(text)
        except ValueError as error:
            parser.error(f"--layout: {error}")
        check_hosts(parser, layout.hosts, links=arguments.link)
    arguments.rows = rows_of(arguments.form or list(FORMS), arguments.codec, quick=quick)
    return arguments


if __name__ == "__main__":
    main()
