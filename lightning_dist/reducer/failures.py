"""An exchange that fails: whoever waits for it hears of it, or somebody recovers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lightning_dist.reducer.commit import DriftError
from lightning_dist.reducer.executor import Executor
from lightning_dist.reducer.plan.plans import Handle


class Recovery(Protocol):
    """Decision on a step whose exchange fails; called on the reducer's thread."""

    def pauses(self) -> bool:
        """Whether this rank wants all ranks to stop after this step. Must be quick."""

    def failed(self, error: RuntimeError) -> None:
        """The exchange has failed, for the first time in these groups. Must be quick."""

    def verdict(self) -> bool | None:
        """The answer to a vote that this rank has taken part in and did not hear: was it finite.

        None: nobody has heard it, and the step is given up. May wait for the other ranks.
        """


class Failures:
    """The first error of the exchanges of ``executor``, and who may recover from it."""

    executor: Executor
    recovery: Recovery | None = None

    @property
    def first(self) -> BaseException | None:
        """Nothing is exchanged after it."""
        return self.executor.failure

    def require_none(self) -> None:
        """Raise RuntimeError after a failure."""
        if self.first is not None:
            raise RuntimeError(f"An earlier exchange failed: {self.first}") from self.first

    def note(self, error: BaseException) -> None:
        """Exchange nothing from now on, and let somebody recover."""
        is_first = self.first is None
        self.executor.failure = self.first or error
        if is_first and self.recovery is not None and self._is_recovered():
            assert isinstance(error, RuntimeError)
            self.recovery.failed(error)

    def tell(self, waiting: Iterable[Handle], error: BaseException) -> None:
        """End ``waiting`` tensors: as they are where somebody recovers, else with ``error``."""
        for handle in waiting:
            if handle.done.done():
                continue
            if self._is_recovered():
                handle.done.set_result(handle.given)
                continue
            failed = RuntimeError(f"lightning_dist: {error}")
            handle.done.set_exception(failed)  # type: ignore[arg-type]  # the stub is wrong

    def _is_recovered(self) -> bool:
        """Whether the failure is somebody's to recover from: collectives raise RuntimeErrors."""
        is_of_collective = isinstance(self.first, RuntimeError)
        is_of_collective = is_of_collective and not isinstance(self.first, DriftError)
        return self.recovery is not None and is_of_collective
