"""Every rank learns every rank's settings at start-up: a mismatch is an error and not a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.nodes import ranks_by

Facts = Mapping[str, Any]


def all_facts(
    facts: Facts,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    limit: WaitLimit | None = None,
) -> list[Facts]:
    """The JSON-able ``facts`` of every rank, in rank order. Collective.

    Args:
        limit: of waits for other ranks; None: the group's own timeout.
    """
    mine = json.dumps(facts, default=repr).encode()
    of_all = all_bytes(mine, group=group, device=device, limit=limit)
    return [json.loads(text.rstrip(b"\0")) for text in of_all]


def all_bytes(
    mine: bytes, *, group: dist.ProcessGroup, device: torch.device, limit: WaitLimit | None = None
) -> list[bytes]:
    """The bytes of every rank, in rank order, padded with zeros to the longest. Collective."""
    channel = Channel(group, name="facts", limit=limit)
    length = torch.tensor([len(mine)], device=device)
    channel.all_reduce(length, op=dist.ReduceOp.MAX).wait()
    padded = torch.zeros(int(length), dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = padded.new_empty(group.size() * int(length))
    channel.all_gather(received, padded).wait()
    return [row.numpy().tobytes() for row in received.cpu().view(group.size(), -1)]


def require_equal(facts: list[Facts]) -> None:
    """Raise if the ranks do not agree.

    Raises:
        ValueError: names every fact that differs and which ranks have which value.
    """
    if lines := differences(facts):
        raise ValueError(
            "All ranks must compress in the same way, but they differ in\n"
            + "\n".join(lines)
            + "\nGive every rank the same settings and the same version of the package."
        )


def differences(facts: Sequence[Facts]) -> list[str]:
    """A line for every fact that differs, with the values and which ranks have them."""
    lines = []
    for key in dict.fromkeys(key for of_rank in facts for key in of_rank):
        values = [repr(of_rank.get(key)) for of_rank in facts]
        groups = ranks_by(values)
        if len(groups) > 1:
            values_of_ranks = "; ".join(
                f"{values[ranks[0]]} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for ranks in groups
            )
            lines.append(f"  {key}: {values_of_ranks}")
    return lines
