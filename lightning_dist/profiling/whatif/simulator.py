"""Step time of one exchange of gradients, simulated from bytes, rounds, rates and codec costs.

:func:`simulate_step` follows the busiest rank. Nothing is read from a profile, so that it can be
compared with any measurement. With ``W`` ranks, ``L`` of them on each of ``H`` hosts, and a payload
of ``b`` bytes per rank, the link of the busiest host carries in one direction:

==========  ===========================  ==========  =====================
exchange    bytes                        rounds      second collective
==========  ===========================  ==========  =====================
allreduce   ``2 (W-1)/W b``              ``2 (W-1)``
gather      ``(W-1) b``                  ``W-1``
two_shot    ``L (W-L)/W b``              ``W-1``     ``(W-1)/W b``, ``W-1``
==========  ===========================  ==========  =====================

A ring has one edge that leaves a host, and each edge carries the same. Two ranks gather where more
would exchange in two shots. Between replicas of a sharded model (FSDP2), one on each host, every
rank exchanges its shard with one rank of each other host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.capture.events import GLOO_AT_ONCE
from lightning_dist.reducer.units.sizes import unit_elements

DDP = "ddp"
"""Stock DDP in the place of a codec."""

FORMS = FLAT, SHARDED, LEADER = "flat", "sharded", "leader"
FSDP = "fsdp"
"""Form of a model that ``fully_shard`` has sharded, with a replica on each host."""

PAYLOAD = 1448 / 1514
"""Share of a link's rate that TCP leaves to its payload, with frames of 1,514 bytes."""

ELEMENT_BYTES = 4
"""Bytes of a gradient element."""


@dataclass(frozen=True)
class Link:
    """Speed of one level of the network.

    Args:
        rate: payload bytes per second in one direction: of a host between hosts, of a rank inside.
        latency: seconds of a round; None: unknown, and rounds count nothing.
        overhead: least seconds between two collectives, however small.
        cpu: seconds of a core that a collective takes.
    """

    rate: float
    latency: float | None = None
    overhead: float = 0.0
    cpu: float = 0.0

    @property
    def gbps(self) -> float:
        """Rate in Gbit/s, headers included."""
        return self.rate * 8e-9 / PAYLOAD


def rate_of(gbps: float) -> float:
    """Payload bytes per second of a link of this rate, headers included."""
    return gbps * 1e9 / 8 * PAYLOAD


