"""Inputs of a simulation, read from a profile: when gradients are ready, and how fast links are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of
from lightning_dist.profiling.analysis.intervals import length, union
from lightning_dist.profiling.analysis.sample import sample
from lightning_dist.profiling.analysis.tables import Array, mean, step_table
from lightning_dist.profiling.analysis.traffic import link_uses
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.simulator import (
    DDP,
    ELEMENT_BYTES,
    FLAT,
    GLOO_AT_ONCE,
    LEADER,
    SHARDED,
    Bucket,
    Link,
    Scenario,
)

NS = 1e9
"""Nanoseconds in a second."""

_SMALL = 1 << 16
"""Bytes of an exchange below which it is its rounds that take the time."""

Steps = Sequence[Sequence[Analysed]]
"""Steps, and of each all ranks."""


@dataclass(frozen=True)
class Observed:
    """Inputs of a simulation; seconds, medians over steps.

    Args:
        scenario: of the run.
        buckets: ready when the last rank has its gradients, in that order.
        tail: from the mean of all gradients to the end of the step.
        step: duration.
        sent: bytes over the link of the busiest host.
        encode, decode: of the codec on a rank in a step; None: there is none.
        reasons: figures that are not known, and why.
        begin: of the backward pass, of the last rank.
        one_core: a codec has to share a core with the backward pass.
        device: kind of device that trains, and compresses.
    """

    scenario: Scenario
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
        """Elements of all gradients."""
        return sum(bucket.elements for bucket in self.buckets)


def observe(run: Run, *, skip: int = 2) -> Observed:
    """Inputs from a run, without its first ``skip`` steps.

    Ranks begin a step together, because they ended the one before together: times of several ranks
    count from the begin of each, and no clock is asked.

    Raises:
        ValueError: something is missing in the profile, with what it is.
    """
    chosen = sample(run, skip=skip)
    steps = [analyse(run, step) for step in chosen.detailed]
    every = [each for ranks in steps for each in ranks]
    buckets = _buckets(steps, run.world_size)
    abouts = [each.metadata for each in run.ranks.values()]
    across = ["inter" in about.groups for about in abouts]
    missing = sorted(set(range(run.world_size)) - set(chosen.ranks))
    for problem, because in (
        (chosen.whole_reason, chosen.reason),
        ("one rank exchanges nothing", run.world_size < 2),
        (f"it has no step of rank {', '.join(map(str, missing))}", missing),
        ("no bucket of gradients was seen", not buckets),
        (
            "its steps exchange gradients several times",
            any(len(passes_of(each.record)) > 1 for each in every),
        ),
        (
            "its exchange has more than two levels",
            any("inter2" in about.groups for about in abouts),
        ),
    ):
        if because:
            raise ValueError(f"nothing can be predicted from this profile: {problem}")
    sent, moving = link_uses(step_table(run, chosen.detailed, steps))
    used = (sent > 0) & (moving > 0)
    if not used.any():
        raise ValueError("nothing can be predicted from this profile: no exchange was recorded")
    rates = sent[used] / moving[used] * NS
    codec, device = _codec(every), run.ranks[min(run.ranks)].metadata.device or "cpu"
    hosts = Counter(about.host for about in abouts)
    link = Link(_rate(run, rates, is_alone=len(hosts) in (1, len(abouts))), _latency(run, every))
    bursts = [burst for each in run.ranks.values() for burst in each.bursts]
    single = [burst.seconds for burst in bursts if burst.count == 1]
    if single and (several := [burst for burst in bursts if burst.count > 1]):
        link = Link(
            link.rate,
            latency=median(single) / (run.world_size - 1),
            overhead=median(burst.seconds / burst.count for burst in several),
            cpu=median(burst.cpu / burst.count for burst in several),
        )
    scenario = Scenario(
        codec,
        FLAT if not any(across) else SHARDED if all(across) else LEADER,
        tuple(hosts.values()),
        link,
        _inside(every),
        at_once=GLOO_AT_ONCE if device == "cpu" else 1,
    )
    unknown = {
        "overhead": not link.overhead
        and "small collectives were not measured; each counts its bytes only",
        "latency": link.latency is None
        and "no small exchange was seen; rounds between hosts count nothing",
        "inside": scenario.inside is None and "no exchange inside a host was measured",
    }
    ranks = chosen.ranks.values()
    return Observed(
        scenario,
        buckets,
        tail=_of_a_step(steps, _tail),
        step=median(mean([each.head(step).duration for each in ranks]) for step in chosen.steps)
        / NS,
        sent=median(sent.max(axis=1).tolist()),
        encode=None if codec == DDP else _of_a_step(steps, lambda each: _spent(each, "encode")),
        decode=None if codec == DDP else _of_a_step(steps, lambda each: _spent(each, "decode")),
        reasons={name: reason for name, reason in unknown.items() if reason},
        begin=median(max(begin_of_gradients(x.record) for x in of_step) for of_step in steps) / NS,
        one_core=any(
            0 < about.cores < 2 * hosts[about.host] and about.device in ("", "cpu")
            for about in abouts
        ),
        device=device,
    )


def begin_of_gradients(record: StepRecord) -> int:
    """Begin of the backward pass that has filled the buckets: others before it only added up."""
    first = min((bucket.ready for bucket in record.buckets), default=record.duration)
    begins = [each.begin for each in record.phases if each.name == "backward"]
    return max((begin for begin in begins if begin <= first), default=first)


def _of_a_step(steps: Steps, nanoseconds: Callable[[Analysed], int]) -> float:
    """Seconds: the median over steps of the mean over ranks."""
    return median(mean([nanoseconds(each) for each in ranks]) for ranks in steps) / NS


def _tail(each: Analysed) -> int:
    done = max((bucket.done for bucket in each.record.buckets), default=each.record.duration)
    return max(each.record.duration - done, 0)


def _spent(each: Analysed, phase: str) -> int:
    return sum(span.end - span.begin for span in each.record.spans if span.phase == phase)


def _buckets(steps: Steps, world_size: int) -> list[Bucket]:
    ready: dict[int, list[int]] = defaultdict(list)
    raw: dict[int, list[int]] = defaultdict(list)
    for ranks in steps:
        of_step: dict[int, int] = {}
        for bucket in (bucket for each in ranks for bucket in each.record.buckets):
            of_step[bucket.index] = max(of_step.get(bucket.index, 0), bucket.ready)
            raw[bucket.index].append(bucket.raw)
        for index, time in of_step.items():
            ready[index].append(time)
    whole = world_size / (2 * (world_size - 1) * ELEMENT_BYTES) if world_size > 1 else 0.0
    found = [Bucket(median(ready[i]) / NS, median(raw[i]) * whole) for i in ready]
    return sorted(found, key=lambda bucket: bucket.ready)


def _codec(every: Iterable[Analysed]) -> str:
    """Codec of the most bytes: small tensors travel as they are, beside it."""
    weights: Counter[str] = Counter()
    for bucket in (bucket for each in every for bucket in each.record.buckets):
        names = [name for name in bucket.codec.split("+") if name != "none"]
        weights[names[0] if names else "none"] += bucket.raw
    return max(weights, key=lambda name: weights[name])


def _rate(run: Run, rates: Array, *, is_alone: bool) -> float:
    """Bytes per second of a link: in the steps, or of a collective with nothing else on it.

    Args:
        rates: of every step and link on which something was sent.
        is_alone: a rank has its link for itself; else a collective of all says less than their sum.
    """
    links = [link for each in run.ranks.values() for link in each.links if link.peer is None]
    alone = [link.sent / link.seconds for link in links if is_alone and link.seconds > 0]
    # Small exchanges leave a link idle between them, and reach less than it can do.
    return float(max(median(rates.tolist()), median(alone or [0.0])))


def _latency(run: Run, every: Iterable[Analysed]) -> float | None:
    """Seconds of a round in the quickest small exchange: others queued behind large ones."""
    found = []
    for each in every:
        groups = run.ranks[each.parts.rank].metadata.groups
        for exchange in each.exchanges:
            span, (begin, end) = exchange.span, exchange.transfer
            peers = len(groups.get(span.group, ()))
            if span.group != "intra" and span.sent <= _SMALL and peers > 1:
                rounds = (2 if span.op == "all_reduce" else 1) * (peers - 1)
                found.append((end - begin) / rounds / NS)
    return min(found, default=None)


def _inside(every: Iterable[Analysed]) -> Link | None:
    rates = []
    for each in every:
        exchanges = [exchange for exchange in each.exchanges if exchange.span.group == "intra"]
        sent = sum(exchange.span.sent for exchange in exchanges)
        if sent and (moving := length(union(exchange.transfer for exchange in exchanges))):
            rates.append(sent / moving * NS)
    return Link(median(rates)) if rates else None
