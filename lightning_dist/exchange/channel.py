"""A process group that payloads travel over, and somebody who may watch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_dist.exchange.wait_limit import WaitLimit


class PendingWork(Protocol):
    """A collective that is under way; ``torch.distributed.Work`` is one."""

    def wait(self) -> object: ...


class Watch(Protocol):
    """Hears of every collective of a channel. Must be quick, and must not wait for anything."""

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[dist.Work], None] | None:
        """One begins. What is returned is given it once it is under way; None: nobody asks for it.

        Args:
            op: ``"all_reduce"``, ``"all_gather"``, ``"all_to_all"`` or ``"broadcast"``.
            group: name of the channel.
            sent: bytes that this rank sends.
        """

    def waits(self) -> Callable[[], None]:
        """The calling thread begins to wait for one; what is returned is called after that."""


class Channel:
    """The collectives that exchanges are made of, asynchronous.

    Args:
        group: used by nobody else.
        name: of the channel, for a watch: ``"flat"``, ``"intra"``, ``"inter"``, ``"control"``.
        limit: of waits for its collectives; one of its own that is never reached by default.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, name: str = "flat", limit: WaitLimit | None = None
    ) -> None:
        self.group, self.name = group, name
        self.limit = WaitLimit() if limit is None else limit
        self.watch: Watch | None = None

    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> PendingWork:
        """Sum over all ranks, or another ``op`` of them, in place."""
        world = self.group.size()
        return self._begin(
            "all_reduce",
            tensor,
            2 * (world - 1) * tensor.nbytes // world,
            lambda: dist.all_reduce(tensor, op=op, group=self.group, async_op=True),
        )

    def all_gather(self, output: Tensor, own: Tensor) -> PendingWork:
        """``own (N,)`` of every rank -> ``output (W * N,)``."""
        return self._begin(
            "all_gather",
            own,
            (self.group.size() - 1) * own.nbytes,
            lambda: dist.all_gather_single(output, own, group=self.group, async_op=True),
        )

    def all_to_all(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> PendingWork:
        """Part ``r`` of ``own`` -> rank ``r``; equal parts, or ``own_sizes`` elements each."""
        if own_sizes is None:
            kept = own.nbytes // self.group.size()
        else:
            kept = own_sizes[self.group.rank()] * own.element_size()
        return self._begin(
            "all_to_all",
            own,
            own.nbytes - kept,
            lambda: dist.all_to_all_single(
                output, own, output_sizes, own_sizes, group=self.group, async_op=True
            ),
        )

    def broadcast(self, tensor: Tensor, *, owner: int) -> PendingWork:
        """``tensor`` of rank ``owner`` of the group -> all."""
        others = self.group.size() - 1 if self.group.rank() == owner else 0
        return self._begin(
            "broadcast",
            tensor,
            others * tensor.nbytes,
            lambda: dist.broadcast(tensor, group_src=owner, group=self.group, async_op=True),
        )

    def _begin(
        self, op: str, of: Tensor, sent: int, launch: Callable[[], dist.Work]
    ) -> PendingWork:
        watch = self.watch
        see = None if watch is None else watch.launches(op, group=self.name, sent=sent)
        work = launch()
        if see is not None:
            see(work)
        blocks = of.device.type == "cpu"  # who waits; elsewhere a stream is ordered behind it
        if see is None and not blocks:
            return work
        limit = self.limit if blocks else None
        return _Launched(
            work, f"{op} of group {self.name!r}", limit, None if see is None else watch
        )


@dataclass(frozen=True)
class _Launched:
    """A collective that is under way; ``watch`` wants to know of waits for it."""

    work: dist.Work
    what: str
    limit: WaitLimit | None
    watch: Watch | None

    def wait(self) -> object:
        """Until it has ended; on an accelerator, until the stream has come to it."""
        over = None if self.watch is None else self.watch.waits()
        try:
            if self.limit is None:
                return self.work.wait()
            return self.limit.wait(self.work, what=self.what)
        finally:
            if over is not None:
                over()
