"""Reports of a fit in processes that Lightning starts by spawn or fork, and ends."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_dist.frameworks.lightning.private import MultiProcessingLauncher
from lightning_dist.sync.arguments import Reports

_KEY = "lightning_dist"


class FitResults:
    """Report of a fit that is over. Its topology is without its groups."""

    def __init__(self, reports: Reports) -> None:
        self.topology = replace(reports.topology, intra_group=None, inter_group=None)
        self._stats, self._config = reports.comm_stats(), reports.comm_config()

    def comm_stats(self) -> Mapping[str, Any]:
        return self._stats

    def comm_config(self) -> dict[str, Any]:
        return self._config


class ResultsLauncher(MultiProcessingLauncher):
    """Sends the report of local rank 0 to the process that called ``trainer.fit``."""

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        if trainer.strategy.sync is not None:
            # As bytes: Lightning looks for tensors in all else, and changes it.
            extra[_KEY] = pickle.dumps(FitResults(trainer.strategy.sync))
        return extra

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        if _KEY in extra:
            trainer.strategy.ended = pickle.loads(extra.pop(_KEY))
        super().update_main_process_results(trainer, extra)
