"""Checkpoints of a strategy, given to a checkpointer.

``import lightning_dist`` imports this, and nothing of checkpoints besides.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from lightning_dist.integrations.lightning import private

if TYPE_CHECKING:
    from lightning_dist.checkpoint.checkpointer import Checkpointer
    from lightning_dist.checkpoint.snapshot.plan import Striped
    from lightning_dist.reducer.reducer import Reducer


class CheckpointerIO(TorchCheckpointIO):
    """Stands in for a strategy's CheckpointIO while it saves.

    Args:
        checkpointer: None on ranks that do not write.
        step: optimizer steps so far.
        sharded: see :meth:`.Checkpointer.save`. Then a strategy may add tensors of which each rank
            has a part to ``striped``, and leave them where they are.
        resumable: whether a training can go on from it.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, *, step: int, sharded: bool, resumable: bool
    ) -> None:
        self._checkpointer = checkpointer
        self._step, self.sharded, self._resumable = step, sharded, resumable
        self.striped: list[Striped] = []

    def stripe(self, reducer: Reducer) -> dict[str, Any]:
        """State of ``reducer``, whose residuals stay on their ranks until they are copied."""
        from lightning_dist.checkpoint.snapshot.plan import Striped

        state, stripes = reducer.striped_state_dict()
        self.striped += [Striped(each.whole, each.own) for each in stripes]
        return state

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
            striped=self.striped,
            resumable=self._resumable,
        )


def save_into(
    checkpointer: Checkpointer | None,
    trainer: pl.Trainer,
    path: str,
    *,
    sharded: bool,
    weights_only: bool = False,
) -> None:
    """Save a training by ``checkpointer``, with what its strategy adds. On all ranks.

    Args:
        checkpointer: None on ranks that do not write.
        sharded: see :meth:`.Checkpointer.save`.
        weights_only: leave out what a training needs to go on.
    """
    strategy = trainer.strategy
    with trainer.profiler.profile("save_checkpoint"):  # type: ignore[attr-defined]
        step = trainer.global_step
        io = CheckpointerIO(checkpointer, step=step, sharded=sharded, resumable=not weights_only)
        usual, strategy.checkpoint_io = strategy.checkpoint_io, io
        try:
            checkpoint = private.dump_checkpoint(trainer, weights_only=weights_only)
            strategy.save_checkpoint(checkpoint, path)
            if checkpointer is not None and not trainer.is_global_zero:
                io.save_checkpoint(checkpoint, path)
        finally:
            strategy.checkpoint_io = usual
