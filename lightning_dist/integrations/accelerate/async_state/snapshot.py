"""What accelerate saves, in files that wait in memory for the writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.integrations.accelerate import private, residuals
from lightning_dist.integrations.accelerate.async_state.files import (
    names_in,
    problem_on_save,
    share_of,
)
from lightning_dist.integrations.accelerate.async_state.scratch import Scratch, base_for

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Snapshot:
    """This rank's part of a checkpoint."""

    scratch: Scratch
    files: list[tuple[str, str]]
    """``(name in the checkpoint, path in the scratch folder)``."""


def take(
    accelerator: Accelerator,
    *,
    ranks: Ranks,
    staging_dir: str | None,
    restricted: bool,
    arguments: Mapping[str, Any],
) -> Snapshot:
    """Have accelerate write its files into a scratch folder. Collective.

    Args:
        staging_dir: where to make the scratch folder; None: in memory if there is room.
        restricted: whether ``weights_only=True`` has to be able to read it.
        arguments: of ``accelerator.save_state``.

    Raises:
        ValueError: on all ranks, if it is not; nothing is left.
        CheckpointError: on all ranks, if one of them could not; nothing is left.
    """
    owed = [reducer.state_dict() for reducer in residuals.reducers(accelerator)]  # collective
    names: list[str] = []
    error: Exception | None = None
    with ExitStack() as undo:
        try:
            scratch = Scratch(base_for(_nbytes(accelerator), staging_dir))
            undo.callback(scratch.remove)
            _write_accelerates_files(accelerator, scratch.files, arguments)
            _write_own_objects(accelerator, scratch.files)
            residuals.write(owed, scratch.files)
            names = names_in(scratch.files)
            error = problem_on_save(scratch.files) if restricted else None
        except Exception as raised:
            error = CheckpointError(
                f"rank {ranks.rank} could not write its files: {raised!r}; if it was for want of "
                "room, staging_dir= chooses where accelerate's files wait for the writer"
            )
            error.__cause__ = raised
        held = [facts["names"] for facts in ranks.all({"names": names}, error=error)]
        undo.pop_all()
    return Snapshot(scratch, share_of(ranks.rank, held, folder=scratch.files))


def _write_accelerates_files(
    accelerator: Accelerator, folder: str, arguments: Mapping[str, Any]
) -> None:
    project = accelerator.project_configuration
    before = project.automatic_checkpoint_naming, project.iteration
    project.automatic_checkpoint_naming = False  # it would choose the folder
    try:
        with residuals.in_our_hands(accelerator):
            accelerator.save_state(folder, **arguments)
    finally:
        project.automatic_checkpoint_naming, project.iteration = before


def _write_own_objects(accelerator: Accelerator, folder: str) -> None:
    """Registered objects of the ranks for which accelerate does not do it."""
    if accelerator.num_processes == 1:
        return
    for index, registered in enumerate(private.registered_objects(accelerator)):
        state = registered.state_dict()  # on all ranks: it may be collective
        if not accelerator.is_main_process:
            torch.save(state, os.path.join(folder, f"custom_checkpoint_{index}.pkl"))


def _nbytes(accelerator: Accelerator) -> int:
    """About as much as this rank will write."""
    if not accelerator.is_main_process:
        return 0
    tensors = [
        t for m in private.prepared_models(accelerator) for t in (*m.parameters(), *m.buffers())
    ]
    for optimizer in private.prepared_optimizers(accelerator):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)
