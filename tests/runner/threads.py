"""Tests that run in a thread for each rank of a world: ``@on_threads(2)``."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from worlds import Rank, run_threads

T = TypeVar("T")
_given: WeakKeyDictionary[threading.Barrier, list[Any]] = WeakKeyDictionary()
"""What ranks give to ``of_all``, by the barrier of their world."""


def on_threads(
    size: int | str,
    *,
    having: Callable[[Rank], AbstractContextManager[Any]] = nullcontext,
    **arguments: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that every rank of a world runs, with its ``Rank`` as first argument.

    Args:
        size: number of ranks, or the name of the test's parameter that is, has or counts them.
        having: what a test has as first argument in the place of the rank.
        arguments: of `worlds.run_threads`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def on_all(**given: Any) -> None:
            def run_rank(rank: Rank) -> None:
                with having(rank) as first:
                    test(first, **given)

            ranks = size if isinstance(size, int) else size_of(given[size])
            run_threads(run_rank, ranks, **arguments)

        _, *parameters = signature(test).parameters.values()
        vars(on_all)["__signature__"] = signature(test).replace(parameters=parameters)
        return on_all

    return decorate


def size_of(value: Any) -> int:
    if isinstance(value, int):
        return value
    return value.size if hasattr(value, "size") else len(value)


def of_all(rank: Rank, value: T) -> list[T]:
    """What every rank gives, in rank order."""
    given = _given.setdefault(rank.barrier, [None] * rank.size)
    given[rank.rank] = value
    rank.barrier.wait()
    found = list(given)
    rank.barrier.wait()
    return found
