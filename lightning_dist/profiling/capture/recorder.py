"""Recorder of one rank: when gradients are ready, encoded, exchanged and decoded.

Compression errors are sampled now and then, on one bucket at a time.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.base.accelerator import DeviceStream
from lightning_dist.measurement.microbenchmark import DeviceClock, HostClock, StreamClock, Timestamp
from lightning_dist.profiling.capture.events import GLOO_AT_ONCE, OF_NO_BUCKET, ErrorRecord
from lightning_dist.ranks.channel import nothing
from lightning_dist.reducer.codec_sample import Sampler
from lightning_dist.reducer.stats import Observer, Phase, Samples
from lightning_dist.reducer.units.base import CodecGroup

_UNSEEN = 3.0
"""Cost of recording for a step, over what can be counted of it: threads change places, caches are
cold. Measured with 40 buckets on two busy cores: 2.2 to 3.4 times (benchmarks/profiler)."""
_TIMEOUT = 0.1
"""Seconds. Where a step is over, so are its collectives; the thread may not have seen the last."""
MOST_SAMPLED = 1 << 18
"""Elements that are looked at, in a few milliseconds on a CPU: smaller buckets as a whole."""


OnCompletion: TypeAlias = Callable[[Timestamp], None]
_Queue: TypeAlias = "queue.SimpleQueue[tuple[dist.Work, OnCompletion] | None]"
Row: TypeAlias = tuple[Any, ...]
"""Values of a record in the order of its fields, with timestamps in the place of times."""
Sample: TypeAlias = Callable[[], ErrorRecord | None]
"""The error of a bucket, when its step is past; None where there is nothing to compare."""
Volume: TypeAlias = tuple[int, int, int, str]
"""Raw, intra and inter bytes of a bucket, and its codec: the last fields of its record."""


class Recorder(Observer):
    """Records buckets and spans of the current step.

    Appends to lists, from the thread of the backward pass, that of the reducer, and one of its own;
    nothing is computed before :meth:`take`.

    Args:
        clock: of the host, in nanoseconds.
        device_clock: of the work; None: of the host, by ``clock``.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        device_clock: DeviceClock | None = None,
    ) -> None:
        self.device_clock: DeviceClock = HostClock(clock) if device_clock is None else device_clock
        self._now = self.device_clock.now
        self.is_on = True
        """Whether anything is recorded, besides compression errors that were asked for."""
        self.errors = CompressionErrorSampler(clock)
        self._completions = (
            StreamCompletionWatcher(self.device_clock)
            if isinstance(self.device_clock, StreamClock)
            else ThreadCompletionWatcher(self.device_clock.now)
        )
        self._ready: dict[int, Timestamp] = {}  # of buckets whose mean nobody has staggered
        self._buckets: list[Row] = []
        self._spans: list[Row] = []
        self._orders: Counter[str] = Counter()
        self._own_orders: Counter[str] = Counter()
        self.blocks = False
        """True if codecs and exchanges block the training thread."""
        self._bucket, self._phase = -1, ""
        self._since: Timestamp = 0
        self.spent = 0
        """Nanoseconds of this step that went into what only a profile needs, on or off."""
        self._looked = 0  # of the thread, before this step
        self.is_closed = False
        self.on_regrouped: Callable[[int, int, str], None] = lambda number, step, reason: None
        """Called with number and first step of a generation, and its reason."""

    @override
    def regrouped(self, generation: int, *, step: int, reason: str) -> None:
        self.on_regrouped(generation, step, reason)

    @override
    def ready(self, bucket: int) -> None:
        if self.is_on:
            self._ready[bucket] = self._now()  # of a pass that is tried again the last counts

    @override
    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        self._bucket = bucket
        if not self.is_on:
            return nothing
        self._phase, self._since = phase, self._now()
        return self._work_ends

    def is_for(self, bucket: int) -> None:
        """Launches from now on are for this bucket."""
        self._bucket = bucket

    def _work_ends(self) -> None:
        row = (self._phase, self._bucket, self._since, self._now(), "", "", 0, -1, self.blocks)
        self._spans.append(row)
        self._phase = ""

    @override
    def waits(self) -> Callable[[], None]:
        if not (self.is_on and self._phase):
            return nothing
        phase = self._phase
        self._work_ends()  # waiting is not work

        def over() -> None:
            self._phase, self._since = phase, self._now()

        return over

    @override
    def launches(
        self, op: str, *, group: str, sent: int, mean: Volume | None = None
    ) -> Callable[[dist.Work], None] | None:
        """A collective begins; ``mean``: of the bucket that is averaged when it ends."""
        order = self._orders[group]
        self._orders[group] = order + 1
        if not self.is_on:
            return None
        bucket, begin = self._bucket, self._now()
        ready = None if mean is None else self._ready.pop(bucket, None)
        # Of this step, also where it is over before this has ended.
        spans, buckets, blocks = self._spans, self._buckets, self.blocks

        def completed(end: Timestamp) -> None:
            spans.append(("exchange", bucket, begin, end, op, group, sent, order, blocks))
            if mean is not None and ready is not None:
                buckets.append((bucket, ready, end, *mean))

        return lambda work: self._completions.watch(work, completed, group=group)

    def collective(
        self,
        op: str,
        *,
        group: str,
        sent: int,
        raw: int = 0,
        bucket: int = OF_NO_BUCKET,
        numel: int = 0,
        codec: str = "",
    ) -> Callable[[dist.Work | None], None]:
        """A collective that FSDP calls itself begins; the arguments are those of a :class:`Span`.

        What is returned is given it once it is under way; None: it is over, on an accelerator for
        the stream of the caller.
        """
        order = self._own_orders[group]
        self._own_orders[group] = order + 1
        if not self.is_on:
            return nothing
        begin, spans = self._now(), self._spans

        def completed(end: Timestamp, blocks: bool = False) -> None:
            how = op, group, sent, order, blocks, raw, numel, codec
            spans.append(("exchange", bucket, begin, end, *how))

        def launched(work: dist.Work | None) -> None:
            if work is None:
                completed(self._now(), self.is_of_host)
            else:
                self._completions.watch(work, completed, group=group)

        return launched

    @override
    def encodes(self, bucket: int, samples: Samples, *, numel: int, scale: Tensor) -> None:
        self.errors.inspect(bucket, samples, numel=numel, scale=scale)

    @override
    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        if not self.is_on:
            return
        done = self._now()
        for index, groups in buckets:
            raw = sum(group.raw_bytes for group in groups)
            sents = [group.sent for group in groups]
            intra, inter = sum(s.intra for s in sents), sum(s.inter for s in sents)
            codec = "+".join(dict.fromkeys(group.codec.name for group in groups))
            self.note(index, done, (raw, intra, inter, codec))

    def note(self, bucket: int, done: Timestamp, mean: Volume) -> None:
        """The mean of a bucket is there; when its gradients were is known already."""
        ready = self._ready.pop(bucket, None)
        if ready is not None:
            self._buckets.append((bucket, ready, done, *mean))

    def cost(self, of_event: float) -> int:
        """Nanoseconds by which recording made this step longer; an event alone takes so many."""
        self._completions.drain(_TIMEOUT)
        events = 2 * (len(self._spans) + len(self._buckets))
        return round(_UNSEEN * (events * of_event + self._completions.spent - self._looked))

    @property
    def is_of_host(self) -> bool:
        """Whether the host waits for work, and no stream."""
        return isinstance(self.device_clock, HostClock)

    @property
    def has_exchanged(self) -> bool:
        """Whether any gradients have travelled in this step, on or off, beside FSDP's own way."""
        return bool(self._orders or self._buckets)

    def take(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """Buckets and spans since the last call, at timestamps that may be to come."""
        self._completions.drain(_TIMEOUT)
        rows = self._buckets, self._spans
        self.drop()
        return rows

    def drop(self) -> None:
        """Forget what was recorded since the last call."""
        self._ready, self._buckets, self._spans = {}, [], []
        self._orders.clear()
        self._own_orders.clear()
        self.spent, self._looked = 0, self._completions.spent

    def close(self) -> None:
        """Record nothing more."""
        self.is_on, self.is_closed = False, True
        self._completions.close()


class StreamCompletionWatcher:
    """Records an event behind each collective, in a stream that waits for it.

    One stream for each group, whose collectives complete in their order. A device has few queues:
    with more streams than these, some share one, and hold up each other.
    """

    def __init__(self, clock: StreamClock) -> None:
        self._device_clock = clock
        self._streams: dict[str, DeviceStream] = {}
        self.spent = 0
        """Nanoseconds of a core that it has taken so far."""

    def watch(self, work: dist.Work, on_completion: OnCompletion, *, group: str) -> None:
        """Call ``on_completion`` with the mark when ``work`` has completed."""
        begin = time.monotonic_ns()
        if group not in self._streams:
            self._streams[group] = self._device_clock.new_stream()
        with self._device_clock.on(self._streams[group]):
            # NCCL's future is done at the launch: the stream waits, not the host. Not of the work,
            # after whose `wait` torch may give away memory that its owner has not waited for.
            work.get_future().wait()
            on_completion(self._device_clock.now())
        self.spent += time.monotonic_ns() - begin

    def drain(self, timeout: float) -> bool:
        """Nothing is waited for."""
        return True

    def close(self) -> None:
        """Nothing is left to do."""


class ThreadCompletionWatcher:
    """Waits for collectives in threads, of each group in as many as gloo runs at once.

    gloo begins those of a group in their order, so these threads wait for just those that are under
    way. A callback would run in the thread of gloo that has done the work: waiting there for the
    interpreter holds up every collective behind it.
    """

    def __init__(self, now: Callable[[], Timestamp]) -> None:
        self._now = now
        self.spent = 0
        """Nanoseconds of a core that it has taken so far."""
        self._given: defaultdict[str, _Queue] = defaultdict(queue.SimpleQueue)
        self._threads: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._pending = 0

    def watch(self, work: dist.Work, on_completion: OnCompletion, *, group: str) -> None:
        """Call ``on_completion`` with the time when ``work`` has completed; not if it fails."""
        with self._changed:
            self._pending += 1
            is_short = self._threads[group] < GLOO_AT_ONCE
            self._threads[group] += is_short
            given = self._given[group]
        given.put((work, on_completion))
        if is_short:
            name = f"comm-completion {group}"
            threading.Thread(target=self._loop, args=(given,), name=name, daemon=True).start()

    def drain(self, timeout: float) -> bool:
        """Wait for all collectives watched so far; False: some are left after ``timeout`` s."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Watch nothing more."""
        # Of a collective that never completes a thread waits on, and holds up nobody.
        for group in self._threads.elements():
            self._given[group].put(None)
        self._threads.clear()
        self._given.clear()

    def _loop(self, given: _Queue) -> None:
        before = 0
        while (task := given.get()) is not None:
            work, on_completion = task
            try:
                work.wait()
            except Exception:  # raised where it is waited for; it is no time of a transfer
                pass
            else:
                on_completion(self._now())
            del work, on_completion, task  # or what was sent lives on until the next one
            after = time.thread_time_ns()
            with self._changed:  # last: a reader that has drained it reads the rest
                self.spent += after - before
                self._pending -= 1
                if not self._pending:
                    self._changed.notify_all()
            before = after


class CompressionErrorSampler:
    """Samples the next bucket in turn, in a step that it is asked for; ``clock``: nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._turn = 0
        self._seen = self._buckets = 0  # in this step, and in the one before
        self._bucket: int | None = None  # that is being encoded
        self._sampler: Sampler | None = None  # of this bucket, if it is sampled
        self._of = 0
        self._squares: list[Tensor] = []
        self._cost = 0

    def ask(self, step: int | None) -> None:
        """Sample a bucket of ``step``, which comes next; None: no bucket."""
        self._step, self._bucket, self._sampler = step, None, None
        self._seen, self._buckets = 0, self._seen or self._buckets

    def inspect(self, bucket: int, samples: Samples, *, numel: int, scale: Tensor) -> None:
        """Take ``samples`` of ``bucket`` if it is its turn."""
        if bucket != self._bucket:
            self._bucket, self._sampler = bucket, None
            number, self._seen = self._seen, self._seen + 1
            if (
                self._step is not None
                and not self._squares
                and number == self._turn % max(self._buckets, 1)
            ):
                self._turn += 1
                # All ranks draw the same elements.
                self._sampler = Sampler(self._step, share=MOST_SAMPLED / max(numel, 1))
                self._of = bucket
        if self._sampler is None:
            return
        begin = self._clock()
        for sample in samples(self._sampler):
            residual = sample.gradient[:0] if sample.residual is None else sample.residual * scale
            lost = sample.compensated - sample.sent
            norms = [
                torch.linalg.vector_norm(tensor, dtype=torch.float64)
                for tensor in (sample.gradient, sample.compensated, sample.sent, lost, residual)
            ]
            has = torch.full_like(norms[0], sample.residual is not None)
            squares = torch.stack([*norms, has]).square()
            self._squares.append(squares.to("cpu", non_blocking=True))
        self._cost += self._clock() - begin

    def take(self) -> tuple[Sample | None, int]:
        """The sample since the last call, and the nanoseconds that it took."""
        sample, cost = None, self._cost
        if self._squares and self._step is not None:
            sample = partial(_error_record, self._step, self._of, self._squares)
        self._squares, self._cost = [], 0
        return sample, cost


def _error_record(step: int, bucket: int, squares: Sequence[Tensor]) -> ErrorRecord | None:
    """Error from squared norms of gradient, input, payload, error, and residual if there is one.

    In float64, on their way from an accelerator until the step is past there. None: there are no
    elements, only zeros, or an overflow.
    """
    gradient, compensated, sent, lost, residual, has = torch.stack(list(squares)).sum(0).tolist()
    if not compensated or not math.isfinite(gradient + compensated + sent + lost + residual):
        return None
    cosine = ratio = None
    if sent:
        product = (compensated + sent - lost) / 2
        # The products of tiny norms are zero before these are.
        cosine = max(-1.0, min(1.0, product / math.sqrt(compensated) / math.sqrt(sent)))
    if has and gradient:
        ratio = math.sqrt(residual) / math.sqrt(gradient)
    return ErrorRecord(step, bucket, math.sqrt(lost / compensated), cosine, ratio)
