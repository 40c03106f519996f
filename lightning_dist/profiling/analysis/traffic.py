"""Bytes and rates of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_dist.profiling.analysis.parts import Traffic
from lightning_dist.profiling.analysis.totals import RankTotals
from lightning_dist.profiling.capture.events import LinkRecord, RankRecord
from lightning_dist.profiling.run import Run

ONE_HOST = (
    "all ranks are on one host: rates, and what is called its link, are of loopback or shared "
    "memory, and say nothing of a network"
)


def is_one_host(run: Run) -> bool:
    """Whether all ranks of it were on one, as far as they have said where they were."""
    return len({each.about.host for each in run.ranks.values()}) == 1 and not gone(run, run.ranks)


def gone(run: Run, ranks: Iterable[int]) -> list[int]:
    """All other ranks of the run."""
    return sorted(set(range(run.world_size)) - set(ranks))


def gbps(nbytes: float, nanoseconds: float) -> float | None:
    """Gbit/s; None where nothing was sent or no time went by."""
    return nbytes * 8 / nanoseconds if nbytes > 0 and nanoseconds > 0 else None


@dataclass(frozen=True)
class LinkUse:
    """Bytes that went out over one link, and for how many nanoseconds something was on its way."""

    sent: int
    moving: int


def link_uses(
    run: Run, totals: Mapping[int, RankTotals], moving: Mapping[str, int]
) -> list[LinkUse]:
    """Of every host to others, or where nothing goes to other hosts, of every rank.

    Args:
        moving: of every host, as in
            :func:`~lightning_dist.profiling.analysis.totals.moving_of_hosts`.
    """
    if not any(each.inter for each in totals.values()):
        return [LinkUse(each.intra, each.intra_moving) for each in totals.values()]
    sent: Counter[str] = Counter()
    for rank, each in totals.items():
        sent[run.ranks[rank].about.host] += each.inter
    return [LinkUse(nbytes, moving[host]) for host, nbytes in sent.items()]


def traffic_of(
    run: Run,
    totals: Mapping[int, RankTotals],
    reasons: dict[str, str],
    *,
    moving_of_hosts: Mapping[str, int],
) -> Traffic | None:
    """Bytes per step and rank, and rates. What is None has its reason added to ``reasons``."""
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
    why_no_rate = "" if moving else "no exchange was recorded"
    if missing := gone(run, totals):
        ranks = ", ".join(map(str, missing))
        why_no_rate = (
            f"no step of rank {ranks} is there: what it has sent is not known, and waiting for it "
            "counts as transfer"
        )
    if why_no_rate:
        for name in ("wire_gbps", "effective_gbps"):
            reasons[f"traffic.{name}"] = why_no_rate
    uses = link_uses(run, totals, moving_of_hosts)
    peak = _peak(run)
    if peak is None:
        reasons["traffic.peak_gbps"] = "no link was measured"
    return Traffic(
        raw_bytes=raw / steps,
        wire_bytes=(intra + inter) / steps,
        intra_bytes=intra / steps,
        inter_bytes=inter / steps,
        wire_gbps=None
        if why_no_rate
        else gbps(sum(each.sent for each in uses), sum(each.moving for each in uses)),
        effective_gbps=None if why_no_rate else gbps(raw, moving),
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
