"""Store of the launcher: queues in it, and answers that may not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it silently

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


class StoreQueue:
    """The queue of a store.

    Stores of torch 2.7 have none: there, each text has a key with a number. Writers that were
    killed leave numbers without a text, so a reader looks at all of them.

    Args:
        numbered: use keys with numbers; None: if the store has no queues.
    """

    def __init__(self, store: Store, *, numbered: bool | None = None) -> None:
        self._store = store
        self._numbered = not hasattr(store, "queue_push") if numbered is None else numbered
        self._taken: set[int] = set()

    def push(self, text: str) -> None:
        """Put ``text`` at the end."""
        if not self._numbered:
            self._store.queue_push("queue", text)
            return
        number = self._store.add("pushed", 1)
        self._store.set(f"text {number}", text)

    def pop(self) -> str | None:
        """Take the first text that is there; None: there is none."""
        if not self._numbered:
            is_empty = self._store.queue_len("queue") == 0
            return None if is_empty else self._store.queue_pop("queue").decode()
        for number in range(1, self._store.add("pushed", 0) + 1):
            if number not in self._taken and self._store.check([f"text {number}"]):
                self._taken.add(number)
                text: str = self._store.get(f"text {number}").decode()
                self._store.delete_key(f"text {number}")
                return text
        return None
