"""The checkpoint that a training goes on from: the same one on all ranks, verified by rank 0, and
of the same model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_dist.checkpoint.disk.format import CheckpointError, no_checkpoint
from lightning_dist.checkpoint.disk.scan import verify
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.private import loads_by_itself
from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.find_last import (
    LastCheckpoint,
    without_manifest,
)
from lightning_dist.frameworks.lightning.checkpoint.io import AsyncTorchCheckpointIO, is_http
from lightning_dist.ranks.agreement import describe_error, error_from


class ResumeCheckpointIO(AsyncTorchCheckpointIO):
    """Loads what :class:`~lightning_dist.AsyncCheckpoint` writes; saves at once, when asked to.

    ``trainer.save_checkpoint`` of a user goes through here: its file is there when it returns.

    Args:
        verify: as of AsyncCheckpoint.
        trainer: whose ranks load the same checkpoint, the one that rank 0 found and verified.
    """

    def __init__(self, *, verify: Any, trainer: pl.Trainer) -> None:
        super().__init__(snapshot="sync", writer="thread", verify=verify)
        self.searches: list[LastCheckpoint] = []
        """Of the callbacks, for what ``ckpt_path="last"`` was found to be."""
        self.verified: str | None = None
        """Path of a checkpoint that need not be verified once more."""
        self.weights_only: bool | None = None
        """Policy of loads that name none: those of Lightning 2.5."""
        self._trainer = trainer
        self._alone = False  # many jobs may save into one folder by hand, each its own files

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Load the same checkpoint on all ranks. Collective.

        Raises:
            FileNotFoundError: on all ranks, if nothing is there.
            CheckpointError: on all ranks, if it is damaged, or a newer version of this package
                wrote it.
            ValueError: it is of another model.
        """
        agreed = self.agree(os.fspath(path))
        if weights_only is None:
            weights_only = self.weights_only
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            if is_http(agreed):
                checkpoint = super().load_checkpoint(agreed, map_location, weights_only, **kwargs)
            else:
                checkpoint = self._load(
                    agreed, check=False, map_location=map_location, weights_only=weights_only
                )
        except Exception as error:
            problem = error
        if not self._trainer.strategy.reduce_boolean_decision(problem is None, all=True):
            raise problem or CheckpointError(
                f"Another rank could not load {agreed}; put it where all ranks see it"
            )
        module = self._trainer.lightning_module
        if module.strict_loading and not is_overridden("on_load_checkpoint", module):
            require_same_model(checkpoint.get("state_dict", {}), module, agreed)
        return checkpoint

    def agree(self, path: str) -> str:
        """The checkpoint that rank 0 has chosen and verified; raises its error on all ranks."""
        chosen, problem = path, None
        if self._trainer.is_global_zero and not is_http(path):
            try:
                chosen = self._choose(path)
            except (CheckpointError, OSError, ValueError) as error:
                problem = error
        described = None if problem is None else describe_error(problem)
        chosen, described = self._trainer.strategy.broadcast((chosen, described))
        if described is not None:
            raise problem or error_from(described)
        if chosen != path:
            private.set_loaded_path(self._trainer, chosen)
        return str(chosen)

    def _choose(self, path: str) -> str:
        for search in self.searches:
            if search.found == path:
                return search.choose() or path
        path = without_manifest(path)
        storage, inside = storage_of(path)
        if not storage.exists(inside):
            raise no_checkpoint(path)
        if self.settings.verify != "never" and path != self.verified:
            verify(path)
        return path


def resume_io(trainer: pl.Trainer, *, verify: Any) -> ResumeCheckpointIO:
    """The IO by which ``trainer`` loads; put in the place of its own, if it is not there yet."""
    io = trainer.strategy.checkpoint_io
    if not isinstance(io, ResumeCheckpointIO):
        io = ResumeCheckpointIO(verify=verify, trainer=trainer)
        trainer.strategy.checkpoint_io = io
    return io


def require_same_model(saved: Mapping[str, Tensor], model: nn.Module, path: str) -> None:
    """Raise ValueError unless names and shapes agree.

    A module that has a say in what it loads is not asked in advance: no error then.
    """
    if _has_a_say(model):
        return
    state = model.state_dict()
    differences = [
        *_listed("only in the checkpoint", sorted(saved.keys() - state.keys())),
        *_listed("only in the model", sorted(state.keys() - saved.keys())),
        *_listed("of another shape", _reshaped(saved, state)),
    ]
    if differences:
        raise ValueError(
            f"{path} is a checkpoint of another model; parameters and buffers "
            f"{'; '.join(differences)}. Give another folder, or the path of a checkpoint of this "
            "model, or set strict_loading=False on the module"
        )


def _has_a_say(model: nn.Module) -> bool:
    """Whether parameters get their shape, or names their meaning, while a state is loaded."""
    if any(is_lazy(each) for each in chain(model.parameters(), model.buffers())):
        return True
    return any(map(loads_by_itself, model.modules()))


def _listed(what: str, names: list[str]) -> list[str]:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what}: {shown}"] if names else []


def _reshaped(saved: Mapping[str, Tensor], model: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {tuple(saved[name].shape)} for {tuple(value.shape)}"
        for name, value in model.items()
        if name in saved
        and isinstance(value, Tensor)
        and isinstance(saved[name], Tensor)
        and saved[name].shape != value.shape
    ]
