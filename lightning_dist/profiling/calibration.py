"""How fast the links are while nothing else is on them: what a profile compares its rates with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_dist.profiling.analysis.bursts import measure_burst
from lightning_dist.profiling.bandwidth import measure, pairs
from lightning_dist.profiling.capture.events import BurstRecord, LinkRecord
from lightning_dist.profiling.peer import end_group

_PROBE_BYTES = 2**18
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**22
"""Of the collective: much more than what a shaper or a switch lets through at once."""
_MOST_BYTES_OF_GPUS = 2**26
"""Whose links need more to be fast."""
_SECONDS = 0.1
"""Of a collective: what a fast link does in it."""
_PAIRS_SECONDS = 2.0
"""Of all pairs. If they would take longer with the fewest bytes, they are left out."""
_MOST_HOSTS = 8
_BURST = 16


def measure_links(
    group: dist.ProcessGroup,
    *,
    hosts: Sequence[str],
    name: str,
    device: torch.device | str = "cpu",
) -> list[LinkRecord | BurstRecord]:
    """A collective of all ranks, small ones, and each pair of hosts in turn. Collective.

    Takes about a second; on a link of 50 Mbit/s, two, and where there are pairs two more.

    Args:
        group: of all ranks, used for nothing else meanwhile.
        hosts: of every rank.
        name: of the group in the records.
        device: of the tensors. On an accelerator pairs are left out: each would open connections
            of its own.
    """
    if group.size() < 2:
        return []
    probe = measure(group, "all_reduce", _PROBE_BYTES, 1, device)
    rate = probe.sent / probe.median
    is_cpu = torch.device(device).type == "cpu"
    most = _MOST_BYTES if is_cpu else _MOST_BYTES_OF_GPUS
    nbytes = round(min(max(rate * _SECONDS, _LEAST_BYTES), most))
    whole = measure(group, "all_reduce", nbytes, 3, device)
    found: list[LinkRecord | BurstRecord] = [
        LinkRecord(name, sent=whole.sent, seconds=whole.median),
        *(measure_burst(group, name=name, count=count, device=device) for count in (1, _BURST)),
    ]
    first_of = list({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    leaders = sorted(first_of)
    if not is_cpu or not 2 <= len(leaders) <= _MOST_HOSTS:
        return found
    # As many as the collective where there is time: with fewer the burst of a shaper, 1.25 MB at
    # 1 Gbit/s, was half spent by the use that warms up, and a link seemed up to 2.4 times as fast.
    uses = 2 * len(leaders) * (len(leaders) - 1)
    nbytes = min(nbytes, round(_PAIRS_SECONDS / uses * whole.sent / whole.median))
    if nbytes < _LEAST_BYTES:
        return found
    of_leaders = dist.new_group(leaders, backend="gloo")
    rank = dist.get_rank()
    if rank in leaders:
        seconds = pairs(of_leaders, nbytes, iterations=1).seconds[leaders.index(rank)]
        for peer, taken in zip(leaders, seconds, strict=True):
            if taken is not None:
                found.append(LinkRecord(name, sent=nbytes, seconds=taken, peer=peer))
        end_group(of_leaders)
    return found
