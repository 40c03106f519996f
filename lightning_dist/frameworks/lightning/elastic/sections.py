"""Collectives between two steps of a Trainer, done again where a rank is lost in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch.distributed as dist

from lightning_dist.elastic.recovery.protocol import Generation
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.ranks.membership import Membership

T = TypeVar("T")


class Between(Protocol):
    """A fit, as sections know it."""

    @property
    def is_in_step(self) -> bool:
        """Whether a batch was taken for a step that is not over."""

    @property
    def is_alone_in_hook(self) -> bool:
        """True in a hook that the other ranks skip."""

    def enter(self, generation: Generation, members: Membership) -> None:
        """Go on as a member of ``generation``. Collective."""

    def after_entering(self) -> None:
        """A generation was entered in a section."""


class _AgainError(RuntimeError):
    """Not all ranks have completed a section."""


class Sections:
    """Parts of a training between two steps in which ranks wait for each other.

    A validation is one, and so is each collective of the strategy outside of it. A section ends
    with a barrier. If a rank is lost before it, the others enter the next generation and begin the
    section again. If it is lost in the barrier, some ranks may be beyond it. They tell so in the
    next generation: then all have completed the section, and nobody repeats it. Newcomers wait.
    """

    def __init__(self, placement: Between, recovery: StepRecovery) -> None:
        self._placement, self._recovery = placement, recovery
        self._where = ""
        self.passed = 0
        """Sections that all ranks have completed, as far as this one knows. Newcomers learn it."""

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Inside, collectives raise where a rank is lost, and the caller handles it."""
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def run(
        self,
        body: Callable[[], T],
        *,
        undo: Callable[[], None] = lambda: None,
        instead: Callable[[], T] | None = None,
    ) -> T:
        """Result of ``body`` on this rank, once all ranks have completed it.

        Args:
            undo: called before ``body`` is called again.
            instead: result in a step that is taken again anyway.
        """
        if self._where:
            return body()
        if self._placement.is_in_step:
            return self._in_step(body, instead)
        with self.at("section"):
            while self._recovery.is_broken:
                self._enter_next()
                self._after_entering()
            while True:
                try:
                    result = body()
                    self.commit()
                    return result
                except RuntimeError as error:
                    if not self._where:  # it was committed by its body
                        raise
                    if not isinstance(error, _AgainError):
                        self._enter_next(error)
                    undo()
                    self._after_entering()

    def commit(self) -> None:
        """End the section in which this is called. Collective; nothing outside of one."""
        if self._where != "section":
            return
        try:
            self._recovery.arrive()
            dist.barrier()
            self.passed += 1
            self._where = ""
        except RuntimeError as error:
            before = self.passed
            self._enter_next(error)
            if self.passed == before:
                raise _AgainError from error
            self._after_entering()
            self._where = ""

    def _in_step(self, body: Callable[[], T], instead: Callable[[], T] | None) -> T:
        if instead is None or self._recovery.is_committed:
            with self.at("step"):
                return body()
        if self._placement.is_alone_in_hook:
            return instead()
        try:
            return body()
        except RuntimeError as error:  # the step is given up at its end, and taken again
            self._recovery.generations.lost(error)
            return instead()

    def _enter_next(self, error: RuntimeError | None = None) -> None:
        """Go on in the next generation, after ``error`` in this one."""
        while True:
            try:
                if error is not None:
                    self._recovery.generations.lost(error)
                self._placement.enter(*self._recovery.change(is_closed=True))
                return
            except RuntimeError as raised:
                if raised is error:  # nobody is lost
                    raise
                error = raised

    def _after_entering(self) -> None:
        with self.at(""):
            self._placement.after_entering()
