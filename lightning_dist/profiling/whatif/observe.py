"""What a profile says that a simulation needs: when gradients are there, and how fast links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dist.profiling.breakdown import Analysed, analyse
from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.intervals import length, union
from lightning_dist.profiling.sample import sample
from lightning_dist.profiling.totals import mean
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
    """

    setting: Setting
    buckets: Sequence[Bucket]
    tail: float
    step: float
    sent: float
    encode: float | None
    decode: float | None
    reasons: Mapping[str, str]

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
        raise ValueError(f"nothing can be predicted from this profile: {chosen.reason}")
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
    reasons: dict[str, str] = {}
    codec, form = _codec(steps), _form(run)
    codes = [sum(_codec_time(each, "encode") for each in ranks) / len(ranks) for ranks in steps]
    decodes = [sum(_codec_time(each, "decode") for each in ranks) / len(ranks) for ranks in steps]
    every = chosen.ranks.values()
    durations = [mean([each.steps[step].duration for each in every]) for step in chosen.steps]
    hosts = _hosts(run)
    link, sent = _link(run, steps, hosts, reasons)
    setting = Setting(
        codec,
        form,
        [len(ranks) for ranks in hosts.values()],
        link,
        _inside(steps, reasons),
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
    hosts: Mapping[str, Sequence[int]],
    reasons: dict[str, str],
) -> tuple[Link, float]:
    """What a host sends to others, over the time in which something was on its way there.

    On one host it is what a rank sends to others.
    """
    rates, sents = [], []
    places = list(hosts.values()) if len(hosts) > 1 else [[rank] for rank in run.ranks]
    for ranks in steps:
        of_places = []
        for place in places:
            here = [each for each in ranks if each.parts.rank in place]
            moving = max((_moving(each, ("flat", "inter")) for each in here), default=0)
            of_places.append((sum(_sent(each, len(hosts) > 1) for each in here), moving))
        sents.append(max(sent for sent, _ in of_places))
        rates += [sent / moving for sent, moving in of_places if sent and moving]
    if not rates:
        raise ValueError("nothing can be predicted from this profile: no exchange was recorded")
    return Link(median(rates) * NS, _latency(run, steps, reasons)), median(sents)


def _sent(each: Analysed, between: bool) -> int:
    return sum(bucket.inter if between else bucket.intra for bucket in each.record.buckets)


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
