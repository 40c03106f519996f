"""Lines of ranks whose folder is not rank 0's reach rank 0's, while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.exchange.handshake import Facts, all_facts
from lightning_dist.profiling.capture.courier import Courier, Request
from lightning_dist.profiling.capture.machine import this_machine
from lightning_dist.shared_folder import has_token, leave_token, remove_token

_LIMIT = 4 * 2**20
_BACKLOG = 64 * 2**20
_MANY = 64


def is_shared(folder: str | Path, group: dist.ProcessGroup | None) -> bool:
    """Whether ``folder`` of this rank is that of rank 0. Collective.

    False on all others where rank 0 cannot write to its own.

    Raises:
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """
    if group is None or group.size() == 1:
        return True
    folder = Path(folder)
    is_first = group.rank() == 0
    name = str(_facts_of_all({"token": leave_token(folder) if is_first else ""}, group)[0]["token"])
    sees = is_first or (bool(name) and has_token(folder, name))
    _facts_of_all({}, group)  # all have looked
    if is_first and name:
        remove_token(folder, name)
    return sees


class Gatherer:
    """Brings lines to ``rank<r>.jsonl`` in rank 0's folder. Its begin is collective.

    A thread does it; nothing waits for it before :meth:`close`, and nothing that goes wrong is
    raised: it costs the profile these lines, which their ranks keep in folders of their own.

    Args:
        folder: of rank 0.
        group: of all ranks, on gloo, used for nothing else until all have closed; None for a single
            rank. Its timeout bounds how much later than others a rank may collect.
        is_shared: what :func:`is_shared` says on this rank.
        limit: bytes that a rank sends at most per call, before they are compressed; what is left
            goes with the next ones.
        relay_above: with more ranks one of every machine sends for all of them.
        machine: equal on ranks of a machine; by default what the kernel says.

    Raises:
        ValueError: ``limit`` is less than 1.
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        group: dist.ProcessGroup | None,
        is_shared: bool,
        limit: int = _LIMIT,
        relay_above: int = _MANY,
        machine: str = "",
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1 byte, got {limit}; the default does")
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._problems: list[str] = []
        self._given = 0
        self._is_cut = False
        self._thread: threading.Thread | None = None
        self._courier: Courier | None = None
        self.is_needed = False
        """Whether any rank has a folder of its own; the same on all ranks."""
        self.is_over = False
        """Whether this rank has closed, and uses its group no more."""
        if group is None:
            return
        facts = {"is_shared": is_shared, "machine": machine or this_machine()}
        receiver_of = _receivers(_facts_of_all(facts, group), relay_above=relay_above)
        self.is_needed = bool(receiver_of)
        rank = group.rank()
        senders = [other for other, receiver in receiver_of.items() if receiver == rank]
        if rank in receiver_of or senders:
            self._courier = Courier(
                Path(folder),
                group=group,
                receiver=receiver_of.get(rank),
                senders=senders,
                limit=limit,
                problems=self._problems,
            )
            self._thread = threading.Thread(
                target=self._courier.run,
                args=(self._requests,),
                daemon=True,
                name="lightning_dist profile",
            )
            self._thread.start()

    @property
    def sends(self) -> bool:
        """Whether lines of this rank travel; it has to :meth:`collect` all the same."""
        courier = self._courier
        is_sender = courier is not None and courier.receiver is not None and not courier.is_over
        return is_sender and not self._is_cut

    def collect(self, lines: bytes) -> None:
        """Send whole ``lines`` of this rank soon. All ranks call it equally often, at equal steps.

        Those of a rank that shares the folder are not sent: it has written them there.
        """
        if self._courier is None or self._courier.is_over:
            return
        if not self.sends:
            lines = b""
        is_full = bool(lines) and self._given - self._courier.taken + len(lines) > _BACKLOG
        if is_full:
            self._is_cut = True  # for good: a gap in the middle would not be seen
            self._problems.append(
                f"from some step on no lines were sent: {_BACKLOG >> 20} MiB were waiting already"
            )
            lines = b""
        self._given += len(lines)
        self._requests.put(Request(lines))

    def close(self, timeout: float) -> Sequence[str]:
        """Send what is left, and for rank 0: wait for what others have left.

        Args:
            timeout: in seconds. A rank that never closes makes rank 0 wait that long.

        Returns:
            What has not arrived, and why; for the user to see.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(Request(b"", is_end=True))
            thread.join(timeout)
            if thread.is_alive():
                self._problems.append(f"not all lines have travelled within {timeout:g} s")
        self._courier = None
        self.is_over = thread is None or not thread.is_alive()
        return tuple(self._problems)


def _receivers(facts: Sequence[Facts], *, relay_above: int) -> Mapping[int, int]:
    """To whom each rank sends that does; rank 0 never does."""
    senders = [rank for rank, each in enumerate(facts) if rank and not each["is_shared"]]
    leaders: dict[str, int] = {}
    for rank in senders:
        leaders.setdefault(str(facts[rank]["machine"]), rank)
    if len(facts) <= relay_above:
        return dict.fromkeys(senders, 0)
    return {
        rank: 0 if leader == rank else leader
        for rank in senders
        for leader in [leaders[str(facts[rank]["machine"])]]
    }


def _facts_of_all(facts: Facts, group: dist.ProcessGroup) -> Sequence[Facts]:
    return all_facts(facts, group=group, device=torch.device("cpu"))
