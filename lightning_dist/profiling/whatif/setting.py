"""What is asked about: a codec, a form, hosts, and the links between and inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DDP = "ddp"
"""Stock DDP in the place of a codec."""

FLAT, SHARDED, LEADER = "flat", "sharded", "leader"
FORMS = (FLAT, SHARDED, LEADER)

PAYLOAD = 1448 / 1514
"""Of a link's rate, what TCP leaves to its payload with frames of 1,514 bytes."""

GLOO_AT_ONCE = 2
"""Collectives of a group that gloo has under way at once: it has so many threads. Others queue."""


@dataclass(frozen=True)
class Link:
    """One level.

    Args:
        rate: bytes of payload in a second, in one direction: of a host between hosts, of a rank
            inside one.
        latency: seconds of a round; None: not known, and rounds count nothing.
        overhead: seconds by which collectives follow one another at least, however small.
        cpu: seconds of a core that a collective takes.
    """

    rate: float
    latency: float | None = None
    overhead: float = 0.0
    cpu: float = 0.0

    @classmethod
    def of_gbps(cls, gbps: float, latency: float | None = None) -> Link:
        """A link of this rate, headers included."""
        return cls(gbps * 1e9 / 8 * PAYLOAD, latency)

    @property
    def gbps(self) -> float:
        """The rate, headers included."""
        return self.rate * 8e-9 / PAYLOAD


@dataclass(frozen=True)
class Setting:
    """How gradients are exchanged.

    Args:
        codec: its name, or :data:`DDP`.
        form: of :data:`FORMS`.
        counts: ranks of every host.
        link: between hosts; inside the host where there is only one.
        inside: inside a host; None: not known.
        at_once: collectives of a group that travel at once: of NCCL, which has one stream, 1.
    """

    codec: str
    form: str
    counts: Sequence[int]
    link: Link
    inside: Link | None = None
    at_once: int = GLOO_AT_ONCE

    @property
    def hosts(self) -> int:
        """How many."""
        return len(self.counts)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return sum(self.counts)

    @property
    def peers(self) -> Sequence[int]:
        """Ranks behind each link: of every host, and on one host each rank has its own."""
        return self.counts if self.hosts > 1 else (1,) * self.world_size

    @property
    def owners(self) -> int:
        """Ranks of a host that go on between hosts."""
        return 1 if self.form == LEADER else max(self.counts)


def impossible(setting: Setting) -> str:
    """Why a setting cannot be, or cannot be told about; empty if it can."""
    if setting.form == FLAT:
        return ""
    if setting.codec == DDP:
        return "DDP itself knows no hosts"
    if max(setting.counts) == 1:
        return "one rank per host: there is nothing to add up inside a host"
    if setting.hosts == 1:
        return "one host: nothing is left to do between hosts"
    if setting.form == SHARDED and len(set(setting.counts)) > 1:
        return "the hosts hold different numbers of ranks, which takes the leader form"
    if setting.inside is None:
        return (
            "no exchange inside a host was measured; give the rate of a rank inside with --inside"
        )
    return ""
