"""All ranks come to ``save_state``, or one says that it cannot: it waits in a training step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported silently

from lightning_dist.base.private import store_of, timeout_of

_PAUSE = (0.002, 0.5)
"""First and longest, in seconds, between two looks."""
_SURE = 2.0
"""Seconds after which a wait that goes on is not one that is just over."""


class RollCall:
    """Lets ranks meet before they communicate in a call of the user's.

    ``if accelerator.is_main_process: accelerator.save_state()`` works where only rank 0 has
    anything to save. Where each rank has, rank 0 would wait for the others, which train on and wait
    for rank 0.

    Args:
        group: of all ranks, made for this; whoever has made it may end it.
        steps: number of steps that this rank has exchanged.
        each: what each rank has to save, for messages.
        instead: another way, for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        steps: Callable[[], int],
        each: str,
        instead: str = "",
    ) -> None:
        self._rank, self._size, self._limit = group.rank(), group.size(), timeout_of(group)
        self._steps, self._each, self._instead, self._meetings = steps, each, instead, 0
        self._store = PrefixStore("lightning_dist/roll call", store_of(group))

    def waits(self) -> Callable[[], None]:
        """This rank waits long for an exchange. Returns a call for the end. From any thread."""
        key = f"waiting {self._rank}"
        self._store.set(key, str(1 + self._steps()))
        return lambda: self._store.set(key, "0")

    def meet(self, call: str) -> None:
        """Wait until all ranks have called it.

        Args:
            call: of the user, for messages.

        Raises:
            ValueError: one of them waits for this rank in a step.
            TimeoutError: some have not come within the timeout of the group.
        """
        size, seconds, key = self._size, self._limit.total_seconds(), f"meeting {self._meetings}"
        rule = f"{call} must be called on all ranks, because each has {self._each} to save"
        begin, (pause, longest) = time.monotonic(), _PAUSE
        waiting: dict[int, float] = {}
        came = self._store.add(key, 1)
        while came < size:
            now = time.monotonic()
            # One that waits in a step before this rank's has what this rank had to send it.
            steps = {rank: self._store.add(f"waiting {rank}", 0) - 1 for rank in range(size)}
            stuck = [rank for rank, step in steps.items() if step >= self._steps()]
            waiting = {rank: waiting.get(rank, now) for rank in stuck}
            for rank, since in waiting.items():
                if now - since > _SURE:
                    raise ValueError(
                        f"{rule}; rank {rank} trains on, and waits for this one in step "
                        f"{steps[rank]}. Call it outside of `if accelerator.is_main_process`"
                        f"{self._instead}"
                    )
            if now - begin > seconds:
                raise TimeoutError(f"{rule}; {came} of {size} have come within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
            came = self._store.add(key, 0)
        self._meetings += 1
