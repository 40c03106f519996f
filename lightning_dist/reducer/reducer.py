"""The way of a gradient: bucket -> (+ residual) -> encode -> exchange -> decode -> bucket.

The residual is kept only once the step is known to be finite on every rank, so that an overflow
under a GradScaler leaves no trace. That is known when the last bucket has been encoded; until then
buckets keep their local gradients and the received payloads wait. If it is not finite, the residual
of a parameter is kept once an optimizer has applied its gradient (``commit.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.accelerator import is_accelerator
from lightning_dist.codecs import NoCompression
from lightning_dist.reducer.adjust import Adjustment, clip_lane
from lightning_dist.reducer.chunk import Lane, begun
from lightning_dist.reducer.commit import PendingCommit
from lightning_dist.reducer.executor import executor_for
from lightning_dist.reducer.flush import add_owed
from lightning_dist.reducer.job import Bucket, Job
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.observer import Observer, encoded_buckets, working
from lightning_dist.reducer.plan import Planner
from lightning_dist.reducer.policy import matrices, slots_by_codec
from lightning_dist.reducer.run_config import run_config
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.stats import CommStats
from lightning_dist.reducer.store import STATE_VERSION, Store, Stripes, check_state
from lightning_dist.reducer.strides import as_laid_out_here, strides_in_bucket
from lightning_dist.reducer.usage import Usage
from lightning_dist.reducer.verdict import Verdict, settle_lane, sum_of_bits
from lightning_dist.settings import Settings

_COMPARED_EVERY = 100


class Reducer:
    """Replaces DDP's allreduce. One per DistributedDataParallel.

    Args:
        names: name of every parameter.
        state: to go on from; empty by default.
        grad_scale: the current scale of a GradScaler as a 0-d tensor, or None for 1. Residuals are
            kept unscaled, so that a change of the scale does not change their weight.
        find_unused: whether DDP looks for parameters without a gradient.
        observers: are told how a step goes, but not of single collectives.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        *,
        settings: Settings,
        network: Network,
        state: ReducerState | None = None,
        grad_scale: Callable[[], Tensor | None] = lambda: None,
        find_unused: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.settings, self.network = settings, network
        self.state = ReducerState() if state is None else state
        self.adjustment: Adjustment | None = None
        """Changes local gradients before they are compressed, and says from when on they are."""
        self.stats = CommStats()
        self.step = 0  # synchronised steps so far
        self.closed = False
        self.at_close: list[Callable[[], None]] = []
        self.never_compressed: finalize[..., Any] | None = None  # says so at the end
        self._observers: tuple[Observer, ...] = tuple(observers)
        self.names, self._grad_scale = names, grad_scale
        self.strides = {name: strides_in_bucket(parameter) for parameter, name in names.items()}
        self._policy = settings.policy
        self._usage = Usage(names) if find_unused else None
        shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
        self.planner = Planner(
            network,
            self.state,
            error_feedback=settings.error_feedback,
            intra=settings.intra,
            whole=matrices(self._policy, shapes),
        )
        self._keeps_state = any(map(self.planner.keeps_state, self._policy.leaves()))
        self._asks = self._keeps_state  # whether this step's residuals depend on a verdict
        self._trained = {name for parameter, name in names.items() if parameter.requires_grad}
        self._plans: dict[int, tuple[object, Sequence[Lane]]] = {}
        self._executor = executor_for(network.device)
        self._in_flight: list[Job] = []
        self._finite: list[Tensor] = []
        self._sums: list[Tensor] = []  # to be compared with those of the other ranks
        self._scale = torch.ones((), dtype=torch.float32, device=network.device)
        self._failure: BaseException | None = None
        self._pending = PendingCommit(names)

    def reduce_bucket(self, bucket: Bucket) -> Future[Tensor]:
        """Start averaging ``bucket.buffer() (N,)`` over all ranks, in place.

        The future is ready with that buffer when the whole step is. Collective: every rank calls it
        for the same buckets in the same order.
        """
        in_streams = is_accelerator(self.network.device)
        done: Future[Tensor] = Future(devices=[self.network.device] if in_streams else [])
        job = Job(bucket.index(), bucket.is_last(), bucket.buffer(), bucket.parameters(), done)
        if self.network.world_size == 1:
            if job.is_last:
                self.step += 1
                self.stats.end_step()
            done.set_result(job.gradients)
            return done
        for observer in self._observers:
            observer.ready(job.index)
        self._executor.submit(partial(self._guarded, job))
        if not in_streams:
            # A future carries an exception to DDP's C++ side only through `then`.
            return done.then(_value)
        if self._failure is not None:  # the task has run; DDP would call the error no tensor
            raise RuntimeError(f"lightning_dist: {self._failure}") from self._failure
        return done

    def _process(self, job: Job) -> None:
        self._enter(job)
        job.lanes = self._lanes(job)
        if self._usage is not None:
            job.keep_unused(self._usage)
        self._adjust(job)
        with working(self._observers, job.index, "encode"):
            for chunk in begun(job.chunks()):
                chunk.encode(self._scale, step=self.step)
                if self._asks:
                    self._finite.append(chunk.finite())
                chunk.issue()
        verdict = self._ask() if job.is_last else None
        with working(self._observers, job.index, "decode"):
            for chunk in job.chunks():
                chunk.advance()
        if job.is_last:
            self._settle(verdict)

    def _settle(self, verdict: Verdict | None) -> None:
        """Decode every bucket of the step and commit its state, where all ranks were finite."""
        jobs = self._in_flight
        if verdict is not None:
            verdict.require_equal()
        pending = None if verdict is None or verdict.ok() else self._pending
        unused = set() if verdict is None else verdict.unused()
        looked = [
            observer.looks(encoded_buckets(jobs, self._scale)) for observer in self._observers
        ]
        for job in jobs:
            with working(self._observers, job.index, "decode"):
                for lane in job.lanes:
                    settle_lane(
                        lane,
                        job.gradients,
                        self.state,
                        scale=self._scale,
                        unused=unused,
                        pending=pending,
                    )
                    self.stats.record(lane.codec.name, lane.raw_bytes, lane.sent)
                    if self.step % _COMPARED_EVERY == 0 and pending is None:
                        self._compare(lane, job.gradients)
                    job.restore(lane, unused)
        for over in looked:
            over()
        for observer in self._observers:
            observer.settled([(job.index, job.lanes) for job in jobs])
        self._observers = tuple(each for each in self._observers if not each.done)
        self.step += 1
        self.stats.end_step()
        self._in_flight = []
        for job in jobs:
            job.done.set_result(job.gradients)

    def _ask(self) -> Verdict | None:
        lanes = [lane for job in self._in_flight for lane in job.lanes]
        finite, self._finite = self._finite, []
        if self._usage is None and not self._asks:
            return None  # nothing to decide
        used: dict[str, bool] = {}
        if self._usage is not None:
            here = self._usage.take()
            used = {slot.name: slot.name in here for lane in lanes for slot in lane.slots}
        sums, self._sums = self._sums, []
        return Verdict(finite, used, sums, self.network)

    def _compare(self, lane: Lane, gradients: Tensor) -> None:
        """With the other ranks, in the next verdict, where unequal machines may differ."""
        if not lane.codec.bit_exact:
            self._sums.append(sum_of_bits(lane, gradients))

    def _enter(self, job: Job) -> None:
        if self._in_flight and job.index <= self._in_flight[-1].index:
            # The last backward was cut short by an exception. Its payloads must land before their
            # buffers are used again; its residuals were never touched.
            for chunk in [chunk for stale in self._in_flight for chunk in stale.chunks()]:
                chunk.wait()
            self._in_flight, self._finite = [], []
        if not self._in_flight:
            self._pending.drop()
            scale = self._grad_scale()
            self._scale.fill_(1.0) if scale is None else self._scale.copy_(scale)
            self._asks = self._keeps_state or not self._trained.isdisjoint(
                self.state.residuals.names()
            )
        self._in_flight.append(job)

    def _lanes(self, job: Job) -> Sequence[Lane]:
        waiting = self.adjustment is not None and not self.adjustment.active
        policy = NoCompression() if waiting else self._policy
        stage = (waiting, policy.stage(self.step))
        key = (job.gradients.data_ptr(), tuple(map(id, job.parameters)), stage)
        cached_key, lanes = self._plans.get(job.index, (None, ()))
        if key == cached_key:
            return lanes
        # DDP has rebuilt its buckets, or the policy changes: free what belonged to the old ones.
        for index in [index for index in self._plans if index >= job.index]:
            del self._plans[index]
        names = [self.names[parameter] for parameter in job.parameters]
        slots_of = slots_by_codec(
            policy,
            names,
            job.parameters,
            step=self.step,
            filling=job.gradients.numel(),
            affordable=partial(self.planner.affordable, dtype=job.gradients.dtype),
        )
        lanes = [
            self.planner.lane(codec, slots, job.gradients, waits=waiting)
            for codec, slots in slots_of.items()
        ]
        self._plans[job.index] = (key, lanes)
        return lanes

    def _adjust(self, job: Job) -> None:
        for lane in job.lanes:
            clip_lane(lane, job.gradients, self._scale, world_size=self.network.world_size)
            if self.adjustment is not None and self.adjustment.active:
                self.adjustment(lane.slots, job.gradients, self._scale)
            add_owed(lane, job.gradients, self.state, self.network, self._scale)

    def _guarded(self, job: Job) -> None:
        try:
            if self._failure is not None:
                raise RuntimeError("an earlier exchange failed") from self._failure
            self._process(job)
        except BaseException as error:  # every waiting future must hear of it, whatever it is
            self._failure = self._failure or error
            waiting, self._in_flight = self._in_flight, []
            for waiter in waiting if job in waiting else [*waiting, job]:
                failed = RuntimeError(f"lightning_dist: {error}")
                waiter.done.set_exception(failed)  # type: ignore[arg-type]  # the stub is wrong

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of everything, collectives too, from the next bucket on."""
        self._observers = *self._observers, observer
        for channel in self.network.channels:
            channel.watch = observer

    @property
    def is_watched(self) -> bool:
        """Whether somebody is told of everything."""
        return any(channel.watch is not None for channel in self.network.channels)

    def detach(self, observer: Observer) -> None:
        """Tell ``observer`` nothing more."""
        self._observers = tuple(each for each in self._observers if each is not observer)
        for channel in self.network.channels:
            channel.watch = None

    @property
    def residuals(self) -> Store:
        """What this rank still owes, by parameter name."""
        return self.state.residuals

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent: totals, ``last_step`` and ``per_codec``; see the guide."""
        return self.stats.as_mapping()

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, hosts and versions, for the configuration of a tracked run."""
        return run_config(self.settings, self.network)

    @property
    def in_step(self) -> bool:
        """Whether the groups can be used again: no exchange has failed or was left half done."""
        return self._failure is None and not self._in_flight

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes`` and the payloads' ``buffer_bytes``."""
        chunks = [c for _, lanes in self._plans.values() for lane in lanes for c in lane.chunks]
        return {
            "residual_bytes": self.state.nbytes,
            "buffer_bytes": sum(chunk.nbytes for chunk in chunks) + self.planner.nbytes,
        }

    def state_dict(self) -> dict[str, Any] | None:
        """State of all ranks on rank 0, None elsewhere. Collective; between backward passes.

        Tensors and plain values only: ``{"version", "world_size", "step", "residuals"}``, residuals
        as ``{parameter name: (W, numel)}`` on the CPU, unscaled; with a hierarchical exchange one
        row per outermost group. Rows lie as their parameter does in memory; ``"strides"`` has those
        of parameters that are not row-major. With ``dgc`` also ``"momenta"``, with ``powersgd``
        ``"factors"``.
        """
        network = self.network
        state = self.state.gather(network.data.group, network.rows, device=network.device)
        return None if state is None else self._described(state)

    def striped_state_dict(self) -> tuple[dict[str, Any], list[Stripes]]:
        """:meth:`state_dict` on every rank, with what differs between ranks left where it is.

        The tensors of the state are empty memory; the stripes say which part of each this rank has.
        """
        network = self.network
        state, stripes = self.state.striped(network.data.group, network.rows, device=network.device)
        return self._described(state), stripes

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        strides = {name: list(found) for name, found in self.strides.items() if found is not None}
        about = {"world_size": self.network.world_size, "step": self.step, "strides": strides}
        return {"version": STATE_VERSION, **about, **state}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh.

        With another number of rows every rank starts from the mean residual.
        """
        self._plans.clear()  # they hold views of the old residuals
        self._pending.drop()
        if state is None:
            self.state.load({}, self.network.rows)
            self.step = 0
            return
        check_state(state)
        self.state.load(as_laid_out_here(state, self.names), self.network.rows)
        self.step = int(state["step"])

    def close(self) -> None:
        """Stop the worker and take the residuals off the accelerator.

        The process groups stay, and so does :meth:`state_dict`.
        """
        self.closed = True
        for call in self.at_close:
            call()
        self.at_close.clear()
        self._executor.close()
        self._pending.close()
        if self._usage is not None:
            self._usage.close()
        self._plans.clear()
        self.state.to(torch.device("cpu"))


def _value(done: Future[Tensor]) -> Tensor:
    return done.value()
