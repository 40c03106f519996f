"""Ranks that act together: what they agree on, and who is a member."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_dist.base.private import destroy_group
from lightning_dist.ranks.channel import WaitLimit
from lightning_dist.ranks.facts import all_bytes, all_facts, differences
from lightning_dist.ranks.launch import Launch

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
        return [pickle.loads(pickled) for pickled in of_all]  # which ends before the padding

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
_PACKAGE = __name__.partition(".")[0]


def describe_error(error: Exception) -> list[Any]:
    """``error`` for other ranks: its class, or one that it is derived from, and arguments.

    JSON-able. Errors of this package are made there as pickle would make them.
    """
    for kind in type(error).__mro__:
        if kind.__module__.startswith(f"{_PACKAGE}."):
            return [f"{kind.__module__}:{kind.__qualname__}", *error.__reduce__()[1]]
        if kind in _TYPES.values():
            return [kind.__name__, str(error) or repr(error)]
    return ["", str(error) or repr(error)]


def error_from(description: list[Any]) -> Exception:
    """The error that was described; a RuntimeError where its class is not known."""
    name, *arguments = description
    module, _, kind = name.partition(":")
    if kind:
        made: Exception = getattr(import_module(module), kind)(*arguments)
        return made
    return _TYPES.get(name, RuntimeError)(*arguments)


class StopConsensus:
    """Whether any rank wants to stop; known one call later, on all ranks at once.

    Every call sends this rank's wish and returns the result of the call before, so the round trip
    runs while the next step does. All ranks have to call equally often.

    Args:
        group: of all ranks, on CPU, used for nothing else; None for a single rank.
        ranks: those of the group, which may give up waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, ranks: Ranks) -> None:
        self._group, self._ranks = group, ranks
        self._sent: tuple[torch.Tensor, Any] | None = None

    def ask(self, wish: bool) -> bool:
        """Send ``wish``; whether any rank wished so at the call before. False at the first.

        A single rank has nobody to ask, and its wish counts at once.
        """
        if self._group is None:
            return wish
        before = self._take()
        flag = torch.tensor([int(wish)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent = (flag, work)
        return before

    def end(self) -> None:
        """Wait for the last answer: a process must not leave while others still count with it."""
        self._take()

    def _take(self) -> bool:
        sent, self._sent = self._sent, None
        if sent is None:
            return False
        flag, work = sent
        self._ranks.wait(work, what="the wish to stop")
        return bool(flag.item())


class Membership:
    """Ranks of one generation of the job. All methods and the constructor are collective.

    Args:
        sharded: whether every rank writes its part of a checkpoint.
        generation: counts the memberships of this process.
        make: makes a group of all ranks; None: torch's ``new_group``, for all that the launcher has
            started.

    Raises:
        ValueError: the launcher started several ranks, and there is no process group.
    """

    def __init__(
        self,
        *,
        sharded: bool = False,
        generation: int = 0,
        make: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        expected = Launch.from_env().world_size
        if expected > 1 and not several and make is None:
            raise ValueError(
                f"The launcher started {expected} ranks, but no process group exists; call "
                "lightning_dist.init_process_group() first (Accelerator() and fabric.launch() make "
                "one, on CPU with ACCELERATE_USE_CPU=true)"
            )
        self.generation = generation
        self._groups: list[dist.ProcessGroup] = []
        self._make = make
        self.ranks = Ranks(self._group("facts") if several else None)
        self.stop = StopConsensus(self._group("stop") if several else None, ranks=self.ranks)
        self.writers = self._group("writers") if several and sharded else None
        """Group of the ranks that write one checkpoint together; None where rank 0 writes alone."""

    def _group(self, purpose: str) -> dist.ProcessGroup:
        if self._make is not None:
            return self._make()
        group = new_group_of_all(f"elastic-{self.generation}-{purpose}")
        self._groups.append(group)
        return group

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Ranks of this generation."""
        return self.ranks.count

    def close(self) -> None:
        """Give the groups back. For an end in good order: where a peer hangs, this would too."""
        self.stop.end()
        groups, self._groups = self._groups, []
        for group in groups:
            destroy_group(group)
