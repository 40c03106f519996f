"""A queue of texts in a store: of many writers, for one reader at a time."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it silently


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
