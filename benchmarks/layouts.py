"""How many ranks each host has: `2x2` is 2 hosts with 2 ranks, `3+1` one with 3 and one with 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RanksPerHost = int | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """The number of ranks of every host; ranks are numbered host by host, as torchrun does."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"every host needs at least one rank, got {list(self.counts)}")

    @classmethod
    def of(cls, ranks_per_host: RanksPerHost, *, hosts: int) -> Layout:
        """From one number for all hosts or one for each."""
        if isinstance(ranks_per_host, int):
            return cls((ranks_per_host,) * hosts)
        if len(ranks_per_host) != hosts:
            raise ValueError(
                f"ranks_per_host needs one number for each of {hosts} hosts, "
                f"got {list(ranks_per_host)}"
            )
        return cls(tuple(ranks_per_host))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From `HOSTSxRANKS` or `RANKS+RANKS+...`."""
        if match := re.fullmatch(r"(\d+)x(\d+)", text):
            return cls((int(match[2]),) * int(match[1]))
        if re.fullmatch(r"\d+(\+\d+)*", text):
            return cls(tuple(int(count) for count in text.split("+")))
        raise ValueError(f"a layout is like 2x2 (hosts x ranks) or 3+1 (ranks of each), got {text}")

    @property
    def hosts(self) -> int:
        return len(self.counts)

    @property
    def world_size(self) -> int:
        return sum(self.counts)

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1

    @property
    def ranks_per_host(self) -> int | list[int]:
        """One number where all hosts have the same, else one for each."""
        return self.counts[0] if self.even else list(self.counts)

    @property
    def name(self) -> str:
        if self.even:
            return f"{self.hosts}x{self.counts[0]}"
        return "+".join(map(str, self.counts))

    @property
    def title(self) -> str:
        """For the head of a table."""
        ranks = self.counts[0] if self.even else " and ".join(map(str, self.counts))
        return f"{self.hosts} hosts x {ranks} ranks"

    def place(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number there."""
        local_rank = rank
        for host, count in enumerate(self.counts):
            if local_rank < count:
                return host, local_rank
            local_rank -= count
        raise ValueError(f"rank must be below {self.world_size}, got {rank}")
