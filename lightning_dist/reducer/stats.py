"""Statistics of a run: bytes, counted where they are sent, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dist.base.versions import versions
from lightning_dist.ranks import Topology
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.network import Network
from lightning_dist.settings.exchange import ExchangeSettings


@dataclass
class Count:
    """Bytes this rank sent, and what DDP itself would have sent for the same gradients."""

    raw: int = 0
    sent: Sent = field(default_factory=Sent)

    def add(self, raw: int, sent: Sent) -> None:
        self.raw += raw
        self.sent += sent

    def as_dict(self) -> dict[str, float]:
        wire = self.sent.total
        return {
            "raw_bytes": self.raw,
            "wire_bytes": wire,
            "intra_bytes": self.sent.intra,
            "inter_bytes": self.sent.inter,
            "ratio": self.raw / wire if wire else 1.0,
        }


class CommStats:
    """Totals, the last synchronised step, and both per codec."""

    def __init__(self) -> None:
        self.steps = 0
        self._total, self._last = Count(), Count()
        self._by_codec: dict[str, Count] = {}
        self._running: dict[str, Count] = {}

    def record(self, codec: str, raw: int, sent: Sent) -> None:
        self._running.setdefault(codec, Count()).add(raw, sent)

    def record_outside(self, codec: str, raw: int, sent: Sent) -> None:
        """Count in the totals alone what belongs to no step."""
        for count in (self._total, self._by_codec.setdefault(codec, Count())):
            count.add(raw, sent)

    def end_step(self) -> None:
        self.steps += 1
        self._last, running = Count(), self._running
        for codec, step in running.items():
            self._last.add(step.raw, step.sent)
            self.record_outside(codec, step.raw, step.sent)
        self._running = {}

    def drop_step(self) -> None:
        """Forget what a step that failed had recorded."""
        self._running = {}

    def as_mapping(self) -> Mapping[str, Any]:
        return {
            **self._total.as_dict(),
            "steps": self.steps,
            "last_step": self._last.as_dict(),
            "per_codec": {codec: count.as_dict() for codec, count in self._by_codec.items()},
        }


def run_config(settings: ExchangeSettings, network: Network | None) -> dict[str, Any]:
    """Codec, exchange, groups and versions of a run: plain values, the same on all ranks.

    Args:
        network: None where it is not known yet; nothing is said of the ranks then.
    """
    return {
        "codec": str(settings.inter),
        "codec_inside_node": str(settings.intra),
        "error_feedback": settings.error_feedback,
        "min_compress_numel": settings.min_compress_numel,
        "start_step": settings.start_step,
        "commit": settings.commit,
        "delay": settings.delay,
        **({} if network is None else {"exchange": _exchange(network)}),
        **({} if network is None else places(network.topology)),
        "versions": versions(),
    }


def places(topology: Topology) -> dict[str, Any]:
    """Nodes and ranks, as values of a configuration."""
    return {
        "topology": topology.describe(),
        "nodes": len(topology.by_node()),
        "world_size": topology.world_size,
    }


def _exchange(network: Network) -> str:
    if network.intra is None:
        return "flat"
    return "leader" if network.intra.level.owners == 1 else "hierarchical"
