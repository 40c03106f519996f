"""What a profile says that a simulation needs: when gradients are there, and how fast links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of
from lightning_dist.profiling.analysis.intervals import length, union
from lightning_dist.profiling.analysis.sample import sample
from lightning_dist.profiling.analysis.tables import mean, step_table
from lightning_dist.profiling.analysis.traffic import link_uses
from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.whatif.buckets import begin_of_gradients
from lightning_dist.profiling.whatif.setting import DDP, FLAT, LEADER, SHARDED, Link, Setting
from lightning_dist.profiling.whatif.simulate import BYTES, Bucket

NS = 1e9
_SMALL = 1 << 16
"""Bytes of an exchange below which it is its rounds that take the time."""


@dataclass(frozen=True)
class Observed:
    """A run; seconds, medians over its steps.

    Args:
        setting: in which it was.
        buckets: ready when the last rank has its gradients, in that order.
        tail: from the mean of all gradients to the end of the step.
        step: how long it takes.
        sent: bytes over the link of the busiest host.
        encode, decode: the codec, of a rank in a step; None: there is none.
        reasons: what is not known, and why.
        begin: of the backward pass, of the last rank.
        one_core: a codec has to share a core with the backward pass.
        device: kind of what trains, and compresses.
    """

    setting: Setting
    buckets: Sequence[Bucket]
    tail: float
    step: float
    sent: float
    encode: float | None
    decode: float | None
    reasons: Mapping[str, str]
    begin: float = 0.0
    one_core: bool = False
    device: str = "cpu"

    @property
    def elements(self) -> float:
        """Of all gradients."""
        return sum(bucket.elements for bucket in self.buckets)


def observe(run: Run, *, skip: int = 2) -> Observed:
    """Look at a run.

    Ranks begin a step together, because they ended the one before together: times of several ranks
    count from the begin of each, and no clock is asked.

    Raises:
        ValueError: it says too little, with what is missing.
    """
    chosen = sample(run, skip=skip)
    if chosen.reason:
        raise ValueError(f"nothing can be predicted from this profile: {chosen.whole_reason}")
    if run.world_size < 2:
        raise ValueError("nothing can be predicted from this profile: one rank exchanges nothing")
    if missing := sorted(set(range(run.world_size)) - set(chosen.ranks)):
        raise ValueError(
            "nothing can be predicted from this profile: it has no step of rank "
            f"{', '.join(map(str, missing))}"
        )
    steps = [analyse(run, step) for step in chosen.detailed]
    buckets = _buckets(steps, run.world_size)
    if not buckets:
        raise ValueError(
            "nothing can be predicted from this profile: no bucket of gradients was seen"
        )
    if any(len(passes_of(each.record)) > 1 for ranks in steps for each in ranks):
        raise ValueError(
            "nothing can be predicted from this profile: its steps exchange gradients several times"
        )
    reasons: dict[str, str] = {}
    codec, form = _codec(steps), _form(run)
    codes = [sum(_codec_time(each, "encode") for each in ranks) / len(ranks) for ranks in steps]
    decodes = [sum(_codec_time(each, "decode") for each in ranks) / len(ranks) for ranks in steps]
    every = chosen.ranks.values()
    durations = [mean([each.head(step).duration for each in every]) for step in chosen.steps]
    hosts = _hosts(run)
    link, sent = _link(run, steps, reasons)
    device = run.ranks[min(run.ranks)].about.device or "cpu"
    setting = Setting(
        codec,
        form,
        [len(ranks) for ranks in hosts.values()],
        link,
        _inside(steps, reasons),
        at_once=Setting.at_once if device == "cpu" else 1,
    )
    return Observed(
        setting,
        buckets,
        tail=median(mean([_tail(each) for each in ranks]) for ranks in steps) / NS,
        step=median(durations) / NS,
        sent=sent,
        encode=None if codec == DDP else median(codes) / NS,
        decode=None if codec == DDP else median(decodes) / NS,
        reasons=reasons,
        begin=median(max(begin_of_gradients(x.record) for x in ranks) for ranks in steps) / NS,
        one_core=_has_one_core(run, hosts),
        device=device,
    )


def _has_one_core(run: Run, hosts: Mapping[str, Sequence[int]]) -> bool:
    """Whether a rank of some host has less than two cores, as far as that is known."""
    abouts = {rank: each.about for rank, each in run.ranks.items()}
    return any(
        0 < abouts[rank].cores < 2 * len(ranks) and abouts[rank].device in ("", "cpu")
        for ranks in hosts.values()
        for rank in ranks
    )


def _buckets(steps: Sequence[Sequence[Analysed]], world_size: int) -> list[Bucket]:
    ready: dict[int, list[int]] = {}
    raw: dict[int, list[int]] = {}
    for ranks in steps:
        of_step: dict[int, list[int]] = {}
        for each in ranks:
            for bucket in each.record.buckets:
                of_step.setdefault(bucket.index, []).append(bucket.ready)
                raw.setdefault(bucket.index, []).append(bucket.raw)
        for index, times in of_step.items():
            ready.setdefault(index, []).append(max(times))
    whole = world_size / (2 * (world_size - 1) * BYTES)
    found = [Bucket(median(ready[i]) / NS, median(raw[i]) * whole) for i in ready]
    return sorted(found, key=lambda bucket: bucket.ready)


def _tail(each: Analysed) -> int:
    done = max((bucket.done for bucket in each.record.buckets), default=each.record.duration)
    return max(each.record.duration - done, 0)


def _codec_time(each: Analysed, phase: str) -> int:
    return sum(span.end - span.begin for span in each.record.spans if span.phase == phase)


def _codec(steps: Sequence[Sequence[Analysed]]) -> str:
    """The codec of the most bytes: small tensors travel as they are, beside it."""
    weights: dict[str, int] = {}
    for ranks in steps:
        for each in ranks:
            for bucket in each.record.buckets:
                names = [name for name in bucket.codec.split("+") if name != "none"] or ["none"]
                weights[names[0]] = weights.get(names[0], 0) + bucket.raw
    return max(weights, key=lambda name: weights[name])


def _form(run: Run) -> str:
    names = [set(each.about.groups) - {"control"} for each in run.ranks.values()]
    if any("inter2" in each for each in names):
        raise ValueError(
            "nothing can be predicted from this profile: its exchange has more than two levels"
        )
    if not any("inter" in each for each in names):
        return FLAT
    return SHARDED if all("inter" in each for each in names) else LEADER


def _hosts(run: Run) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, each in run.ranks.items():
        hosts.setdefault(each.about.host, []).append(rank)
    return hosts


def _link(
    run: Run,
    steps: Sequence[Sequence[Analysed]],
    reasons: dict[str, str],
) -> tuple[Link, float]:
    """How fast it is, and the bytes over the busiest."""
    table = step_table(run, [ranks[0].record.step for ranks in steps], steps)
    sent, moving = link_uses(table)
    used = (sent > 0) & (moving > 0)
    if not used.any():
        raise ValueError("nothing can be predicted from this profile: no exchange was recorded")
    # Small exchanges leave a link idle between them, and what they reach is less than it can do.
    rate = max(median((sent[used] / moving[used]).tolist()) * NS, _measured(run))
    return _with_bursts(run, Link(rate), steps, reasons), median(sent.max(axis=1).tolist())


def _measured(run: Run) -> float:
    """Bytes in a second of the collective that was alone on the link; 0: there was none."""
    whole = [
        link.sent / link.seconds
        for each in run.ranks.values()
        for link in each.links
        if link.peer is None and link.seconds > 0
    ]
    hosts = _hosts(run)
    # Where ranks share a link, a collective of all says less of it than their sum.
    return median(whole) if whole and len(hosts) in (1, len(run.ranks)) else 0.0


def _with_bursts(
    run: Run, link: Link, steps: Sequence[Sequence[Analysed]], reasons: dict[str, str]
) -> Link:
    """What a collective takes however small it is; measured alone, or else seen in the steps."""
    bursts = [burst for each in run.ranks.values() for burst in each.bursts]
    alone = [burst.seconds for burst in bursts if burst.count == 1]
    together = [burst for burst in bursts if burst.count > 1]
    if not alone or not together:
        reasons["overhead"] = "small collectives were not measured; each counts its bytes only"
        return replace(link, latency=_latency(run, steps, reasons))
    return replace(
        link,
        latency=median(alone) / (run.world_size - 1),
        overhead=median(burst.seconds / burst.count for burst in together),
        cpu=median(burst.cpu / burst.count for burst in together),
    )


def _moving(each: Analysed, groups: Sequence[str]) -> int:
    return length(union(x.transfer for x in each.exchanges if x.span.group in groups))


def _latency(
    run: Run, steps: Sequence[Sequence[Analysed]], reasons: dict[str, str]
) -> float | None:
    """Of the small exchange that was the quickest: others have queued behind large ones."""
    found = []
    for ranks in steps:
        for each in ranks:
            groups = run.ranks[each.parts.rank].about.groups
            for exchange in each.exchanges:
                span, (begin, end) = exchange.span, exchange.transfer
                peers = len(groups.get(span.group, ()))
                if span.group != "intra" and span.sent <= _SMALL and peers > 1:
                    rounds = (2 if span.op == "all_reduce" else 1) * (peers - 1)
                    found.append((end - begin) / rounds)
    if not found:
        reasons["latency"] = "no small exchange was seen; rounds between hosts count nothing"
        return None
    return min(found) / NS


def _inside(steps: Sequence[Sequence[Analysed]], reasons: dict[str, str]) -> Link | None:
    rates = []
    for ranks in steps:
        for each in ranks:
            sent = sum(x.span.sent for x in each.exchanges if x.span.group == "intra")
            if sent and (moving := _moving(each, ("intra",))):
                rates.append(sent / moving)
    if not rates:
        reasons["inside"] = "no exchange inside a host was measured"
        return None
    return Link(median(rates) * NS)
