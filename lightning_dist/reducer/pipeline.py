"""Path of a gradient: slices -> (+ residual) -> encode -> exchange -> decode, in place.

Immediate update: the residual is written in the pass that encodes, and a tensor is decoded while
the next one is on its way. Deferred update: the residual is written once the step is known to be
finite on every rank, so that an overflow under a GradScaler leaves no trace. That is known when the
step is finished; until then tensors keep their local gradients and the received payloads wait
(``step_end.py``). Finite steps are the same bits under both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lightning_dist.ranks.failures import is_of_collective
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.network import Executor, Network
from lightning_dist.reducer.plan.planner import Handle, Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.stats import CommStats, Observer, show_encoding, working
from lightning_dist.reducer.step_end import (
    Adjustment,
    Answer,
    DelayedMeans,
    Recovery,
    add_residuals,
    agree,
    clip_group,
    decode,
    require_equal_hyperparameters,
    sum_of_bits,
)
from lightning_dist.reducer.units.base import CodecGroup, decode_all, staggered
from lightning_dist.settings.exchange import ExchangeSettings

_COMPARED_EVERY = 100


def _compares_hyperparameters(step: int) -> bool:
    """True after the first step and every 100 steps, as the host waits for a GPU there."""
    return step == 1 or (step > 0 and step % _COMPARED_EVERY == 0)


class Pipeline:
    """Steps of a :class:`~lightning_dist.reducer.reducer.Reducer`, which documents the arguments.

    :meth:`start`, :meth:`finish` and :meth:`abandon` are called by the training and submit the
    methods that follow them to the executor. One tensor is encoded while others travel.
    """

    planner: Planner
    _executor: Executor
    keeps_state: bool
    """Whether any codec of the settings keeps state from one step to the next."""

    def __init__(
        self,
        *,
        settings: ExchangeSettings,
        network: Network,
        state: ReducerState | None,
        grad_scale: Callable[[], Tensor | None] | None,
        allow_absent: bool,
        sharded: bool,
        observers: Sequence[Observer],
    ) -> None:
        self.settings, self.network = settings, network
        self.state = ReducerState() if state is None else state
        self.adjustment: Adjustment | None = None
        """Changes local gradients before they are compressed, and says from when on they are."""
        self.stats = CommStats()
        self.step = 0  # synchronised steps so far
        self.arrivals = 0
        """Number of times that this rank has needed the others."""
        self.closed = False
        self.answer = Answer()
        """Agreement of the ranks on the last applied step."""
        self.hyperparameters: Callable[[], Mapping[str, str]] | None = None
        """Hyperparameters of the optimizers that apply the means, which ranks compare."""
        self.immediate = settings.state_update == "immediate" or (
            settings.state_update == "auto" and not allow_absent and grad_scale is None
        )
        """Whether state is written when it is encoded, not when the step is finished."""
        assert not (self.immediate and allow_absent), "what is absent everywhere is known too late"
        self._observers = list(observers)  # changed by this thread and by that of the executor
        self._recovery: Recovery | None = None
        self._delayed = DelayedMeans(settings.start_step if settings.delay else None)
        self._in_flight: list[Handle] = []
        self._grad_scale, self._allow_absent, self._sharded = grad_scale, allow_absent, sharded
        self._asks = False  # whether this step's residuals depend on a consensus
        self._finite: list[Tensor] = []
        self._sums: list[Tensor] = []  # to be compared with those of the other ranks
        self._scale = torch.ones((), dtype=torch.float32, device=network.device)

    def start(
        self,
        flat: Tensor,
        slices: Sequence[ParameterSlice],
        *,
        key: int,
        absent: Collection[str] = (),
    ) -> Handle:
        """Start averaging ``flat (N,)`` over all ranks, in place. Returns before it is exchanged.

        Collective: every rank calls it for the same tensors in the same order, and then
        :meth:`finish`.

        Args:
            slices: where every parameter, or part of one, lies in ``flat``; together they fill it,
                but for the padding of shards.
            key: of this tensor among those of a step. The plan of a key is used again while
                ``slices`` stay the same. A tensor that is in other memory at every step is copied
                to memory of the reducer and back.
            absent: names of slices that this rank has no gradient for. A slice that is absent on
                every rank keeps its contents and its state; needs ``allow_absent``.
        """
        assert self._allow_absent or not absent, "absent slices need allow_absent=True"
        self._require_open()
        self.arrivals += 1
        handle = Handle(key, flat, slices, frozenset(absent))
        if self.network.world_size == 1:
            if self._delayed.swap(handle, step=self.step) is handle:
                handle.done.set_result(flat)
            return handle
        for observer in self._observers:
            observer.ready(key)
        self._executor.submit(partial(self._guarded, partial(self._start, handle), handle))
        return handle

    def finish(self) -> None:
        """End the step: every tensor that was started gets its mean, and state is written.

        Returns before that is done; the futures of the handles are ready then.
        """
        self._require_open()
        self.arrivals += 1
        if self.network.world_size == 1:
            self.answer = Answer(pauses=self._wants_pause)
            self._end_step()
        else:
            self._executor.submit(partial(self._guarded, self._finish))

    def abandon(self) -> None:
        """Give up a step that was started and will not be finished.

        Under the immediate update the payloads that were sent are lost; under the deferred one no
        state changes.
        """
        if self.network.world_size > 1 and not self.closed:
            self._executor.submit(partial(self._guarded, self._abandon))

    def note_uncompressed(self, sent: Sent, *, finite: Tensor) -> None:
        """Count what an adapter itself sends in this step, as DDP would.

        Args:
            finite: whether it is, on this rank: a GradScaler skips the step if not.
        """
        if self.network.world_size > 1:
            self._executor.submit(partial(self._note_uncompressed, sent, finite))

    def _note_uncompressed(self, sent: Sent, finite: Tensor) -> None:
        self.stats.record("none", sent.total, sent)
        self._finite.append(finite)

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError(
                "lightning_dist: gradients cannot be averaged by a reducer that is closed; call "
                "close() after the last step, or compress a newly wrapped model"
            )

    def _start(self, handle: Handle) -> None:
        handle = self._delayed.swap(handle, step=self.step)
        self._enter(handle)
        plan = self.planner.find(
            handle.key,
            handle.given,
            handle.slices,
            step=self.step,
            turn=len(self._in_flight) % 2,
            waiting=self._waits,
        )
        # State may change in a step that is not applied in the end; see `_finish`.
        undoes = self.immediate or self.network.intra is not None
        handle.load(plan, keeps_state=self.recovers and undoes)
        self._adjust(handle)
        with working(self._observers, handle.key, "encode"):
            for unit in staggered(handle.units()):
                unit.receive()
                show_encoding(self._observers, handle, unit, self._scale, step=self.step)
                unit.encode(self._scale, step=self.step)
                if self._asks:
                    self._finite.append(unit.finite())
                unit.start()
        before = self._in_flight[:-1]
        if self.immediate and before:  # while this one is on its way
            self._decode(before[-1])
            if not self.recovers:  # else it is not known yet whether the step is applied
                before[-1].done.set_result(before[-1].given)
        with working(self._observers, handle.key, "decode"):
            for unit in handle.units():
                unit.start_second()

    def _finish(self) -> None:
        handles = self._in_flight
        rest = handles[-1:] if self.immediate else []

        def decode_rest() -> None:
            while rest:
                self._decode(rest[-1])
                rest.pop()  # now: what has failed is not left out

        # Means come from other ranks of the node, which may be lost after the vote.
        before_the_vote = self.network.intra is not None
        if before_the_vote or not self.recovers:
            decode_rest()
        if before_the_vote and self.recovers and not self.immediate:
            for handle in handles:
                with working(self._observers, handle.key, "decode"):
                    decode_all(handle.units(), self._scale)
        answer = self._agree(handles, meanwhile=decode_rest)
        decode_rest()
        if not self.immediate:
            for handle in handles:
                self._decode(handle, unused=answer.unused, finite=answer.finite)
        self.answer = answer
        for observer in tuple(self._observers):
            observer.finished([(handle.key, handle.groups) for handle in handles])
            if observer.done:
                self._forget(observer)
        self._in_flight = []
        self._end_step()
        # Not before: a caller that waits for the last mean begins the next step.
        for handle in handles:
            if not handle.done.done():
                handle.done.set_result(handle.given)
        for handle in handles:
            handle.keep()

    def _decode(self, handle: Handle, *, unused: Collection[str] = (), finite: bool = True) -> None:
        with working(self._observers, handle.key, "decode"):
            before = None if self.immediate else handle.before
            decode(handle, self.state, self._scale, unused=unused, finite=finite, before=before)
            for group in handle.groups:
                self._count(group, handle.flat, compare=finite)
            handle.restore(unused)
            handle.store()

    def _count(self, group: CodecGroup, flat: Tensor, *, compare: bool) -> None:
        self.stats.record(group.codec.name, group.raw_bytes, group.sent)
        if self.step % _COMPARED_EVERY == 0 and compare and not group.codec.bit_exact:
            self._sums.append(sum_of_bits(group, flat))  # unequal machines may differ

    def _end_step(self) -> None:
        self.step += 1
        self.state.end_step()
        self.stats.end_step()

    def _abandon(self) -> None:
        # Payloads must land before their buffers are used again.
        for handle in self._in_flight:
            for unit in () if handle.done.done() else handle.units():
                unit.wait()
        self._give_up()
        self._delayed.clear()  # some of its means are in buckets that are not applied

    def _give_up(self) -> list[Handle]:
        """Undo the step, as far as state was kept; the tensors that were in flight."""
        handles, self._in_flight = self._in_flight, []
        for handle in handles:
            handle.undo()
        self._finite, self._sums = [], []
        self.stats.drop_step()
        return handles

    def _agree(self, handles: Sequence[Handle], *, meanwhile: Callable[[], None]) -> Answer:
        """Agreement of all ranks on the step of ``handles``; nobody is asked without need.

        Args:
            meanwhile: what can be done while a recovery votes, with all payloads here.
        """
        finite, self._finite = self._finite, []
        sums, self._sums = self._sums, []
        if self._sharded and sums:  # which only ranks with the same shard have in common
            agree([], {}, sums, self.planner.network)
            sums = []
        if self.hyperparameters is not None and _compares_hyperparameters(self.step):
            require_equal_hyperparameters(self.hyperparameters(), self.network)
        recovery = self._recovery
        if not (self._allow_absent or self._asks or sums or recovery is not None):
            return Answer()
        used = {
            part.name: part.name not in handle.absent
            for handle in (handles if self._allow_absent else ())
            for group in handle.groups
            for part in group.slices
        }
        # A rank that has the answer must know that all others can apply the step without any help.
        for handle in () if recovery is None else handles:
            for unit in handle.units():
                unit.wait()
        try:
            pauses = self._wants_pause
            return agree(finite, used, sums, self.network, pauses=pauses, meanwhile=meanwhile)
        except RuntimeError as error:
            if recovery is None or not is_of_collective(error):
                raise
            self._note(error)
            result = recovery.vote_result()
            if result is None:
                raise
            return Answer(finite=result)

    def _enter(self, handle: Handle) -> None:
        if not self._in_flight:
            scale = None if self._grad_scale is None else self._grad_scale()
            self._scale.fill_(1.0) if scale is None else self._scale.copy_(scale)
            has_state = self.keeps_state or bool(self.state.names("residual"))
            self._asks = has_state and not self.immediate
        self._in_flight.append(handle)

    def _adjust(self, handle: Handle) -> None:
        for group in handle.groups:
            clip_group(group, handle.flat, self._scale, world_size=self.network.world_size)
            if self.adjustment is not None and self.adjustment.active:
                self.adjustment(group.slices, handle.flat, self._scale)
            if not self._waits and "residual" not in self.planner.kinds(group.codec):
                of = self.state, self.planner.network, self._scale
                add_residuals(group, handle.flat, *of, sharded=self._sharded)

    @property
    def _waits(self) -> bool:
        """Whether compression has not started."""
        return self.adjustment is not None and not self.adjustment.active

    def _guarded(self, task: Callable[[], None], handle: Handle | None = None) -> None:
        try:
            if self.failure is not None:
                raise RuntimeError(f"An earlier exchange failed: {self.failure}") from self.failure
            task()
        except BaseException as error:  # of any kind: a future that is left pending blocks DDP
            self._note(error)
            self._end([*self._give_up(), *([] if handle is None else [handle])], error)

    def _note(self, error: BaseException) -> None:
        """Record ``error``, after which nothing is exchanged, and report it to the recovery."""
        if self.failure is not None:
            return
        self._executor.failure = error
        if self._recovery is not None and self._failure_is_recovered:
            assert isinstance(error, RuntimeError)
            self._recovery.failed(error)

    def _end(self, waiting: Iterable[Handle], error: BaseException) -> None:
        """Complete ``waiting`` tensors: as they are under recovery, else with ``error``."""
        for handle in waiting:
            if handle.done.done():
                continue
            if self._failure_is_recovered:
                handle.done.set_result(handle.given)
                continue
            failed = RuntimeError(f"lightning_dist: {error}")
            handle.done.set_exception(failed)  # type: ignore[arg-type]  # the stub is wrong

    @property
    def _failure_is_recovered(self) -> bool:
        """True if recovery handles the failure, which is that of a collective."""
        return self.recovers and self.failure is not None and is_of_collective(self.failure)

    @property
    def _wants_pause(self) -> bool:
        """True if this rank asks all ranks to stop after this step."""
        return self._recovery is not None and self._recovery.pauses()

    @property
    def failure(self) -> BaseException | None:
        """First error of an exchange; nothing is exchanged after it."""
        return self._executor.failure

    @property
    def recovers(self) -> bool:
        """Whether a step that fails is taken again."""
        return self._recovery is not None

    def _forget(self, observer: Observer) -> None:
        with suppress(ValueError):  # the other thread has removed it
            self._observers.remove(observer)
