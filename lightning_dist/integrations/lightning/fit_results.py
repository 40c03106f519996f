"""Bytes and settings of a fit in processes that Lightning starts by spawn or fork, and ends."""

from __future__ import annotations

import pickle
from typing import Any

from typing_extensions import override

from lightning_dist.integrations.comm_report import FitResults
from lightning_dist.integrations.lightning.private import MultiProcessingLauncher

_KEY = "lightning_dist"


class ResultsLauncher(MultiProcessingLauncher):
    """Brings them from local rank 0 to the process that called ``trainer.fit``."""

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        reducer = trainer.strategy._reducer
        if reducer is not None:  # as bytes: Lightning looks for tensors in all else, and changes it
            extra[_KEY] = pickle.dumps(FitResults.of(reducer))
        return extra

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        if _KEY in extra:
            trainer.strategy._ended = pickle.loads(extra.pop(_KEY))
        super().update_main_process_results(trainer, extra)
