"""Ranks that save and load together: what one of them decides or fails at, all of them do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.exchange.handshake import all_facts
from lightning_dist.integrations.told_errors import retold, told

Facts = dict[str, Any]


class Ranks:
    """All ranks of a job; every method is collective.

    Args:
        group: a group of all ranks on CPU; None for a job of one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    def all(self, facts: Facts, *, error: Exception | None = None) -> list[Facts]:
        """The JSON-able facts of every rank, in rank order.

        Args:
            error: why this rank cannot go on. If one has an error, all raise: that one, or their
                own.
        """
        by_rank: Sequence[Mapping[str, Any]] = [{"facts": facts, "error": None}]
        if self.group is not None:
            mine = {"facts": facts, "error": None if error is None else told(error)}
            by_rank = all_facts(mine, group=self.group, device=torch.device("cpu"))
        if error is not None:
            raise error
        for of_rank in by_rank:
            if of_rank["error"] is not None:
                raise retold(of_rank["error"])
        return [of_rank["facts"] for of_rank in by_rank]

    def on_first(self, action: Callable[[], Facts]) -> Facts:
        """What ``action`` returns on rank 0, which alone runs it. What it raises, all raise."""
        facts: Facts = {}
        error: Exception | None = None
        if self.rank == 0:
            try:
                facts = action()
            except Exception as raised:
                error = raised
        return self.all(facts, error=error)[0]
