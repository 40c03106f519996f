"""Which ranks share a host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


def this_host() -> str:
    """Name of the host this process runs on.

    ``LIGHTNING_DIST_HOSTNAME`` replaces it where several hosts report one name (containers,
    network namespaces).
    """
    return os.environ.get("LIGHTNING_DIST_HOSTNAME") or socket.gethostname()


@dataclass(frozen=True)
class Topology:
    """Host of every rank of a process group, as seen from ``rank``."""

    hosts: tuple[str, ...]  # index: rank
    rank: int

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def same_host(self, peer: int) -> bool:
        return self.hosts[peer] == self.hosts[self.rank]

    @property
    def remote_peers(self) -> int:
        """Number of ranks on other hosts."""
        return sum(not self.same_host(peer) for peer in range(self.world_size))

    @property
    def next_is_remote(self) -> bool:
        """Whether the ring neighbour ``rank + 1`` is on another host."""
        return not self.same_host((self.rank + 1) % self.world_size)

    def describe(self) -> str:
        """``2 hosts x 4 ranks``, or the counts where they differ."""
        counts = _counts(self.hosts)
        hosts = f"{len(counts)} host" + "s" * (len(counts) != 1)
        if len(set(counts)) == 1:
            return f"{hosts} x {counts[0]} rank" + "s" * (counts[0] != 1)
        return f"{hosts} with {', '.join(map(str, counts))} ranks"


def _counts(hosts: Sequence[str]) -> list[int]:
    return [hosts.count(host) for host in dict.fromkeys(hosts)]
