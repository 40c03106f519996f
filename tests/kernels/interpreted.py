"""Triton's kernels in the reducer on a CPU: interpreted, and counted."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from quick_interpreter import quicken_interpreter

from lightning_dist.kernels.triton import table
from lightning_dist.reducer.plan import flat as flat_plan

passes = pytest.importorskip("lightning_dist.kernels.triton.passes")
quicken_interpreter()

_turn = threading.RLock()  # the interpreter's state is the process's, and ranks are threads


@contextmanager
def in_tables(
    on_host: Callable[[Sequence[Any]], Sequence[Any]] = lambda arguments: arguments,
) -> Iterator[list[str]]:
    """Planners use Triton's kernels; the names of those that were launched.

    Args:
        on_host: gives the arguments of a launch as the interpreter can read them.
    """
    launched: list[str] = []
    launch = passes._launch

    def interpreted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        there = on_host(arguments)
        with _turn:
            launched.append(kernel.__name__)
            launch(kernel, *there, **constants)

    with (
        patch.object(flat_plan, "available_on", lambda device: True),
        patch.object(passes, "_launch", interpreted),
        patch.object(table, "_INTERPRETED_TILE_ELEMENTS", 1 << 10),  # tests have small slices
    ):
        yield launched
