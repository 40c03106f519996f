"""Step time of one exchange of gradients, simulated from bytes, rounds, rates and codec costs.

:func:`simulate_step` follows the busiest rank. Nothing is read from a profile, so that it can be
compared with any measurement. With ``W`` ranks, ``L`` of them on each of ``H`` nodes, and a payload
of ``b`` bytes per rank, the link of the busiest node carries in one direction:

==========  ===========================  ==========  =====================
exchange    bytes                        rounds      second collective
==========  ===========================  ==========  =====================
allreduce   ``2 (W-1)/W b``              ``2 (W-1)``
gather      ``(W-1) b``                  ``W-1``
two_shot    ``L (W-L)/W b``              ``W-1``     ``(W-1)/W b``, ``W-1``
==========  ===========================  ==========  =====================

A ring has one edge that leaves a node, and each edge carries the same. Two ranks gather where more
would exchange in two shots. Between replicas of a sharded model (FSDP2), one on each node, every
rank exchanges its shard with one rank of each other node.

:func:`simulate_shards` is of a model that FSDP2 shards over all ranks, whose ``b`` bytes are those
of a parameter group: an all-gather sends ``(W-1)/W b``, a quantised reduce-scatter, an all_to_all,
``L (W-L)/W b``, and that of gloo, an allreduce, ``2 (W-1)/W b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from lightning_dist.base.exchanges import EXCHANGES, Collective, unit_elements
from lightning_dist.measurement import CodecCost
from lightning_dist.profiling.whatif.scenarios import (
    DDP,
    ELEMENT_BYTES,
    FLAT,
    FSDP,
    LEADER,
    LinkSpeed,
    Scenario,
    ScenarioBucket,
    ShardCollective,
)


class SimulatedStep(NamedTuple):
    """Seconds until the mean of all gradients is there, and bytes over the link of a node."""

    done: float
    sent: float


FREE = CodecCost(DDP, "allreduce", ELEMENT_BYTES, encode=0.0, decode=0.0, store=0.0)
"""Cost of stock DDP."""


def collectives(exchange: str, size: float, counts: Sequence[int]) -> tuple[Collective, ...]:
    """Collectives of an exchange, one after the other, over the link of the busiest node.

    Args:
        size: bytes of a rank's payload.
        counts: ranks of every node. One rank of each: bytes that a peer sends.
    """
    return EXCHANGES[exchange].among(sum(counts)).collectives(size, counts)


def decoding(cost: CodecCost, world: int) -> tuple[float, float]:
    """Seconds per element after the first of two collectives, and after the last."""
    kind = EXCHANGES[cost.exchange].among(world)
    # Each rank reduces its shard, and encodes the mean.
    reduce = cost.decode + cost.encode / world if kind.reduced_by == "owners" else 0.0
    return reduce, cost.decoding(kind.received(world))


class _Queue:
    """Collectives of one group on a link: each waits for a thread, and for the link."""

    def __init__(self, link: LinkSpeed, at_once: int) -> None:
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
    buckets: Sequence[ScenarioBucket],
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
    with the immediate update the last, since it has decoded each while the next one travelled.
    Where gradients are added up inside nodes first, a chunk travels there while the one before it
    is encoded; means come back the same way. What FSDP itself does inside a node is in the times at
    which its buckets are ready. Stock DDP is a codec that takes no time and no vote.

    Args:
        cost: of the codec; None for stock DDP.
        inside_cost: of the codec inside nodes, usually ``none``: its bytes, and seconds of a pass.
        one_core: the worker shares a core with the backward pass: what it does meanwhile takes
            twice as long and delays the gradients to come, and gloo's threads delay the worker.
    """
    assert buckets
    assert not scenario.unsupported, scenario.unsupported
    is_ddp = scenario.codec == DDP
    cost = FREE if is_ddp else cost
    assert cost is not None
    world, local, at_once = sum(scenario.peers), max(scenario.counts), scenario.at_once
    link, inner = _Queue(scenario.link, at_once), _Queue(LinkSpeed(inf), at_once)
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
        waiting, arrival = 0.0, 0.0  # the chunk on its way back inside the node
        for elements, end in chunks:
            now = max(now, end) + elements / shares * (decode + copy)
            before, came = waiting, arrival
            waiting, arrival = elements, inner.send(now, way, elements)
            now = max(now, came) + before * copy
        return max(now, arrival) + waiting * copy

    for bucket in buckets:
        now = max(now, bucket.ready + delay)
        total = bucket.elements * (shares if scenario.form == FSDP else 1)
        sparse = cost.wire if EXCHANGES[cost.exchange].sparse else 0.0
        largest = shares * unit_elements(world if second else 1, sparse=sparse)
        if EXCHANGES[cost.exchange].linear and scenario.form == FLAT:
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


def simulate_shards(
    collectives: Sequence[ShardCollective],
    scenario: Scenario,
    *,
    parameters: CodecCost,
    gradients: CodecCost,
) -> SimulatedStep:
    """Simulate the collectives of FSDP on a CPU, where training waits for each.

    A quantised one is encoded, sent and decoded in the thread that trains: nothing overlaps. Stock
    FSDP sends elements as they are; its copies are part of the computation.
    """
    link, now, ranks = _Queue(scenario.link, 1), 0.0, scenario.world_size
    is_native = scenario.codec == DDP
    for collective in collectives:
        cost, n = parameters if collective.gathers else gradients, collective.elements
        wire = min(cost.wire, collective.itemsize)
        scatter, gather = EXCHANGES["two_shot"].collectives(wire, scenario.peers)
        if is_native and not collective.gathers:
            (scatter,) = EXCHANGES["allreduce"].collectives(wire, scenario.peers)
        # A row of each rank is decoded; of gradients each rank adds up one of all.
        before, after = n / ranks * cost.encode, n * (cost.decode + cost.store)
        if not collective.gathers:
            before, after = (
                n * cost.encode,
                n * (cost.decode or cost.store) + n / ranks * cost.store,
            )
        unit = gather if collective.gathers else scatter
        now = link.send(now + collective.compute + before, unit, n) + after
    return SimulatedStep(now, link.sent)


def simulate_local_step(
    buckets: Sequence[ScenarioBucket],
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
        return simulate_step(
            [ScenarioBucket(0.0, elements)], of, cost=cost, inside_cost=inside_cost
        )

    done, sent = exchange(scenario)
    exposed = max(done - scenario.overlap_steps * (last + tail), 0.0)
    if one_core:
        inside = None if scenario.inside is None else LinkSpeed(inf)
        exposed = max(exposed, exchange(replace(scenario, link=LinkSpeed(inf), inside=inside)).done)
    return SimulatedStep(last + exposed / scenario.interval, sent / scenario.interval)
