"""Residuals of compressed models in ``fabric.save`` and ``fabric.load``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lightning_dist.base.features import FABRIC
from lightning_dist.frameworks.strategies.arguments import CHECKPOINT_KEY
from lightning_dist.sync.report import CommReport

FABRIC.require()


class SavesResiduals(CommReport):
    """Mixin before a strategy of Fabric: checkpoints have the states of what compresses."""

    if TYPE_CHECKING:

        def _load_state(self, owner: Any, state: Any) -> None: ...

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        owners: Sequence[Any] = self._reports
        states = [owner.state_dict() for owner in owners]
        save = super().save_checkpoint  # type: ignore[misc]
        save(path, {**state, CHECKPOINT_KEY: states}, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        load = super().load_checkpoint  # type: ignore[misc]
        rest: dict[str, Any] = load(path, state, *args, **kwargs)
        if isinstance(state, dict):  # otherwise somebody looks into a file, or loads one module
            owners: Sequence[Any] = self._reports
            states = rest.pop(CHECKPOINT_KEY, [])[: len(owners)]
            for owner, own in zip_longest(owners, states):
                self._load_state(owner, own)  # None from a plain one: no residuals
        return rest
