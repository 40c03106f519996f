"""Bytes and rates of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_dist.profiling.analysis.parts import Traffic, Unavailable
from lightning_dist.profiling.analysis.tables import Array, StepTable
from lightning_dist.profiling.capture.events import LinkRecord, RankRecord
from lightning_dist.profiling.run import Run

ONE_HOST = (
    "all ranks are on one host: rates, and what is called its link, are of loopback or shared "
    "memory, and say nothing of a network"
)


def is_one_host(run: Run) -> bool:
    """Whether all ranks of it were on one, as far as they have said where they were."""
    return len({each.metadata.host for each in run.ranks.values()}) == 1 and not gone(
        run, run.ranks
    )


def gone(run: Run, ranks: Iterable[int]) -> list[int]:
    """All other ranks of the run."""
    return sorted(set(range(run.world_size)) - set(ranks))


def gbps(nbytes: float, nanoseconds: float) -> float | None:
    """Gbit/s; None where nothing was sent or no time went by."""
    return nbytes * 8 / nanoseconds if nbytes > 0 and nanoseconds > 0 else None


def link_uses(table: StepTable) -> tuple[Array, Array]:
    """Bytes that went out over a link, and nanoseconds in which something was on its way.

    By step and link. A link is that of a host to others, or where nothing goes there, of a rank.
    """
    inter = table.of("inter")
    if not inter.any():
        return table.of("intra"), table.of("intra_moving")
    hosts = np.array(table.hosts)
    links = [inter[:, hosts == host].sum(axis=1) for host in dict.fromkeys(table.hosts)]
    return np.stack(links, axis=1), table.host_moving


def traffic_of(run: Run, table: StepTable, unavailable: dict[str, str]) -> Traffic | None:
    """Bytes per step and rank, and rates. What is None has its reason added to ``unavailable``."""
    raw, intra, inter, moving = map(table.total, ("raw", "intra", "inter", "moving"))
    if not table.cells or not raw + intra + inter:
        alone = run.world_size < 2
        unavailable.setdefault(
            "traffic", Unavailable.ALONE_SENDS if alone else Unavailable.NOT_SENT
        )
        return None
    why_no_rate: str = "" if moving else Unavailable.NO_EXCHANGE
    if missing := gone(run, table.ranks):
        why_no_rate = Unavailable.NO_STEP_OF_RANK.format(ranks=", ".join(map(str, missing)))
    if why_no_rate:
        unavailable["traffic.wire_gbps"] = unavailable["traffic.ddp_equivalent_busbw_gbps"] = (
            why_no_rate
        )
    sent, under_way = link_uses(table)
    peak = _peak(run)
    if peak is None:
        unavailable["traffic.link_gbps"] = Unavailable.NO_LINK
    return Traffic(
        raw_bytes=raw / table.cells,
        wire_bytes=(intra + inter) / table.cells,
        intra_bytes=intra / table.cells,
        inter_bytes=inter / table.cells,
        wire_gbps=None if why_no_rate else gbps(float(sent.sum()), float(under_way.sum())),
        ddp_equivalent_busbw_gbps=None if why_no_rate else gbps(raw, moving),
        link_gbps=peak,
    )


def _peak(run: Run) -> float | None:
    """The best of the links between hosts; inside a host only where there is no other."""
    across, all_ = [], []
    for each in run.ranks.values():
        for link in each.links:
            if (rate := gbps(link.sent, link.seconds * 1e9)) is not None:
                all_.append(rate)
                if _crosses(run, each.metadata, link):
                    across.append(rate)
    return max(across or all_, default=None)


def _crosses(run: Run, about: RankRecord, link: LinkRecord) -> bool:
    ends: Iterable[int] = [link.peer] if link.peer is not None else about.groups.get(link.group, ())
    hosts = {run.ranks[rank].metadata.host for rank in ends if rank in run.ranks}
    return bool(hosts - {about.host})
