"""Answers of a store that may be stopped, or cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")


class NoAnswerError(TimeoutError):
    """A store does not answer."""


def await_answer(
    looks: Iterable[_T | None],
    *,
    limit: float,
    started: Callable[[threading.Thread], None] = lambda thread: None,
    is_over: Callable[[], bool] = lambda: False,
) -> _T:
    """The first of ``looks`` at a store that is not None, each within ``limit`` seconds.

    In a thread: whoever asks a store that is stopped, or connects to it, is blocked, whatever its
    timeout.

    Args:
        started: called with that thread.
        is_over: nobody waits for an answer any more.

    Raises:
        NoAnswerError: a look took longer.
    """
    answers: SimpleQueue[_T | Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            for found in looks:
                answers.put(found)
                if found is not None or is_over():
                    return
        except Exception as error:  # it is raised where the answer is waited for
            answers.put(error)

    thread = threading.Thread(target=ask, name="look at the store", daemon=True)
    started(thread)
    thread.start()
    while True:
        try:
            found = answers.get(timeout=limit)
        except Empty:
            raise NoAnswerError(
                f"it must answer within {limit:g} s; see whether its launcher is stopped or cut off"
            ) from None
        if isinstance(found, Exception):
            raise found
        if found is not None:
            return found
