"""``lightning-dist codecs``: the table of codecs, and shell completion of their names."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from lightning_dist.base.console import print_table
from lightning_dist.cli.command import Json, print_json, reported

if TYPE_CHECKING:
    from lightning_dist.codecs import Codec

_WIDTH = 1 << 10
"""Rows and columns of a matrix so large that its last block does not matter."""


@reported
def codecs(
    as_json: Json = False,
) -> None:
    """List the codecs: options, bytes sent, use.

    \b
    Options go into the name, here and in the code:
      lightning-dist codecs
      lightning-dist config --set codec=topk:ratio=0.05
    For programs:
      lightning-dist codecs --json
    """
    from lightning_dist.codecs import CODECS  # torch

    rows = [describe(kind()) for kind in CODECS.values()]
    if as_json:
        print_json(codecs=rows)
        return
    print_table(
        ("codec", "options", "bytes", "residual", "for"),
        map(_cells, rows),
        right=("bytes",),
        fold=("options", "for"),
        optional=("residual", "bytes", "options"),
    )
    typer.echo(
        f"\nbytes: sent per float32 element (4 bytes) of a {_WIDTH} x {_WIDTH} matrix;\n"
        "n/a if they depend on the gradients.\n"
        "residual: kept with error feedback, 4 bytes per element."
    )


def describe(codec: Codec) -> dict[str, Any]:
    """A codec with its own options, for programs."""
    nbytes = codec.payload_bytes((_WIDTH, _WIDTH))
    return {
        "name": codec.name,
        "options": {field.name: getattr(codec, field.name) for field in fields(codec)},
        "bytes_per_element": None if nbytes is None else nbytes / _WIDTH**2,
        "keeps_residual": codec.keeps_residual,
        "exchange": codec.exchange,
        "use": codec.use,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    nbytes = row["bytes_per_element"]
    return (
        row["name"],
        " ".join(f"{name}={_plain(value)}" for name, value in row["options"].items()),
        "n/a" if nbytes is None else f"{nbytes:.3g}",
        "yes" if row["keeps_residual"] else "no",
        row["use"],
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def codec_names(incomplete: str) -> list[str]:
    """Shell completion of a codec name, or after ``name:`` of its options."""
    from lightning_dist.codecs import CODECS  # torch

    name, colon, options = incomplete.partition(":")
    if not colon:
        return [name for name in CODECS if name.startswith(incomplete)]
    given, _, last = options.rpartition(",")
    known = [f"{field.name}=" for field in fields(CODECS[name])] if name in CODECS else []
    before = f"{name}:{given}," if given else f"{name}:"
    return [before + option for option in known if option.startswith(last) and option not in given]
