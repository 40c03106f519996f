"""What the configuration of a run should say of its gradients."""

from __future__ import annotations

from typing import Any

from lightning_dist.reducer.network import Network
from lightning_dist.settings import Settings
from lightning_dist.versions import versions


def run_config(settings: Settings, network: Network | None) -> dict[str, Any]:
    """How gradients travel, between whom, and the versions: plain values, the same on all ranks.

    Args:
        network: None where it is not known yet; nothing is said of the ranks then.
    """
    return {
        "codec": repr(settings.codec),
        "codec_inside_host": repr(settings.intra),
        "error_feedback": settings.error_feedback,
        "min_compress_numel": settings.min_compress_numel,
        "start_step": settings.start_step,
        "commit": settings.commit,
        **({} if network is None else _between(network)),
        "versions": versions(),
    }


def _between(network: Network) -> dict[str, Any]:
    topology = network.topology
    return {
        "exchange": _exchange(network),
        "topology": topology.describe(),
        "hosts": len(topology.by_host()),
        "world_size": topology.world_size,
    }


def _exchange(network: Network) -> str:
    if network.intra is None:
        return "flat"
    return "leader" if network.intra.level.owners == 1 else "hierarchical"
