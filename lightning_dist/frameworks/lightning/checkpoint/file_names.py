"""File names of callbacks that share a folder, before any file exists."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from typing_extensions import override

from lightning_dist.frameworks.lightning.checkpoint import private
from lightning_dist.frameworks.lightning.checkpoint.session import CheckpointSession


class CheckpointNames(ModelCheckpoint):
    """A ModelCheckpoint whose files appear, and disappear, later than it asks for.

    Others may keep theirs in its folder. What is being written has its name already, and so has
    what another callback is about to remove; what this one is about to remove has not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session: CheckpointSession | None = None
        self._next_last: str | None = None  # what a link of the file being saved will be called
        self._skipped_step: int | None = None

    @override
    def _save_last_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        if self._session is None:  # outside of a fit
            return super()._save_last_checkpoint(trainer, monitor_candidates)
        if self._skipped_step != trainer.global_step:
            saved_now = self._last_global_step_saved == trainer.global_step
            if self.save_last is True and saved_now and self._last_checkpoint_saved:
                self._link_last(trainer, self._last_path(trainer, monitor_candidates))
            else:
                super()._save_last_checkpoint(trainer, monitor_candidates)
        self._session.flush_removals()

    def _link_last(self, trainer: pl.Trainer, path: str) -> None:
        assert self._session is not None
        previous, self.last_model_path = self.last_model_path, path
        self._claim(trainer, path)
        self._session.link(self._last_checkpoint_saved, path)
        self._last_checkpoint_saved = path
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def _last_path(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> str:
        name = self.CHECKPOINT_NAME_LAST
        path, version = self.format_checkpoint_name(monitor_candidates, name), self.STARTING_VERSION
        while (
            self._enable_version_counter
            and self.file_exists(path, trainer)
            and path != self.last_model_path
        ):
            path = self.format_checkpoint_name(monitor_candidates, name, ver=version)
            version += 1
        return path

    @staticmethod
    @override
    def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        # Static, as in Lightning, whose versions call it on the object or on the class.
        known = callbacks_of(trainer) if isinstance(trainer, pl.Trainer) else []
        saved = (
            c for c in known if (private.newest_saved(c), c.last_model_path) == (filepath, linkpath)
        )
        callback = next(saved, None)
        if callback is None or callback._session is None:
            private.link_checkpoint(trainer, filepath, linkpath)
        else:
            callback._claim(trainer, linkpath)
            callback._session.link(filepath, linkpath, symbolic=True)

    @override
    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        assert self._session is not None
        self._session.remove(filepath)

    def _claim(self, trainer: pl.Trainer, path: str) -> None:
        """Write to ``path`` next; others that share the folder must not remove it after that."""
        for callback in callbacks_of(trainer):
            session = callback._session
            if session is not None and session.is_pending_deletion(path):
                session.keep(path)
                if callback is not self:
                    session.wait()

    @override
    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        sessions = [c._session for c in callbacks_of(trainer) if c._session is not None]
        pending = any(session.is_pending(filepath) for session in sessions)
        going = self._session is not None and self._session.is_pending_deletion(filepath)
        decision = trainer.is_global_zero and (pending or (not going and self._fs.exists(filepath)))
        return trainer.strategy.reduce_boolean_decision(decision, all=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        # This is within the file that is being saved, which will be called `last` too.
        state = super().state_dict()
        return state if self._next_last is None else {**state, "last_model_path": self._next_last}


def callbacks_of(trainer: pl.Trainer) -> list[CheckpointNames]:
    """All callbacks of ``trainer`` that save asynchronously."""
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, CheckpointNames)]
