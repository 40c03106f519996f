"""The ranks of one start of a job: the groups they have, what they agree on, and when they stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.base.private import destroy_group
from lightning_dist.ranks.agreement import Ranks, new_group_of_all
from lightning_dist.ranks.launch import Launch


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
        """Of the ranks that write one checkpoint together; None where rank 0 writes alone."""

    def _group(self, purpose: str) -> dist.ProcessGroup:
        if self._make is not None:
            return self._make()
        group = new_group_of_all(f"elastic-{self.generation}-{purpose}")
        self._groups.append(group)
        return group

    @property
    def rank(self) -> int:
        """This one."""
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
