"""Where commands and callbacks print their tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDE = 10_000


def stdout_console() -> Console:
    """Standard output, as wide as its terminal; without one, a line of a table stays a line."""
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def is_plain() -> bool:
    """Whether text is to be without colours and boxes: nobody looks, or somebody has asked."""
    is_seen = sys.stdout.isatty() and sys.stderr.isatty()
    return bool(os.environ.get("NO_COLOR")) or not is_seen
