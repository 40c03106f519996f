"""Topology, bytes and settings of what is sent, under the same names in every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning_dist.ranks import Topology

CONFIG_KEY = "lightning_dist"
"""Key of ``comm_config()`` in the configuration of a tracked run."""
_OF_ONE_STEP = ("raw_bytes", "wire_bytes", "intra_bytes", "inter_bytes")
_IN_TOTAL = ("raw_bytes", "wire_bytes")


class Reports(Protocol):
    """Reports of one model: a Sync, a Reducer, or the record of a training that has ended."""

    @property
    def topology(self) -> Topology: ...

    def comm_stats(self) -> Mapping[str, Any]: ...

    def comm_config(self) -> dict[str, Any]: ...


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