@dataclass(frozen=True)
class Scenario:
    """Exchange of gradients to simulate.

    Args:
        codec: name, or :data:`DDP`.
        form: one of :data:`FORMS`, or :data:`FSDP`.
        counts: ranks of every host.
        link: between hosts; inside the host where there is only one.
        inside: inside a host; None: unknown.
        at_once: collectives of a group that run at once; 1 with NCCL, which has one stream.
        immediate: a bucket is decoded while the next one travels, not when all have landed.
        sync_every: local steps between two exchanges of what has changed; 0: gradients are
            exchanged in every step.
        fragments: parts of the model that are exchanged in turn, each every ``sync_every`` steps.
        overlap_steps: local steps that an exchange has before training waits for it.

    Raises:
        ValueError: an unknown form, or local steps that cannot be.
    """

    codec: str
    form: str
    counts: tuple[int, ...]
    link: Link
    inside: Link | None = None
    at_once: int = GLOO_AT_ONCE
    immediate: bool = False
    sync_every: int = 0
    fragments: int = 1
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if self.form not in (*FORMS, FSDP):
            raise ValueError(f"form must be one of {', '.join(FORMS)}, {FSDP}, got {self.form!r}")
        if self.sync_every < 0:
            raise ValueError(f"sync_every must be 1 or more local steps, got {self.sync_every}")
        if self.fragments < 1 or self.sync_every % self.fragments:
            raise ValueError(
                "local steps must be a multiple of fragments, which take turns at equal distances, "
                f"got {self.sync_every} local steps and {self.fragments} fragments"
            )
        if not 0 <= self.overlap_steps < max(self.interval, 1):
            raise ValueError(
                "overlap_steps must be 0 or more and less than local steps / fragments, so that "
                f"one exchange is under way at a time, got {self.overlap_steps} and "
                f"{self.sync_every} / {self.fragments} = {self.interval}"
            )

    @property
    def interval(self) -> int:
        """Local steps between two exchanges, of any fragments."""
        return self.sync_every // self.fragments

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.counts)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.counts)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks behind each link of the exchange. On a single host each rank has its own."""
        if self.form != FLAT:
            return (1,) * self.hosts
        return self.counts if self.hosts > 1 else (1,) * self.world_size

    @property
    def adds_inside(self) -> bool:
        """Whether gradients are added up inside hosts, within the exchange itself."""
        return self.form in (SHARDED, LEADER)

    @property
    def unsupported(self) -> str:
        """Reason why the scenario cannot run or be simulated; empty if it can."""
        if not self.adds_inside:
            return ""
        reasons = {
            "DDP itself knows no hosts": self.codec == DDP,
            "one rank per host: there is nothing to add up inside a host": max(self.counts) == 1,
            "one host: nothing is left to do between hosts": self.hosts == 1,
            "the hosts hold different numbers of ranks, which takes the leader form": (
                self.form == SHARDED and len(set(self.counts)) > 1
            ),
            "no exchange inside a host was measured; give its rate with --inside-gbps": (
                self.inside is None
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Bucket:
    """Bucket of gradients: seconds from the begin of the step until it is ready, and elements.

    Of a sharded model: a parameter group, and the elements of the shard of a rank.
    """

    ready: float
    elements: float


class SimulatedStep(NamedTuple):
    """Seconds until the mean of all gradients is there, and bytes over the link of a host."""

    done: float
    sent: float


FREE = CodecCost(DDP, "allreduce", ELEMENT_BYTES, encode=0.0, decode=0.0, store=0.0)
"""Cost of stock DDP."""


class Collective(NamedTuple):
    """Bytes of a collective over a link, and messages in it that wait for one another."""

    nbytes: float
    rounds: int


def collectives(exchange: str, size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    """Collectives of an exchange, one after the other, over the link of the busiest host.

    Args:
        size: bytes of a rank's payload.
        counts: ranks of every host. One rank of each: bytes that a peer sends.
    """
    world = sum(counts)
    ring = (world - 1) / world * size
    if exchange == "allreduce":
        return (Collective(2 * ring, 2 * (world - 1)),)
    if exchange == "gather" or world <= 2:
        return (Collective((world - 1) * size, world - 1),)
    assert exchange == "two_shot", exchange
    leaving = max(count * (world - count) for count in counts) / world * size
    return Collective(leaving, world - 1), Collective(ring, world - 1)


def decoding(cost: CodecCost, world: int) -> tuple[float, float]:
    """Seconds per element after the first of two collectives, and after the last."""
    if cost.exchange == "two_shot" and world > 2:  # each rank reduces its shard, encodes the mean
        return cost.decode + cost.encode / world, cost.decoding(1)
    return 0.0, cost.decoding(1 if cost.exchange == "allreduce" else world)


class _Queue:
    """Collectives of one group on a link: each waits for a thread, and for the link."""

    def __init__(self, link: Link, at_once: int) -> None:
        self.link = link
        self.threads = [0.0] * at_once
        self.link_free = self.issued = self.sent = 0.0

    def send(self, at: float, unit: Collective, elements: float) -> float:
        """End of a collective issued ``at``; ``unit`` is of one element.

        Its rounds come on top of its bytes and hold up its thread, not the link.
        """
        thread = self.threads.index(min(self.threads))
        begin = max(at, self.threads[thread])
        nbytes = unit.nbytes * elements
        self.issued = max(begin, self.issued) + self.link.overhead
        self.link_free = max(begin, self.link_free) + nbytes / self.link.rate
        self.sent += nbytes
        end = max(self.link_free, self.issued) + unit.rounds * (self.link.latency or 0.0)
        self.threads[thread] = end
        return end


def simulate_step(
    buckets: Sequence[Bucket],
    scenario: Scenario,
    *,
    cost: CodecCost | None = None,
    inside_cost: CodecCost | None = None,
    one_core: bool = False,
) -> SimulatedStep:
    """Simulate one step of the busiest rank, with all ranks in step.

    One worker thread does everything in order, as in the reducer: it encodes a bucket chunk by
    chunk and issues the collective of each; where there is a second collective, it waits for the
    first of each chunk, reduces and issues it; when the last bucket is through, it decodes all, or
    with the immediate commit the last, since it has decoded each while the next one travelled.
    Where gradients are added up inside hosts first, a chunk travels there while the one before it
    is encoded; means come back the same way. What FSDP itself does inside a host is in the times at
    which its buckets are ready. Stock DDP is a codec that takes no time and no vote.

    Args:
        cost: of the codec; None for stock DDP.
        inside_cost: of the codec inside hosts, usually ``none``: its bytes, and seconds of a pass.
        one_core: the worker shares a core with the backward pass: what it does meanwhile takes
            twice as long and delays the gradients to come, and gloo's threads delay the worker.
    """
    assert buckets
    assert not scenario.unsupported, scenario.unsupported
    is_ddp = scenario.codec == DDP
    cost = FREE if is_ddp else cost
    assert cost is not None
    world, local, at_once = sum(scenario.peers), max(scenario.counts), scenario.at_once
    link, inner = _Queue(scenario.link, at_once), _Queue(Link(inf), at_once)
    first, *second = collectives(cost.exchange, cost.wire, scenario.peers)
    reduce, decode = decoding(cost, world)
    cpu = scenario.link.cpu if one_core and not is_ddp else 0.0
    shares, copy, way, now, delay = 1, 0.0, Collective(0.0, 0), 0.0, 0.0
    if scenario.form == FSDP:
        shares = local
    elif scenario.form != FLAT:
        assert inside_cost is not None
        assert scenario.inside is not None
        shares, copy = 1 if scenario.form == LEADER else local, inside_cost.encode
        inner = _Queue(scenario.inside, at_once)
        way = Collective((local - 1) * inside_cost.wire / shares, local - 1)
    chunks: list[tuple[float, float]] = []  # elements of all, and the end of their last collective

    def decoded(chunks: Sequence[tuple[float, float]], now: float) -> float:
        """Time at which the means of ``chunks`` are there."""
        waiting, arrival = 0.0, 0.0  # the chunk on its way back inside the host
        for elements, end in chunks:
            now = max(now, end) + elements / shares * (decode + copy)
            before, came = waiting, arrival
            waiting, arrival = elements, inner.send(now, way, elements)
            now = max(now, came) + before * copy
        return max(now, arrival) + waiting * copy

    for bucket in buckets:
        now = max(now, bucket.ready + delay)
        total = bucket.elements * (shares if scenario.form == FSDP else 1)
        sparse = cost.wire if cost.exchange == "gather" else 0.0
        largest = shares * unit_elements(world if second else 1, sparse=sparse)
        if cost.exchange == "allreduce" and scenario.form == FLAT:
            largest = ceil(total)  # as DDP, one collective a bucket
        sizes = [min(total - at, largest) for at in range(0, ceil(total), largest)]
        pace = 2.0 if one_core and bucket is not buckets[-1] else 1.0
        delay += (pace - 1) * (total / shares * cost.encode + len(sizes) * cpu)
        arrivals: list[float] = []
        ends: list[float] = []
        for index, elements in enumerate(sizes):
            for ahead in sizes[len(arrivals) : index + 2]:
                now += ahead * copy
                arrivals.append(inner.send(now, way, ahead))
            now = max(now, arrivals[index]) + elements * copy  # adds up what has arrived
            now += elements / shares * cost.encode * pace
            ends.append(link.send(now, first, elements))
            now += cpu * pace
        if scenario.immediate:
            now, chunks = decoded(chunks, now), []
        for again in second:
            for index, elements in enumerate(sizes):
                now = max(now, ends[index])
                now += elements / shares * reduce
                ends[index] = link.send(now, again, elements)
                now += cpu
        chunks += zip(sizes, ends, strict=True)
    if not (is_ddp or scenario.immediate):
        # Vote on whether all were finite: a few bytes, in as many rounds as a ring has.
        now += scenario.link.overhead + 2 * (world - 1) * (scenario.link.latency or 0.0)
    return SimulatedStep(decoded(chunks, now), link.sent)


def simulate_local_step(
    buckets: Sequence[Bucket],
    scenario: Scenario,
    *,
    tail: float,
    cost: CodecCost | None,
    inside_cost: CodecCost | None = None,
    one_core: bool = False,
) -> SimulatedStep:
    """Simulate the mean step of a window of local ones, at whose end a fragment is exchanged.

    The pseudo-gradient has as many elements as the gradients, a fragment its share of them, and all
    of it is there when the exchange begins; training waits for what ``overlap_steps`` local steps
    do not hide. The outer optimizer's own passes count nothing.

    Args:
        tail: seconds from the last gradient to the end of a step.
        one_core: local steps share a core with the codec, whose time is never hidden.
    """
    assert scenario.sync_every
    elements = sum(bucket.elements for bucket in buckets) / scenario.fragments
    last = max(bucket.ready for bucket in buckets)

    def exchange(of: Scenario) -> SimulatedStep:
        return simulate_step([Bucket(0.0, elements)], of, cost=cost, inside_cost=inside_cost)

    done, sent = exchange(scenario)
    exposed = max(done - scenario.overlap_steps * (last + tail), 0.0)
    if one_core:
        inside = None if scenario.inside is None else Link(inf)
        exposed = max(exposed, exchange(replace(scenario, link=Link(inf), inside=inside)).done)
    return SimulatedStep(last + exposed / scenario.interval, sent / scenario.interval)
