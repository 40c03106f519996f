"""Where a job saves to and loads from: decided on rank 0, kept from other trainers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.folder_owner import is_owned
from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.integrations.accelerate.async_state import folders
from lightning_dist.integrations.accelerate.async_state.scratch import sweep

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Destination:
    """Where to save."""

    target: str
    number: int
    superseded: list[str]
    """Checkpoints that are over ``total_limit`` once this one is there."""


@dataclass(frozen=True)
class Source:
    """What to load."""

    path: str
    ranks: int | None
    """How many saved it; None if accelerate itself wrote it."""


class Places:
    """Folders of checkpoints.

    Args:
        accelerator: which may name checkpoints by itself.
        checkpointer: writes to the folders.
        staging_dir: where scratch folders of killed trainers may be; None: the usual places.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        checkpointer: Checkpointer,
        ranks: Ranks,
        staging_dir: str | None,
    ) -> None:
        self._accelerator, self._checkpointer, self._ranks = accelerator, checkpointer, ranks
        self._staging_dir = staging_dir
        self._owned: set[str] = set()  # by this rank
        self._opened: set[str] = set()  # by all ranks
        sweep(staging_dir)

    def to_save(self, wanted: str | None, *, pending: Iterable[str]) -> Destination:
        """Choose a folder, and open it on all ranks. Collective.

        Args:
            wanted: the folder; None for accelerate's automatic naming.
            pending: where saves that are under way will be.

        Raises:
            ValueError: another trainer writes there, something else is there, not all ranks see it,
                or none is given and none is known.
        """
        chosen = self._ranks.on_first(
            lambda: asdict(self._next(pending) if wanted is None else self._given(wanted))
        )
        destination = Destination(**chosen)
        self._open(os.path.dirname(destination.target))
        return destination

    def to_load(self, wanted: str | None, *, check: bool) -> Source:
        """Choose a checkpoint. Collective.

        Args:
            wanted: the folder; None for the newest complete one.
            check: compare it with its checksums first.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: there are only damaged ones, or the given one is.
            ValueError: no folder is given and none is known, or it holds something else.
        """
        return Source(**self._ranks.on_first(lambda: asdict(self._source(wanted, check=check))))

    def _given(self, wanted: str) -> Destination:
        target = folders.local(wanted)
        self._own(os.path.dirname(target))
        folders.require_ours(target)
        return Destination(target, self._accelerator.project_configuration.iteration, [])

    def _next(self, pending: Iterable[str]) -> Destination:
        project = self._accelerator.project_configuration
        folder = self._automatic("save_state needs output_dir=")
        self._own(folder)  # what a killed trainer left has got its name, or is gone
        under_way = {folders.number_of(path) for path in pending if os.path.dirname(path) == folder}
        taken = folders.numbers(folder) | (under_way - {None})
        number = max({project.iteration - 1, *taken}) + 1
        superseded: list[int] = []
        if project.total_limit is not None:
            own = folders.own_numbers(folder) | (under_way - {None})
            superseded = sorted({*own, number})[: -max(project.total_limit, 1)]
        return Destination(
            folders.numbered(folder, number),
            number,
            [folders.numbered(folder, each) for each in superseded],
        )

    def _source(self, wanted: str | None, *, check: bool) -> Source:
        if wanted is not None:
            path = folders.local(wanted)
            found = folders.given(path, check=check)
        else:
            folder = self._automatic("load_state needs input_dir=")
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"there is no checkpoint: {folder} does not exist")
            self._own(folder)  # a writer of a dead trainer may have one to finish
            found = folders.newest(folder, check=check)
            path = found.path
        return Source(path, found.origin.ranks if found and found.origin else None)

    def _automatic(self, needed: str) -> str:
        """Where accelerate's automatic naming puts checkpoints."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ValueError(
                f"{needed}, or an Accelerator with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return os.path.join(folders.local(project.project_dir), "checkpoints")

    def _own(self, folder: str) -> None:
        """Keep other trainers from ``folder``; waits for writers of dead ones."""
        self._checkpointer.open(folder)
        if folder not in self._owned:
            self._owned.add(folder)
            sweep(self._staging_dir, released=folder)

    def _open(self, folder: str) -> None:
        """Let all ranks write to what rank 0 owns."""
        if folder in self._opened:
            return
        error: Exception | None = None
        try:
            if not is_owned(folder):
                raise ValueError(
                    f"rank {self._ranks.rank} does not see rank 0's {folder}; checkpoints must be "
                    "in a folder that all ranks share"
                )
            self._own(folder)
        except (ValueError, OSError) as raised:
            error = raised
        self._ranks.all({}, error=error)
        self._opened.add(folder)
