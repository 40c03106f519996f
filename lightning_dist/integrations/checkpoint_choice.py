"""Which checkpoint a training goes on from, and whether it belongs to the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.disk.storage import storage_of
from lightning_dist.checkpoint.disk.verify import Description, describe, verify
from lightning_dist.integrations.checkpoint_io import AsyncTorchCheckpointIO


def newest_checkpoint(folder: str, others: Iterable[str]) -> str | None:
    """The newest whole checkpoint of ours in ``folder``, or one of ``others`` if that is newer.

    Args:
        others: paths of checkpoints that somebody else may have written, with torch.save.
    """
    ours = newest_valid(folder)
    best, time_ns = (None, 0) if ours is None else (ours.path, _created_ns(ours))
    for path in sorted(others):
        try:
            found = describe(path)
            if found.origin is None and _modified_ns(path) > time_ns:
                best, time_ns = verify(path).path, _modified_ns(path)
            elif ours is not None and found.origin == ours.origin and best == ours.path:
                best = path  # the same file under the name that Lightning expects
        except (CheckpointError, OSError) as error:
            rank_zero_warn(f"passing over a damaged checkpoint: {error}")
    return best


def _created_ns(description: Description) -> int:
    assert description.origin is not None
    return description.origin.created_ns


def _modified_ns(path: str) -> int:
    storage, inside = storage_of(path)
    return storage.modified_ns(inside)


class ResumeCheckpointIO(AsyncTorchCheckpointIO):
    """Loads what :class:`~lightning_dist.AsyncCheckpoint` writes; saves at once, when asked to.

    ``trainer.save_checkpoint`` of a user goes through here: its file is there when it returns.

    Args:
        verify: as of AsyncCheckpoint.
        trainer: whose ranks load the same checkpoint, the one that rank 0 found.
    """

    def __init__(self, *, verify: Any, trainer: pl.Trainer) -> None:
        super().__init__(snapshot="sync", writer="thread", verify=verify)
        self._trainer = trainer
        self._alone = False  # many jobs may save into one folder by hand, each its own files

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        agreed = self._trainer.strategy.broadcast(path)
        checkpoint = super().load_checkpoint(agreed, *args, **kwargs)
        self._say_what_changed(str(agreed))
        module = self._trainer.lightning_module
        if module.strict_loading and not is_overridden("on_load_checkpoint", module):
            require_same_model(checkpoint.get("state_dict", {}), module.state_dict(), agreed)
        return checkpoint

    def _say_what_changed(self, path: str) -> None:
        if "://" in path and path.startswith("http"):
            return
        origin = describe(path).origin
        if origin is not None and origin.ranks != self._trainer.world_size:
            rank_zero_info(
                f"{path} was saved by {origin.ranks} ranks and is loaded by "
                f"{self._trainer.world_size}"
            )


def require_same_model(saved: Mapping[str, Tensor], model: Mapping[str, Tensor], path: str) -> None:
    """Raise ValueError unless names and shapes agree; before any tensor of the model changes."""
    differences = [
        *_listed("only in the checkpoint", sorted(saved.keys() - model.keys())),
        *_listed("only in the model", sorted(model.keys() - saved.keys())),
        *_listed("of another shape", _reshaped(saved, model)),
    ]
    if differences:
        raise ValueError(
            f"{path} is a checkpoint of another model; parameters and buffers "
            f"{'; '.join(differences)}. Give the path of a checkpoint of this model, or set "
            "strict_loading=False on the module"
        )


def _listed(what: str, names: list[str]) -> list[str]:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what}: {shown}"] if names else []


def _reshaped(saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} {tuple(saved[name].shape)} for {tuple(value.shape)}"
        for name, value in model.items()
        if name in saved
        and isinstance(value, Tensor)
        and isinstance(saved[name], Tensor)
        and saved[name].shape != value.shape
    ]
