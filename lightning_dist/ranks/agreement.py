"""Ranks that save and load together: what one of them decides or fails at, all of them do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_dist.base.private import destroy_group
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.manifest import Origin
from lightning_dist.ranks.channel import WaitLimit
from lightning_dist.ranks.facts import all_bytes, all_facts, differences

Facts = dict[str, Any]
T = TypeVar("T")
_CPU = torch.device("cpu")


def new_group_of_all(purpose: str) -> dist.ProcessGroup:
    """A group of all ranks on CPU, once all of them have it. Collective.

    gloo connects each pair from both ends: a rank that gave the group up at once would close what
    another one still waits for, which then fails with "Connection closed by peer".
    """
    group = dist.new_group(backend="gloo", group_desc=purpose)
    assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
    dist.barrier(group)
    return group


class Ranks:
    """All ranks of a job; every method is collective.

    Args:
        group: of all ranks; None for a job of one.
        device: on which ``group`` works.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, device: torch.device = _CPU) -> None:
        self.group, self._device, self._limit = group, device, WaitLimit()
        self.rank = 0 if group is None else group.rank()
        self.leader = 0
        """The rank that decides, writes and keeps the account: a role that may move."""
        self.count = 1 if group is None else group.size()

    def wait(self, work: dist.Work, *, what: str) -> None:
        """Wait for a collective of all ranks; raises RuntimeError after :meth:`give_up`."""
        self._limit.wait(work, what=what)

    def give_up(self) -> None:
        """Raise RuntimeError in all waits for facts, also later ones. From any thread."""
        self._limit.give_up()

    def all(self, facts: Facts, *, error: Exception | None = None) -> list[Facts]:
        """The JSON-able facts of every rank, in rank order.

        Args:
            error: why this rank cannot go on. If one has an error, all raise: that one, or their
                own.
        """
        by_rank: Sequence[Mapping[str, Any]] = [{"facts": facts, "error": None}]
        if self.group is not None:
            mine = {"facts": facts, "error": None if error is None else describe_error(error)}
            by_rank = all_facts(mine, group=self.group, device=self._device, limit=self._limit)
        if error is not None:
            raise error
        for of_rank in by_rank:
            if of_rank["error"] is not None:
                raise error_from(of_rank["error"])
        return [of_rank["facts"] for of_rank in by_rank]

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads."""
        return self.rank == self.leader

    def of_leader(self, facts: Facts, *, error: Exception | None = None) -> Facts:
        """The facts of the leader; see :meth:`all`."""
        return self.all(facts, error=error)[self.leader]

    def agree(
        self, origin: Origin, *, shape: int = 0, problem: Exception | None = None
    ) -> tuple[Origin, bool]:
        """Rank 0's ``origin`` of a checkpoint that all write, and whether all have this ``shape``.

        Args:
            problem: why this rank cannot take part; all ranks raise it, as a CheckpointError if it
                is one, or else as a ValueError.
        """
        if self.count < origin.ranks:
            raise ValueError(
                f"{origin.ranks} ranks write one folder together, so they need a group on CPU, got "
                "group=None; give dist.new_group(backend='gloo')"
            )
        error: Exception | None = None
        if problem is not None:
            kind = CheckpointError if isinstance(problem, CheckpointError) else ValueError
            text = f"{type(problem).__name__}: {problem}"
            error = kind(f"rank {self.rank} cannot save its state: {text}")
            error.__cause__ = problem
        mine = {"save_id": origin.save_id, "created_ns": origin.created_ns, "order": origin.order}
        by_rank = self.all({"origin": mine, "shape": shape}, error=error)
        alike = all(each["shape"] == by_rank[0]["shape"] for each in by_rank)
        return replace(origin, **by_rank[0]["origin"]), alike

    def require_equal(self, facts: Facts, *, rule: str) -> None:
        """Raise ValueError on all ranks, with ``rule`` and what differs, if their facts do."""
        if lines := differences(self.all(facts)):
            raise ValueError(f"{rule}, but they differ in\n" + "\n".join(lines))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; anything that can be pickled."""
        if self.group is None:
            return [value]
        mine = pickle.dumps(value)
        of_all = all_bytes(mine, group=self.group, device=self._device, limit=self._limit)
        return [pickle.loads(each) for each in of_all]  # which ends before the padding

    def on_each(self, action: Callable[[], T]) -> T:
        """Result of ``action`` on this rank. An exception on one rank is raised on all."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        self.all({}, error=error)
        return result

    def on_first(self, action: Callable[[], Facts]) -> Facts:
        """Result of ``action``, which the leader alone runs. Its exception is raised on all."""
        facts: Facts = {}
        error: Exception | None = None
        if self.is_leader:
            try:
                facts = action()
            except Exception as raised:
                error = raised
        return self.of_leader(facts, error=error)


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy a group that this rank no longer uses; nothing if it went with the default group."""
    if group is not None and dist.is_initialized():
        with suppress(ValueError):  # of a default group before this one
            destroy_group(group)


_TYPES = {kind.__name__: kind for kind in (ValueError, FileNotFoundError, OSError)}
"""A class before those that it is derived from."""


def describe_error(error: Exception) -> list[str]:
    """``error`` for other ranks; JSON-able."""
    if isinstance(error, CorruptCheckpointError):
        return ["CorruptCheckpointError", error.path, error.reason]
    kinds = [name for name, kind in _TYPES.items() if isinstance(error, kind)]
    return [kinds[0] if kinds else "", str(error) or repr(error)]


def error_from(description: list[str]) -> Exception:
    """The error that was described; a CheckpointError where its type is not known."""
    kind, *arguments = description
    if kind == "CorruptCheckpointError":
        return CorruptCheckpointError(*arguments)
    return _TYPES.get(kind, CheckpointError)(*arguments)
