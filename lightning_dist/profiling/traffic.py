"""Bytes and rates of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.parts import Traffic
from lightning_dist.profiling.records import LinkRecord, RankRecord
from lightning_dist.profiling.totals import RankTotals


def gbps(nbytes: float, nanoseconds: float) -> float | None:
    """Gbit/s; None where nothing was sent or no time went by."""
    return nbytes * 8 / nanoseconds if nbytes > 0 and nanoseconds > 0 else None


def traffic_of(
    run: Run, totals: Mapping[int, RankTotals], reasons: dict[str, str]
) -> Traffic | None:
    """Per step and rank. What is None has its reason added to ``reasons``."""
    of_ranks = totals.values()
    steps = sum(each.steps for each in of_ranks)
    raw, moving = sum(each.raw for each in of_ranks), sum(each.moving for each in of_ranks)
    intra, inter = sum(each.intra for each in of_ranks), sum(each.inter for each in of_ranks)
    if not steps or not raw + intra + inter:
        alone = run.world_size < 2
        reasons.setdefault(
            "traffic", "one rank sends nothing" if alone else "no bucket of gradients was sent"
        )
        return None
    if not moving:
        for name in ("wire_gbps", "effective_gbps"):
            reasons[f"traffic.{name}"] = "no exchange was recorded"
    peak = _peak(run)
    if peak is None:
        reasons["traffic.peak_gbps"] = "no link was measured"
    return Traffic(
        raw_bytes=raw / steps,
        wire_bytes=(intra + inter) / steps,
        intra_bytes=intra / steps,
        inter_bytes=inter / steps,
        wire_gbps=gbps(intra + inter, moving),
        effective_gbps=gbps(raw, moving),
        peak_gbps=peak,
    )


def _peak(run: Run) -> float | None:
    """The best of the links between hosts; inside a host only where there is no other."""
    across, all_ = [], []
    for each in run.ranks.values():
        for link in each.links:
            if (rate := gbps(link.sent, link.seconds * 1e9)) is not None:
                all_.append(rate)
                if _crosses(run, each.about, link):
                    across.append(rate)
    return max(across or all_, default=None)


def _crosses(run: Run, about: RankRecord, link: LinkRecord) -> bool:
    ends: Iterable[int] = [link.peer] if link.peer is not None else about.groups.get(link.group, ())
    hosts = {run.ranks[rank].about.host for rank in ends if rank in run.ranks}
    return bool(hosts - {about.host})
