"""The command line of the hierarchical benchmark."""

from __future__ import annotations

import argparse

from benchmarks.allreduce_arguments import LINKS, add_shared, check_hosts
from benchmarks.hierarchical_settings import FORMS, rows_of
from benchmarks.layouts import Layout

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
