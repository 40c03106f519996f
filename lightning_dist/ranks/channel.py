"""A process group that payloads travel over, with a limit of waits, and its observer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_dist.base.private import all_gather_single
from lightning_dist.ranks import Topology, traffic
from lightning_dist.ranks.failures import CollectiveError
from lightning_dist.ranks.traffic import Sent

_SLICE = 0.1
"""Seconds of one wait, after which a thread that waits sees that it is to give up."""
_POLL = 0.0005
"""Seconds between two looks at a collective of an accelerator."""
_LONG = 5.0
"""Seconds after which a wait is long."""


class PendingWork(Protocol):
    """A collective that is under way; ``torch.distributed.Work`` is one."""

    def wait(self) -> object: ...


class Watch:
    """Observer of the collectives of a channel. Must be quick, and must not wait for anything."""

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[dist.Work], None] | None:
        """A collective begins. Returns a call that takes it once it is issued, or None.

        Args:
            op: ``"all_reduce"``, ``"all_gather"``, ``"all_to_all"``, ``"gather"`` or
                ``"broadcast"``.
            group: name of the channel.
            sent: bytes that this rank sends.
        """
        return None

    def waits(self) -> Callable[[], None]:
        """The calling thread begins to wait for a collective; returns a call for its end."""
        return nothing


def nothing(*_: object) -> None:
    """No call is of interest."""


class WaitLimit:
    """Limit of every wait for a collective, shared by the channels of a network.

    gloo cannot abort a collective: one whose peer is silent stays under way until the peer's socket
    closes. What can be bounded is the wait for it. Such a collective is left behind, with its
    group. On an accelerator waiting orders streams and does not block, and no wait can be
    interrupted: there the backend's own timeout bounds collectives (``ProcessGroup.set_timeout``),
    and a reducer that is closed waits for its stream, for ``seconds`` if there are any, before it
    aborts its groups.

    Args:
        seconds: of one wait; None: as long as the process group's own timeout.
        on_host: waits for an accelerator block the host, too, and are limited as others. An
            aborted collective looks complete, so such a wait raises if it was to be given up.
    """

    def __init__(self, seconds: float | None = None, *, on_host: bool = False) -> None:
        self.seconds, self.on_host = seconds, on_host
        self.waits_long: Callable[[], Callable[[], None]] = lambda: nothing
        """Called once in each long wait, by the thread that waits; what it returns, at its end."""
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Raise in all waits, those in progress within a tenth of a second."""
        self._given_up.set()

    def require(self, what: str) -> None:
        """Raise CollectiveError after :meth:`give_up`: the group may have other members by now."""
        if self._given_up.is_set():
            raise CollectiveError(f"Gave up waiting for {what}")

    def wait(self, work: dist.Work, *, what: str, on_stream: bool = False) -> object:
        """Wait until ``work`` has ended.

        Args:
            what: it is, for the message.
            on_stream: it is of an accelerator.

        Raises:
            CollectiveError: the limit has passed, :meth:`give_up` was called, or ``work`` has
                failed.
        """
        start = time.monotonic()
        over: Callable[[], None] | None = None
        try:
            while True:
                self.require(what)
                waited = time.monotonic() - start
                left = _SLICE if self.seconds is None else self.seconds - waited
                if left <= 0:
                    raise CollectiveError(
                        f"No answer from the other ranks within {self.seconds:g} s in {what}: a "
                        "rank has terminated, hangs, or is slower than that"
                    )
                if over is None and waited > _LONG:
                    over = self.waits_long()
                if on_stream:
                    if not work.is_completed():
                        time.sleep(_POLL)
                        continue
                    ended = _ended(work)
                    if self._given_up.is_set():
                        raise CollectiveError(f"Gave up {what}, which may have been aborted")
                    return ended
                try:
                    # Whole milliseconds count, and none of them means no limit.
                    return work.wait(timedelta(seconds=max(min(left, _SLICE), 0.001)))
                except RuntimeError:
                    if work.is_completed():
                        return _ended(work)  # since then, or with an error of its own
        finally:
            if over is not None:
                over()


def _ended(work: dist.Work) -> object:
    """Result of a collective that has ended."""
    try:
        return work.wait()
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


class Channel:
    """The collectives that exchanges are made of, asynchronous.

    Args:
        group: used for nothing else.
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
        count = partial(traffic.ring_allreduce, tensor.nbytes)
        return self._begin("all_reduce", count, dist.all_reduce, tensor, op=op)

    def all_gather(self, output: Tensor, own: Tensor) -> PendingWork:
        """``own (N,)`` of every rank -> ``output (W * N,)``."""
        count = partial(traffic.ring_all_gather, own.nbytes)
        return self._begin("all_gather", count, all_gather_single, output, own)

    def all_to_all(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> PendingWork:
        """Part ``r`` of ``own`` -> rank ``r``; equal parts, or ``own_sizes`` elements each."""
        count = partial(traffic.all_to_all, own.nbytes)
        if own_sizes is not None:
            count = partial(traffic.scatter, [size * own.element_size() for size in own_sizes])
        sizes = output_sizes, own_sizes
        return self._begin("all_to_all", count, dist.all_to_all_single, output, own, *sizes)

    def gather(self, parts: list[Tensor] | None, own: Tensor, *, to: int) -> PendingWork:
        """``own`` of every rank of the group -> ``parts`` on rank ``to``, None on others."""
        shares = [own.nbytes if rank == to else 0 for rank in range(self.group.size())]
        count = partial(traffic.scatter, shares)
        return self._begin("gather", count, dist.gather, own, parts, group_dst=to)

    def broadcast(self, tensor: Tensor, *, owner: int) -> PendingWork:
        """``tensor`` of rank ``owner`` of the group -> all."""
        size = self.group.size()
        shares = [tensor.nbytes if rank == owner else 0 for rank in range(size)]
        count = partial(traffic.broadcasts, shares)
        return self._begin("broadcast", count, dist.broadcast, tensor, group_src=owner)

    def _begin(
        self,
        name: str,
        count: Callable[[Topology], Sent],
        launch: Callable[..., dist.Work],
        of: Tensor,
        *others: Any,
        **arguments: Any,
    ) -> PendingWork:
        watch, see = self.watch, None
        if watch is not None:
            anywhere = Topology(("",) * self.group.size(), self.group.rank())
            see = watch.launches(name, group=self.name, sent=count(anywhere).total)
        self.limit.require(name)
        work = launch(of, *others, group=self.group, async_op=True, **arguments)
        if see is not None:
            see(work)
        blocks = of.device.type == "cpu"  # who waits; elsewhere a stream is ordered behind it
        limit = self.limit if blocks or self.limit.on_host else None
        what = f"{name} of group {self.name!r}"
        return _Launched(work, what, limit, not blocks, None if see is None else watch)


@dataclass(frozen=True)
class _Launched:
    """A collective that is under way; ``watch`` wants to know of waits for it."""

    work: dist.Work
    what: str
    limit: WaitLimit | None
    on_stream: bool
    watch: Watch | None

    def wait(self) -> object:
        """Wait until it has ended; on an accelerator usually until the stream has come to it."""
        over = None if self.watch is None else self.watch.waits()
        try:
            if self.limit is None:
                return self.work.wait()
            return self.limit.wait(self.work, what=self.what, on_stream=self.on_stream)
        finally:
            if over is not None:
                over()
