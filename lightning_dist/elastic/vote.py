"""What all ranks decide together, without training waiting for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Vote:
    """Whether any rank has asked for something; known one call later, on all ranks at once.

    Every call sends this rank's wish and returns the result of the call before, so the round trip
    runs while the next step does. All ranks have to call equally often.

    Args:
        group: of all ranks, on CPU, used for nothing else; None for a single rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._sent: tuple[torch.Tensor, Any] | None = None

    def cast(self, wish: bool) -> bool:
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
        """Wait for the last vote: a process must not leave while others still count with it."""
        self._take()

    def _take(self) -> bool:
        sent, self._sent = self._sent, None
        if sent is None:
            return False
        flag, work = sent
        work.wait()
        return bool(flag.item())

    def are_equal(self, value: int) -> bool:
        """Whether ``value`` is the same on all ranks. Collective."""
        if self._group is None:
            return True
        ends = torch.tensor([value, -value])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        return bool(ends[0] == -ends[1])

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Collective."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
