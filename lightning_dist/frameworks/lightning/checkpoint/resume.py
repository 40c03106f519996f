"""Checkpoints that a trainer resumes from: found, verified, read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_dist.checkpoint.disk.folder_owner import Lock, is_owned, is_settled, own
from lightning_dist.checkpoint.disk.format import NAME, CheckpointError, no_checkpoint
from lightning_dist.checkpoint.disk.scan import SUFFIX, Description, describe, newest_valid, verify
from lightning_dist.checkpoint.disk.storage import LocalStorage, storage_of
from lightning_dist.checkpoint.private import loads_by_itself
from lightning_dist.checkpoint.saves import cannot_open
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.io import AsyncTorchCheckpointIO, is_http
from lightning_dist.ranks.agreement import describe_error, error_from

_PATIENCE = 60.0
"""Seconds that other ranks wait for rank 0 to own a folder."""


@dataclass
class LastCheckpoint:
    """Finds the last checkpoint in the folder of one callback.

    Lightning asks on every rank before there is a process group, so it is done in three steps:
    each rank looks at headers; the set-up compares what the ranks found; when it is to be loaded,
    rank 0 chooses again, with everything read.

    Args:
        check: whether to read everything.
        lock: whether the folder has a lock; otherwise nothing is cleaned up.
    """

    check: bool
    lock: bool = True
    found: str | None = None
    """The path that was returned to Lightning."""
    _folder: str = ""
    _suffix: str = SUFFIX
    _list_others: Callable[[], Iterable[str]] = tuple
    _problem: Exception | None = None
    _lock: Lock | None = None

    def find(
        self,
        trainer: pl.Trainer,
        folder: str,
        list_others: Callable[[], Iterable[str]],
        *,
        suffix: str = SUFFIX,
    ) -> str | None:
        """The newest by its headers; a failure of one of several ranks is raised by :meth:`agree`.

        Args:
            list_others: see :func:`newest_checkpoint`; asked when the folder is at rest.
            suffix: of the names of checkpoints.
        """
        self.forget()
        self._folder, self._list_others, self._suffix = folder, list_others, suffix
        try:
            self._settle(trainer)
            newest = newest_checkpoint(folder, list_others(), check=False, suffix=suffix)
            self.found = None if newest is None else _for_lightning(newest)
        except (CheckpointError, ValueError, OSError) as error:
            self.release()
            if trainer.world_size == 1:
                raise
            self._problem = error
        return self.found

    def _settle(self, trainer: pl.Trainer) -> None:
        """Wait for the writer of a dead trainer, and remove what it left half done."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run  # type: ignore[attr-defined]
        storage, inside = storage_of(self._folder)
        if not fitting or not self.lock or not isinstance(storage, LocalStorage):
            return
        if not is_owned(self._folder) and not storage.leftovers(inside):
            return  # its last trainer has ended in good order
        if trainer.is_global_zero:
            try:
                self._lock = own(self._folder)
            except (ValueError, CheckpointError, OSError) as error:
                raise ValueError(cannot_open(self._folder, error)) from error
            return
        deadline = time.monotonic() + _PATIENCE
        while not is_settled(self._folder) and time.monotonic() < deadline:
            time.sleep(0.05)

    def agree(self, trainer: pl.Trainer) -> None:
        """Compare what the ranks found. Collective.

        Raises:
            ValueError: on all ranks, if only some found one, or rank 0 cannot own the folder.
            CheckpointError: on all ranks, if none of the checkpoints is whole.
        """
        strategy, problem = trainer.strategy, self._problem
        lost = isinstance(problem, CheckpointError)
        first, lost = strategy.broadcast((str(problem) if problem else "", lost))
        if first:
            raise CheckpointError(first) if lost else ValueError(first)
        found = self.found is not None
        some = strategy.reduce_boolean_decision(found, all=False)
        if some and not strategy.reduce_boolean_decision(found, all=True):
            raise ValueError(
                f"ckpt_path='last' found a checkpoint in {self._folder} on some ranks, and none on "
                "others; put the folder where all ranks see it, or give the path of a file that "
                f"exists on every node{f' ({problem})' if problem else ''}"
            )

    def choose(self) -> str | None:
        """The checkpoint to load; on rank 0, for all.

        Raises:
            CheckpointError: none of them is whole.
        """
        others = self._list_others()
        return newest_checkpoint(self._folder, others, check=self.check, suffix=self._suffix)

    def release(self) -> None:
        """Release the folder, unless this process owns it otherwise too."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def forget(self) -> None:
        """The fit has ended, or never began."""
        self.release()
        self.found = self._problem = None


def newest_checkpoint(
    folder: str, others: Iterable[str], *, check: bool = True, suffix: str = SUFFIX
) -> str | None:
    """The newest whole checkpoint of ours in ``folder``, or one of ``others`` if that is newer.

    Args:
        others: paths of checkpoints that somebody else may have written, with torch.save.
        check: read everything; otherwise headers have to do.
        suffix: of the names of checkpoints.

    Raises:
        CheckpointError: there are some of ours, and none is whole.
    """
    ours = newest_valid(folder, check=check, suffix=suffix)
    best, time_ns = (None, 0) if ours is None else (ours.path, _created_ns(ours))
    for path in sorted(others):
        try:
            found = describe(path)
            is_newer = found.origin is None and _modified_ns(path) > time_ns
            if not is_newer and (ours is None or found.origin != ours.origin or best != ours.path):
                continue
            if check and not (best and _is_same_file(best, path)):
                verify(path)
            # or else it is the same checkpoint under the name that Lightning expects
            best, time_ns = path, _modified_ns(path) if is_newer else time_ns
        except (CheckpointError, OSError) as error:
            rank_zero.warn(f"Skipping a damaged checkpoint: {error}")
    return best


def list_in(folder: str, paths: Iterable[str]) -> list[str]:
    """``paths`` of files in ``folder``, which filesystems name without their protocol."""
    storage, _ = storage_of(folder)
    if isinstance(storage, LocalStorage):
        return list(paths)
    return [f"{folder.rstrip('/')}/{path.rsplit('/', 1)[-1]}" for path in paths]


def without_manifest(path: str) -> str:
    """The folder of shards, if ``path`` is that of its manifest."""
    return path.removesuffix(f"/{NAME}")


def _for_lightning(path: str) -> str:
    """Lightning asks for the time of a file, and folders of object stores have none."""
    storage, inside = storage_of(path)
    if isinstance(storage, LocalStorage) or not storage.is_folder(inside):
        return path
    return f"{path}/{NAME}"


def _is_same_file(one: str, other: str) -> bool:
    """Under two names; never on object stores."""
    (storage, path), (_, other_path) = storage_of(one), storage_of(other)
    if not isinstance(storage, LocalStorage):
        return False
    return os.path.isfile(path) and os.path.samefile(path, other_path)


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
        trainer: whose ranks load the same checkpoint, the one that rank 0 found and verified.
    """

    def __init__(self, *, verify: Any, trainer: pl.Trainer) -> None:
        super().__init__(snapshot="sync", writer="thread", verify=verify)
        self.searches: list[LastCheckpoint] = []
        """Searches of the callbacks for what ``ckpt_path="last"`` is."""
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
    if any(is_lazy(parameter) for parameter in chain(model.parameters(), model.buffers())):
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
