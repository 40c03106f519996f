"""Topology, bytes and settings of compressed models, in every framework under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning_dist.ranks import Topology
    from lightning_dist.reducer.reducer import Reducer

_OF_ONE_STEP = ("raw_bytes", "wire_bytes", "intra_bytes", "inter_bytes")
_IN_TOTAL = ("raw_bytes", "wire_bytes")


class Reports(Protocol):
    """Compression of a model: a Reducer, or the collectives of a sharded model."""

    @property
    def topology(self) -> Topology: ...

    def comm_stats(self) -> Mapping[str, Any]: ...

    def comm_config(self) -> dict[str, Any]: ...


class CommReport:
    """Mixin for what compresses models; it has ``reducers``, one for each."""

    if TYPE_CHECKING:

        @property
        def reducers(self) -> Sequence[Reducer]: ...

    @property
    def _reports(self) -> Sequence[Reports]:
        """Compressors of the models; the ``reducers``, unless there are others."""
        return self.reducers

    @property
    def topology(self) -> Topology | None:
        """Nodes and groups of the ranks; None before the first model."""
        return self._reports[0].topology if self._reports else None

    def comm_stats(self) -> Any:
        """Bytes this rank sent, for each model in the order in which they were given."""
        return [each.comm_stats() for each in self._reports]

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions; empty before the first model.

        A ``WandbLogger`` gets it by itself, as ``lightning_dist`` in the configuration of the run.
        """
        return self._reports[0].comm_config() if self._reports else {}


def comm_metrics(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Bytes that this rank sent: in the last step, and in total. For loggers and trackers.

    Args:
        stats: ``comm_stats()`` of every compressed model; their bytes are added up.

    Returns:
        ``comm/raw_bytes``, ``comm/wire_bytes``, ``comm/compression_ratio``, ``comm/intra_bytes``,
        ``comm/inter_bytes``, ``comm/total_raw_bytes``, ``comm/total_wire_bytes``; nothing before
        the first step.
    """
    begun = [each for each in stats if each["steps"]]
    if not begun:
        return {}
    last = {key: sum(each["last_step"][key] for each in begun) for key in _OF_ONE_STEP}
    ratio = last["raw_bytes"] / last["wire_bytes"] if last["wire_bytes"] else 1.0
    metrics = {f"comm/{key}": value for key, value in last.items()} | {
        "comm/compression_ratio": ratio
    }
    return metrics | {f"comm/total_{key}": sum(each[key] for each in begun) for key in _IN_TOTAL}
