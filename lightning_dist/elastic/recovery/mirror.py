"""Copies of residuals, each on the next rank, for the loss of a rank.

A model is still to get the mean of the residuals over the ranks. When a rank is lost, the one that
has its copy adds it to its own residuals, and all ranks scale theirs to the new number of ranks,
which keeps the mean of the old ones. The same scaling holds where ranks join without residuals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.facts import all_facts
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.state import Layout
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.run import RecoverySettings


def require_flat(settings: ExchangeSettings) -> None:
    """Raise ValueError for settings that ask for a hierarchical exchange."""
    if settings.hierarchical not in (False, "auto") or not settings.intra.lossless:
        raise ValueError(
            "mirror_residuals copies the residual of each rank, and in a hierarchical exchange a "
            "rank has the residual of its share only; leave out mirror_residuals, or leave out "
            f"hierarchical={settings.hierarchical!r} and give one codec"
        )


def settings_to_recover(
    settings: ExchangeSettings, recovering: RecoverySettings
) -> ExchangeSettings:
    """Settings of an exchange that goes on without lost ranks.

    Raises:
        ValueError: it cannot.
    """
    if recovering.recovery == "in_process" and settings.delay:
        raise ValueError(
            "recovery='in_process' repeats a failed step, which is not possible with "
            f"delay={settings.delay}; leave it out, or use recovery='restart'"
        )
    if recovering.mirror_every is None:
        return settings
    require_flat(settings)
    return settings.flat()


def refuse_recovery(of: type, recovering: RecoverySettings) -> None:
    """Raise ValueError if a strategy that cannot recover in its process is asked to."""
    if recovering.recovery == "in_process":
        raise ValueError(
            f"{of.__name__} cannot continue in the same process after a rank is "
            "lost; use the Trainer's CompressedDDPStrategy, "
            "ElasticLoop(recovery='in_process'), or recovery='restart'"
        )


class ResidualMirror:
    """A copy of the residuals of the rank before this one, in a ring of all ranks.

    Ranks have names that stay when their numbers change. A refresh sends 4 bytes per compressed
    element, and all ranks wait for it; the copy takes as much memory, and as much again meanwhile.

    Args:
        every: steps between two refreshes.
    """

    def __init__(self, reducer: Reducer, *, every: int) -> None:
        self._reducer, self._every = reducer, every
        self._members: Sequence[str] = ()
        self._step: int | None = None  # of the last refresh
        self._owner = ""
        self._copy: tuple[Tensor, Layout] | None = None

    def refresh(self, group: dist.ProcessGroup) -> None:
        """Copy the residuals, if it is time. Collective, between steps.

        Args:
            group: of all members in their order, used for nothing else meanwhile.
        """
        step = self._reducer.step
        if len(self._members) < 2 or step == self._step or step % self._every:
            return
        limit, state = self._reducer.network.limit, self._reducer.state
        rank, size, own = group.rank(), group.size(), state.packed()
        # Ranks that were in other worlds before have residuals of other parameters.
        facts = {"layout": state.layout, "double": own.dtype == torch.float64}
        before = all_facts(facts, group=group, device=own.device, limit=limit)[rank - 1]
        numel = sum(of_one for *_, of_one in before["layout"])
        received = torch.empty(numel, dtype=torch.float64 if before["double"] else torch.float32)
        sizes, own_sizes = [0] * size, [0] * size
        sizes[rank - 1], own_sizes[(rank + 1) % size] = received.nbytes, own.nbytes
        channel = Channel(group, name="mirror", limit=limit)
        as_bytes = received.view(torch.uint8), own.view(torch.uint8)
        channel.all_to_all(*as_bytes, sizes, own_sizes).wait()
        self._copy = received, before["layout"]
        self._step = step
        self._owner = self._members[rank - 1]

    def regroup(self, members: Sequence[str]) -> str:
        """Go on among ``members``, all of whom call it; the lost rank whose residuals this one
        has taken over, or nothing.
        """
        before, self._members, self._step = self._members, tuple(members), None
        owner, self._owner = self._owner, ""
        copy, self._copy = self._copy, None
        if not before:  # a newcomer, which has no residuals
            return ""
        if taken := copy is not None and owner not in members:
            self._reducer.state.add(*copy)
        self._reducer.state.scale(len(members) / len(before))
        return owner if taken else ""
