"""Checkpoints of a strategy, given to a checkpointer.

All that strategies import of checkpoints is here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_dist.checkpoint.checkpointer import Checkpointer
    from lightning_dist.ranks.facts import Spread
    from lightning_dist.sync.base import Sync


class CheckpointerIO(TorchCheckpointIO):
    """Stands in for a strategy's CheckpointIO while it saves.

    Args:
        checkpointer: None on ranks that do not write.
        step: optimizer steps so far.
        sharded: see :meth:`.Checkpointer.save`. Then a strategy may add tensors of which each rank
            has a part to ``spreads``, and leave them where they are.
        resumable: whether a training can go on from it.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, *, step: int, sharded: bool, resumable: bool
    ) -> None:
        self._checkpointer = checkpointer
        self._step, self.sharded, self._resumable = step, sharded, resumable
        self.spreads: list[Spread] = []

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        assert self._checkpointer is not None
        target = os.fspath(path)
        self._checkpointer.save(
            checkpoint,
            target,
            step=self._step,
            sharded=self.sharded,
            spreads=self.spreads,
            resumable=self._resumable,
        )


def add_state(checkpoint: dict[str, Any], sync: Sync, io: CheckpointIO, *, to: int = 0) -> None:
    """Add what an exact restart needs of ``sync`` to a checkpoint, on rank ``to``. Collective.

    In a sharded checkpoint each rank keeps its tensors, and all have the state.
    """
    if isinstance(io, CheckpointerIO) and io.sharded:
        state: dict[str, Any] | None
        state, spreads = sync.spread_state_dict()
        io.spreads += spreads
        if (states := sync.optimizer_states_in(state)) is not None:
            checkpoint["optimizer_states"] = states  # the same tensors, for other strategies
    else:
        state = sync.state_dict(to=to)
    if state is not None:
        checkpoint[sync.key] = state
