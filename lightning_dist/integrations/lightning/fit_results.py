"""Bytes and settings of a fit in processes that Lightning starts by spawn or fork, and ends."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from lightning_dist.integrations.lightning.private import MultiProcessingLauncher
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.topology import Topology

_KEY = "lightning_dist"


@dataclass(frozen=True)
class FitResults:
    """What a strategy tells after a fit. Can be pickled: the topology is without its groups."""

    topology: Topology
    comm_stats: Mapping[str, Any]
    comm_config: dict[str, Any]

    @classmethod
    def of(cls, reducer: Reducer) -> FitResults:
        topology = replace(reducer.network.topology, intra_group=None, inter_group=None)
        return cls(topology, reducer.comm_stats(), reducer.comm_config())


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
            trainer.strategy._fit_results = pickle.loads(extra.pop(_KEY))
        super().update_main_process_results(trainer, extra)
