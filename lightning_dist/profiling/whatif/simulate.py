"""Plays one step of the busiest rank: buckets become ready, are encoded, travel, are decoded.

As in the reducer, one worker does everything in order: it encodes bucket by bucket and chunk by
chunk and issues each chunk's collective; then, where there is a second one, it waits for the first
of each chunk, reduces and issues again; when the last bucket is through, it decodes all. Stock DDP
has no worker: a bucket travels when it is ready.

A collective travels when a thread of gloo is free, of which a group has two, and the link is; with
NCCL they travel one by one. Its rounds come on top and hold up its thread, not the link. However
small, collectives follow one another by no less than what the link's measured overhead says. All
ranks are taken to be in step. A codec takes nothing from the compute that it runs beside, but where
a rank has one core for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import zip_longest

from lightning_dist.profiling.whatif.formulas import Collective, collectives, inside
from lightning_dist.profiling.whatif.setting import DDP, FLAT, LEADER, Link, Setting, impossible
from lightning_dist.reducer.chunk_sizes import chunk_elements
from lightning_dist.reducer.costs import CodecCost

BYTES = 4
"""Of an element of a gradient."""


@dataclass(frozen=True)
class Bucket:
    """One bucket of gradients.

    Args:
        ready: seconds since the begin of the step.
        elements: of it.
    """

    ready: float
    elements: float


@dataclass(frozen=True)
class Played:
    """What came of it: seconds since the begin of the step, and bytes.

    Args:
        done: the mean of all gradients is there.
        sent: bytes over the link of a host.
    """

    done: float
    sent: float


@dataclass
class _Wire:
    """A link, and the threads of the group that uses it."""

    link: Link
    at_once: InitVar[int]
    free: float = 0.0
    threads: list[float] = field(init=False)
    engine: float = 0.0  # when what it has of collectives is under way
    sent: float = 0.0

    def __post_init__(self, at_once: int) -> None:
        self.threads = [0.0] * at_once

    def send(self, at: float, what: Collective) -> float:
        """When a collective that is issued at ``at`` has ended."""
        thread = self.threads.index(min(self.threads))
        begin = max(at, self.threads[thread])
        self.engine = max(begin, self.engine) + self.link.overhead
        self.free = max(begin, self.free) + what.nbytes / self.link.rate
        self.sent += what.nbytes
        end = max(self.free, self.engine) + what.rounds * (self.link.latency or 0.0)
        self.threads[thread] = end
        return end


@dataclass
class _Chunk:
    elements: float
    share: float  # of them, what this rank takes between hosts
    up: float = 0.0  # when its host had added it up
    end: float = 0.0  # of its last collective so far
    down: float = 0.0  # when it was back inside the host


def play(
    buckets: Sequence[Bucket],
    setting: Setting,
    *,
    cost: CodecCost | None = None,
    plain: CodecCost | None = None,
    one_core: bool = False,
) -> Played:
    """One step.

    Args:
        cost: of the codec; None for stock DDP.
        plain: of a pass without a codec, inside a host.
        one_core: a rank has no second core for its worker, which then takes turns with the backward
            pass: what it encodes and sends meanwhile takes twice as long and delays the gradients
            to come. What gloo's threads take of that core delays the worker.
    """
    assert not impossible(setting), impossible(setting)
    assert buckets
    if setting.codec == DDP:
        return _ddp(buckets, setting)
    assert cost is not None
    return _Worker(setting, cost, plain).play(buckets, one_core=one_core)


def _ddp(buckets: Sequence[Bucket], setting: Setting) -> Played:
    wire = _Wire(setting.link, setting.at_once)
    ends = []
    for bucket in buckets:
        (ring,) = collectives("allreduce", BYTES * bucket.elements, setting.peers)
        ends.append(wire.send(bucket.ready, ring))
    return Played(max(ends), wire.sent)


class _Worker:
    def __init__(self, setting: Setting, cost: CodecCost, plain: CodecCost | None) -> None:
        self.setting, self.cost = setting, cost
        self.now = 0.0
        self.wire = _Wire(setting.link, setting.at_once)
        self.pace = 1.0  # of what it does: how many times as long
        self.cpu = 0.0  # of a collective, taken from its own core
        self.flat = setting.form == FLAT
        self.peers = setting.peers if self.flat else (1,) * setting.hosts
        self.world = sum(self.peers)
        self.local = max(setting.counts)
        self.copy = 0.0 if plain is None else plain.encode
        inside = setting.inside
        self.inner = None if inside is None else _Wire(inside, setting.at_once)

    def play(self, buckets: Sequence[Bucket], *, one_core: bool) -> Played:
        done: list[_Chunk] = []
        late = 0.0
        self.cpu = self.setting.link.cpu if one_core else 0.0
        for bucket in buckets:
            self.now = max(self.now, bucket.ready + late)
            chunks = list(self._chunks(bucket.elements))
            self.pace = 2.0 if one_core and bucket is not buckets[-1] else 1.0
            busy = bucket.elements / self._shares * self.cost.encode + len(chunks) * self.cpu
            late += busy * (self.pace - 1)
            self._encode(chunks)
            if len(self._collectives(1.0)) == 2:
                self._reduce(chunks)
            done += chunks
        # The verdict, whether all ranks were finite: a few bytes in as many rounds as a ring has.
        link = self.setting.link
        self.now += link.overhead + 2 * (self.world - 1) * (link.latency or 0.0)
        self._settle(done)
        return Played(self.now, self.wire.sent)

    def _chunks(self, elements: float) -> Iterator[_Chunk]:
        shares = self._shares
        two_shot = self.cost.exchange == "two_shot" and self.world > 2
        most: float = shares * chunk_elements(self.world if two_shot else 1)
        if self.cost.exchange == "allreduce" and self.flat:
            most = elements  # as DDP, one a bucket
        left = elements
        while left > 0:
            yield _Chunk(min(left, most), min(left, most) / shares)
            left -= most

    @property
    def _shares(self) -> int:
        """Of how many ranks each encodes a part between hosts."""
        return 1 if self.flat else self.setting.owners

    def _collectives(self, elements: float) -> tuple[Collective, ...]:
        """Of a rank's part, on the link that its host's ranks share."""
        found = collectives(self.cost.exchange, self.cost.wire * elements, self.peers)
        return tuple(replace(each, nbytes=each.nbytes * self._shares) for each in found)

    def _encode(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks[:1]:
            self._up(chunk)
        for chunk, following in zip_longest(chunks, chunks[1:]):
            if following is not None:
                self._up(following)
            # What the ranks of the host have sent of this share is added up.
            self.now = max(self.now, chunk.up) + (0 if self.flat else chunk.elements * self.copy)
            self.now += chunk.share * self.cost.encode * self.pace
            chunk.end = self.wire.send(self.now, self._collectives(chunk.share)[0])
            self.now += self.cpu * self.pace

    def _up(self, chunk: _Chunk) -> None:
        if not self.flat:
            self.now += chunk.elements * self.copy
            chunk.up = self._inside(chunk)

    def _inside(self, chunk: _Chunk) -> float:
        assert self.inner is not None
        leader = self.setting.form == LEADER
        return self.inner.send(self.now, inside(BYTES * chunk.elements, self.local, leader=leader))

    def _reduce(self, chunks: Sequence[_Chunk]) -> None:
        """Every rank adds up its shard as all have encoded it, and encodes the mean."""
        cost = self.cost
        for chunk in chunks:
            self.now = max(self.now, chunk.end)
            self.now += chunk.share * (cost.decode + cost.encode / self.world)
            chunk.end = self.wire.send(self.now, self._collectives(chunk.share)[1])
            self.now += self.cpu

    def _settle(self, chunks: Sequence[_Chunk]) -> None:
        gathers = len(self._collectives(1.0)) == 1 and self.cost.exchange != "allreduce"
        each = self.cost.decoding(self.world if gathers else 1)
        before: _Chunk | None = None
        for chunk in chunks:
            self.now = max(self.now, chunk.end) + chunk.share * each
            if self.flat:
                continue
            self.now += chunk.share * self.copy
            chunk.down = self._inside(chunk)
            self._finish(before)
            before = chunk
        self._finish(before)

    def _finish(self, chunk: _Chunk | None) -> None:
        if chunk is not None:
            self.now = max(self.now, chunk.down) + chunk.elements * self.copy
