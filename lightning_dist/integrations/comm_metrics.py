"""The ``comm/*`` metrics of loggers and trackers, in every framework under the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_OF_ONE_STEP = ("raw_bytes", "wire_bytes", "intra_bytes", "inter_bytes")
_IN_TOTAL = ("raw_bytes", "wire_bytes")


def comm_metrics(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Bytes that this rank sent: in the last step, and in total.

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
