"""Loaders that keep their position themselves, as torchdata's StatefulDataLoader does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from lightning_dist.elastic.workers import end_workers


@runtime_checkable
class StatefulLoader(Protocol):
    """An iterable that can say where it is and go on from there, with as many ranks."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Remembered:
    """A stateful loader that knows where it was some batches ago.

    Trainers fetch batches ahead, and optimizers step after several: what a checkpoint wants is the
    position after the last batch that a step has used.

    Args:
        loader: asked for its state after every batch.
        back: how many batches it may be asked to go back.
    """

    def __init__(self, loader: StatefulLoader, *, back: int) -> None:
        self._loader = loader
        self._back = back
        self._states: dict[int, Any] = {}

    def __len__(self) -> int:
        """As the loader's, which may not have one."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._states.clear()
        for number, batch in enumerate(self._loader, start=1):
            self._states[number] = self._loader.state_dict()
            self._states.pop(number - self._back - 1, None)
            yield batch

    def close(self) -> None:
        """No more batches are wanted."""
        end_workers(self._loader)

    def state_after(self, batches: int) -> Any:
        """The state when ``batches`` of this iteration had been taken; None for none."""
        assert batches == 0 or batches in self._states, (batches, sorted(self._states))
        return self._states.get(batches)
