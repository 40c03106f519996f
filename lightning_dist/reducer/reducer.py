"""The way of a gradient: slices -> (+ residual) -> encode -> exchange -> decode, in place.

Immediate commit: the residual is written in the pass that encodes, and a tensor is decoded while
the next one is on its way. Deferred commit: the residual is written once the step is known to be
finite on every rank, so that an overflow under a GradScaler leaves no trace. That is known when the
step is finished; until then tensors keep their local gradients and the received payloads wait
(``commit.py``). Finite steps are the same bits under both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.accelerator import is_accelerator
from lightning_dist.log import get_logger
from lightning_dist.reducer.adjust import Adjustment, add_owed, clip_group
from lightning_dist.reducer.commit import (
    Answer,
    DriftError,
    Kept,
    agree,
    decode_groups,
    kept_of,
    put_back,
    sum_of_bits,
)
from lightning_dist.reducer.delayed import DelayedMeans
from lightning_dist.reducer.executor import Executor, executor_for
from lightning_dist.reducer.failures import Failures, Recovery
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.observer import Observer, show_encoding, working
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.plans import Handle, Plans
from lightning_dist.reducer.plan.slices import (
    ParameterSlice,
    as_real,
    matrices,
    require_strides,
    strides_in_bucket,
)
from lightning_dist.reducer.state import (
    STATE_VERSION,
    ReducerState,
    Stripes,
    own_keys,
)
from lightning_dist.reducer.stats import CommStats, run_config
from lightning_dist.reducer.units.base import CodecGroup, decode_all, staggered
from lightning_dist.settings import Settings
from lightning_dist.topology import Topology

log = get_logger(__name__)

_COMPARED_EVERY = 100
_PATIENCE = 0.5
"""Seconds that a step under way is given where the reducer is closed."""
_ACCELERATOR_PATIENCE = 60.0
"""The same for kernels that an accelerator has not come to; one that hangs does not end."""


class Reducer:
    """Averages flat tensors made of named slices over the ranks of a network, compressed.

    A step is :meth:`start` for every tensor, then :meth:`finish`. Adapters make the tensors:
    DistributedDataParallel's buckets come from ``integrations.torch.buckets``. Several reducers may
    be in the middle of a step at once, each with tensors and state of its own; over the same
    network they share an executor, and all ranks call them in the same order.

    Args:
        names: name of every parameter that a slice may be of.
        state: to go on from; empty by default.
        grad_scale: the current scale of a GradScaler as a 0-d tensor, or None for 1; None: there is
            no GradScaler. Residuals are kept unscaled, so that a change of the scale does not
            change their weight.
        allow_absent: whether slices may be absent on some ranks, equal on all ranks.
        sharded: tensors hold this rank's shard of the mean of its host already, as after FSDP's
            reduce-scatter; they are averaged over the ranks with the same shard.
        observers: are told how a step goes, but not of single collectives.
        executor: one that other reducers use too, which is not closed with this one; by default one
            of its own.
        in_order: see :func:`executor_for`, which makes one of its own.
        prefix: of the keys of :meth:`state_dict`, so that those of several reducers fit in one
            dictionary.
    """

    def __init__(
        self,
        names: Mapping[Tensor, str],
        *,
        settings: Settings,
        network: Network,
        state: ReducerState | None = None,
        grad_scale: Callable[[], Tensor | None] | None = None,
        allow_absent: bool = False,
        sharded: bool = False,
        observers: Sequence[Observer] = (),
        executor: Executor | None = None,
        in_order: bool = False,
        prefix: str = "",
    ) -> None:
        self.settings, self.network = settings, network
        self.state = ReducerState() if state is None else state
        self.adjustment: Adjustment | None = None
        """Changes local gradients before they are compressed, and says from when on they are."""
        self.stats = CommStats()
        self.step = 0  # synchronised steps so far
        self.generation = 0  # networks before this one
        self.arrivals = 0
        """Number of times that this rank has needed the others."""
        self.closed = False
        self.answer = Answer()
        """Agreement of the ranks on the last committed step."""
        self.at_close: list[Callable[[], None]] = []
        self.never_compressed: finalize[..., Any] | None = None  # says so at the end
        self._observers = list(observers)  # changed by this thread and by that of the executor
        self.names, self._grad_scale = names, grad_scale
        self.strides = {name: strides_in_bucket(parameter) for parameter, name in names.items()}
        self._policy = settings.policy
        self._allow_absent, self._sharded = allow_absent, sharded
        may_be_undone = allow_absent or grad_scale is not None
        self.immediate = settings.commit == "immediate" or (
            settings.commit == "auto" and not may_be_undone
        )
        """Whether state is committed when it is encoded, not when the step is finished."""
        assert not (self.immediate and allow_absent), "what is absent everywhere is known too late"
        self._delayed = DelayedMeans(settings.start_step if settings.delay else None)
        self._shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
        self._plans = self._make_plans()
        self._keeps_state = any(map(self.planner.keeps_state, self._policy.leaves()))
        self._asks = False  # whether this step's residuals depend on a consensus
        self._reserved: list[tuple[Sequence[ParameterSlice], torch.dtype]] = []
        self._prefix, self._in_order = prefix, in_order
        self._failures = Failures()
        self._use(executor)
        self._in_flight: list[Handle] = []
        self._finite: list[Tensor] = []
        self._sums: list[Tensor] = []  # to be compared with those of the other ranks
        self._scale = torch.ones((), dtype=torch.float32, device=network.device)

    def _make_plans(self) -> Plans:
        network = self.network
        if self._sharded and network.intra is not None:
            assert network.intra.inter is not None, "every rank goes on with its shard"
            network = network.intra.inter
        return Plans(
            self.planner_for(network),
            self._policy,
            self._shapes,
            share_memory=self.immediate,
            padded=self._sharded,
        )

    def planner_for(self, network: Network) -> Planner:
        """A planner of these settings and this state."""
        return Planner(
            network,
            self.state,
            error_feedback=self.settings.error_feedback,
            intra_codec=self.settings.intra,
            whole=matrices(self._policy, self._shapes),
            immediate=self.immediate,
            tables=self.settings.compile_kernels is not False,
            divide_last=self._sharded,
        )

    @property
    def planner(self) -> Planner:
        return self._plans.planner

    @property
    def has_grad_scaler(self) -> bool:
        """Whether gradients are scaled."""
        return self._grad_scale is not None

    @property
    def failure(self) -> BaseException | None:
        """The first error of an exchange; nothing is exchanged after it."""
        return self._failures.first

    def reserve(self, slices: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
        """Allocate what will be kept of ``slices`` under the codecs of this step.

        What is not reserved is allocated when it is first needed, at the peak of a backward pass.

        Args:
            dtype: of the tensors that they will be slices of.
        """
        self._reserved.append((slices, dtype))
        if self.network.world_size > 1:
            self._plans.reserve(slices, dtype, step=self.step)

    def _reserve_again(self) -> None:
        reserved, self._reserved = self._reserved, []
        for slices, dtype in reserved:
            with suppress(ValueError):  # state of another model: the next step says so
                self.reserve(slices, dtype)

    def leave_failures_to(self, recovery: Recovery) -> None:
        """From now on an exchange that fails does not raise, and ``recovery`` decides.

        A tensor whose exchange has failed stays as it is; where the exchange is hierarchical its
        contents are lost. :attr:`step` tells whether a step was committed, which is known as soon
        as the futures of its tensors are ready; if it was not, all state is as before it. After a
        failure nothing is exchanged until :meth:`rebind`.

        Raises:
            ValueError: a setting with which steps cannot be committed without other ranks.
        """
        if self.immediate:
            raise ValueError(
                "A step that fails can be taken again only under the deferred commit; use "
                "compress_ddp(..., commit='deferred')"
            )
        if self._allow_absent:
            raise ValueError(
                "With find_unused_parameters=True DDP itself asks other ranks in a backward pass, "
                "which fails where one is lost; leave it out, and use every parameter"
            )
        if self._sharded:
            raise ValueError(
                "A step that fails can be taken again only where every rank has the whole model, "
                "and these are shards, of which a lost rank takes its own with it; use "
                "DistributedDataParallel"
            )
        self._failures.recovery = recovery

    def start(
        self,
        flat: Tensor,
        slices: Sequence[ParameterSlice],
        *,
        key: int,
        absent: Collection[str] = (),
    ) -> Handle:
        """Start averaging ``flat (N,)`` over all ranks, in place. Returns before it has travelled.

        Collective: every rank calls it for the same tensors in the same order, and then
        :meth:`finish`.

        Args:
            slices: where every parameter, or part of one, lies in ``flat``; together they fill it,
                but for the padding of shards.
            key: of this tensor among those of a step. What was worked out for a key is used again
                while ``slices`` stay as they are. A tensor that is in other memory at every step is
                copied to memory of the reducer and back.
            absent: names of slices that this rank has no gradient for. A slice that is absent on
                every rank keeps its contents and its state; needs ``allow_absent``.
        """
        assert self._allow_absent or not absent, "absent slices need allow_absent=True"
        self._require_open()
        self.arrivals += 1
        handle = Handle(key, flat, slices, frozenset(absent), self._future())
        if self.network.world_size == 1:
            if self._swapped(handle) is handle:
                handle.done.set_result(flat)
            return handle
        for observer in self._observers:
            observer.ready(key)
        self._executor.submit(partial(self._guarded, partial(self._start, handle), handle))
        return handle

    def _future(self) -> Future[Any]:
        device = self.network.device
        return Future(devices=[device] if is_accelerator(device) else [])

    def _swapped(self, handle: Handle) -> Handle:
        """Handle to start instead of ``handle``, which is done where means are delayed."""
        return self._delayed.swap(handle, step=self.step, future=self._future)

    def wait(self) -> None:
        """Wait for the means of a step that are delayed; those of others are waited for.

        Raises:
            RuntimeError: the exchange has failed.
        """
        if not self._delayed.active or self.network.world_size == 1 or self.closed:
            return
        landed = self._future()
        # Of a tensor: a future waits for the streams of what is in it.
        self._executor.submit(partial(landed.set_result, self._scale))
        landed.wait()
        if self.failure is not None:
            raise RuntimeError(f"lightning_dist: {self.failure}") from self.failure

    def finish(self) -> None:
        """End the step: every tensor that was started gets its mean, and state is committed.

        Returns before that is done; the handles tell.
        """
        self._require_open()
        self.arrivals += 1
        if self.network.world_size == 1:
            recovery = self._failures.recovery
            self.answer = Answer(pauses=recovery is not None and recovery.pauses())
            self._end_step()
        else:
            self._executor.submit(partial(self._guarded, self._finish))

    def abandon(self) -> None:
        """Give up a step that was started and will not be finished.

        Under the immediate commit what it has sent is lost; else nothing of it is committed.
        """
        if self.network.world_size > 1 and not self.closed:
            self._executor.submit(partial(self._guarded, self._abandon))

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError(
                "lightning_dist: gradients cannot be averaged by a reducer that is closed; call "
                "close() after the last step, or compress a newly wrapped model"
            )

    def _start(self, handle: Handle) -> None:
        handle = self._swapped(handle)
        self._enter(handle)
        plan = self._plans.find(
            handle.key,
            handle.given,
            handle.slices,
            step=self.step,
            turn=len(self._in_flight) % 2,
            waiting=self._waits,
        )
        handle.load(plan)
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
            before[-1].done.set_result(before[-1].given)
        with working(self._observers, handle.key, "decode"):
            for unit in handle.units():
                unit.start_second()

    def _finish(self) -> None:
        handles = self._in_flight
        if self.immediate:
            for handle in handles[-1:]:
                self._decode(handle)
        before: list[Kept] = []
        try:
            if self.recovers and self.network.intra is not None:
                # Means come from other ranks of the host, which may be lost after the vote.
                for handle in handles:
                    before.append(kept_of(handle.groups, self.state))
                    with working(self._observers, handle.key, "decode"):
                        decode_all(handle.units(), self._scale)
            answer = self._ask()
        except BaseException:
            for kept in before:
                put_back(kept)
            raise
        if not self.immediate:
            for handle, kept in zip_longest(handles, before):
                self._decode(handle, unused=answer.unused, finite=answer.finite, before=kept)
        self.answer = answer
        for observer in tuple(self._observers):
            observer.finished([(handle.key, handle.groups) for handle in handles])
            if observer.done:
                self._forget(observer)
        self._in_flight = []
        self._end_step()
        # Not before: whoever waits for the last mean begins the next step.
        for handle in handles:
            if not handle.done.done():
                handle.done.set_result(handle.given)

    def _decode(
        self,
        handle: Handle,
        *,
        unused: Collection[str] = (),
        finite: bool = True,
        before: Kept | None = None,
    ) -> None:
        with working(self._observers, handle.key, "decode"):
            decode_groups(
                handle.groups,
                handle.flat,
                self.state,
                scale=self._scale,
                unused=unused,
                finite=finite,
                before=before,
            )
            for group in handle.groups:
                self._count(group, handle.flat, compare=finite)
                handle.restore(group, unused)
            handle.store()

    def _count(self, group: CodecGroup, flat: Tensor, *, compare: bool) -> None:
        self.stats.record(group.codec.name, group.raw_bytes, group.sent)
        if self.step % _COMPARED_EVERY == 0 and compare and not group.codec.bit_exact:
            self._sums.append(sum_of_bits(group, flat))  # unequal machines may differ

    def _end_step(self) -> None:
        self.step += 1
        self.state.settle()
        self.stats.end_step()

    def _abandon(self) -> None:
        # Payloads must land before their buffers are used again.
        for handle in self._in_flight:
            for unit in () if handle.done.done() else handle.units():
                unit.wait()
        self._in_flight, self._finite, self._sums = [], [], []
        self.stats.drop_step()
        self._delayed.clear()  # some of its means are in buckets that nobody applies

    def _ask(self) -> Answer:
        """See :func:`agree`; no allreduce where nothing depends on it."""
        recovery = self._failures.recovery
        finite, self._finite = self._finite, []
        sums, self._sums = self._sums, []
        if self._sharded and sums:  # which only ranks with the same shard have in common
            agree([], {}, sums, self.planner.network)
            sums = []
        if not (self._allow_absent or self._asks or sums or recovery is not None):
            return Answer()
        used = {
            part.name: part.name not in handle.absent
            for handle in self._in_flight
            for group in (handle.groups if self._allow_absent else ())
            for part in group.slices
        }
        if recovery is None:
            return agree(finite, used, sums, self.network)
        # Whoever hears the answer must know that all the others can commit without anybody's help.
        for handle in self._in_flight:
            for unit in handle.units():
                unit.wait()
        try:
            return agree(finite, used, sums, self.network, pauses=recovery.pauses())
        except DriftError:
            raise
        except RuntimeError as error:
            self._failures.note(error)
            verdict = recovery.verdict()
            if verdict is None:
                raise
            return Answer(finite=verdict)

    def _enter(self, handle: Handle) -> None:
        if not self._in_flight:
            scale = None if self._grad_scale is None else self._grad_scale()
            self._scale.fill_(1.0) if scale is None else self._scale.copy_(scale)
            owes = self._keeps_state or bool(self.state.names("residual"))
            self._asks = owes and not self.immediate
        self._in_flight.append(handle)

    def _adjust(self, handle: Handle) -> None:
        for group in handle.groups:
            clip_group(group, handle.flat, self._scale, world_size=self.network.world_size)
            if self.adjustment is not None and self.adjustment.active:
                self.adjustment(group.slices, handle.flat, self._scale)
            if not self._waits and "residual" not in self.planner.kinds(group.codec):
                of = self.state, self.planner.network, self._scale
                add_owed(group, handle.flat, *of, sharded=self._sharded)

    @property
    def _waits(self) -> bool:
        """Whether nothing is compressed yet."""
        return self.adjustment is not None and not self.adjustment.active

    def _guarded(self, task: Callable[[], None], handle: Handle | None = None) -> None:
        try:
            self._failures.require_none()
            task()
        except BaseException as error:  # every waiting future must hear of it, whatever it is
            self._failures.note(error)
            waiting, self._in_flight = self._in_flight, []
            self._failures.tell([*waiting, *([] if handle is None else [handle])], error)

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of everything, collectives too, from the next bucket on."""
        self._observers.append(observer)
        for channel in self.network.channels:
            channel.watch = observer

    @property
    def is_watched(self) -> bool:
        """Whether somebody is told of everything."""
        return any(channel.watch is not None for channel in self.network.channels)

    def tell_regrouped(self, generation: int, *, reason: str) -> None:
        """Tell observers that training goes on with other ranks, who know this step."""
        for observer in self._observers:
            observer.regrouped(generation, step=self.step, reason=reason)

    @property
    def recovers(self) -> bool:
        """Whether a step that fails is taken again."""
        return self._failures.recovery is not None

    def detach(self, observer: Observer) -> None:
        """Tell ``observer`` nothing more."""
        self._forget(observer)
        for channel in self.network.channels:
            channel.watch = None

    def _forget(self, observer: Observer) -> None:
        with suppress(ValueError):  # the other thread has done it
            self._observers.remove(observer)

    @property
    def topology(self) -> Topology:
        """Hosts and groups of the ranks."""
        return self.network.topology

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Residuals of this rank, by parameter name."""
        return self.state.residuals

    def residual_norm(self) -> float:
        """Norm of all that this rank owes."""
        parts = [part for part in self.state.residuals.values() if part.numel()]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent: totals, ``last_step`` and ``per_codec``; see the guide."""
        return self.stats.as_mapping()

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, hosts and versions, for the configuration of a tracked run."""
        commit = "immediate" if self.immediate else "deferred"
        return {**run_config(self.settings, self.network), "commit": commit}

    @property
    def in_step(self) -> bool:
        """Whether the groups can be used again: no exchange has failed or was left half done."""
        return self.failure is None and not self._in_flight

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes`` and the payloads' ``buffer_bytes``.

        With delayed means also ``delayed_bytes``.
        """
        delayed = {"delayed_bytes": self._delayed.nbytes} if self._delayed.active else {}
        return {
            "residual_bytes": self.state.nbytes,
            "buffer_bytes": self._plans.nbytes,
            **delayed,
        }

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all ranks on rank ``to``, None elsewhere. Collective; between backward passes.

        Tensors and plain values only: ``{"version", "world_size", "step", "residuals"}``, residuals
        as ``{parameter name: (W, numel)}`` on the CPU, unscaled; with a hierarchical exchange one
        row per outermost group. Rows lie as their parameter does in memory; ``"strides"`` has those
        of parameters that are not row-major. With ``dgc`` also ``"momenta"``, with ``powersgd``
        ``"factors"``, with ``delay`` the means ``"delayed"``, which the next step applies.
        """
        self.wait()
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state = self.state.gather(self.network, to=to)
        return None if state is None else self._described(state)

    def striped_state_dict(self) -> tuple[dict[str, Any], list[Stripes]]:
        """:meth:`state_dict` on every rank, with what differs between ranks left where it is.

        The tensors of the state are empty memory; the stripes say which part of each this rank has.
        """
        self.wait()
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state, stripes = self.state.striped(self.network)
        return self._described(state), stripes

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        strides = {name: list(found) for name, found in self.strides.items() if found is not None}
        about = {"world_size": self.network.world_size, "step": self.step, "strides": strides}
        delayed = {"delayed": self._delayed.state()} if self._delayed.active else {}
        described = {"version": STATE_VERSION, **about, **state, **delayed}
        return {self._prefix + key: value for key, value in described.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh.

        With another number of rows every rank starts from the mean residual.
        """
        self.wait()
        self._plans.clear()  # they hold views of the old residuals
        found: Mapping[str, Any] = {"step": 0}
        if state is not None:
            found = own_keys(state, self._prefix)
            require_strides(found, self.names)
        self.state.load(found, self.network.rows)
        self._load_delayed(found.get("delayed", {}))
        self.step = int(found["step"])
        self._reserve_again()

    def _load_delayed(self, means: Mapping[str, Tensor]) -> None:
        numel = {name: as_real(p).numel() for p, name in self.names.items()}
        self._delayed.load(means, numel=numel)
        if means and not self._delayed.active and self.network.rank == 0:
            log.warning(
                "The state has a mean gradient that was not applied yet; it is dropped. Set "
                "delay=1 to apply it"
            )

    def continue_from(self, before: Reducer) -> None:
        """Go on from the step that ``before`` was at when it was closed, with its means."""
        self.step = before.step
        self._load_delayed(before._delayed.state())

    def shared_state(self) -> dict[str, Any]:
        """State that is equal on all ranks between steps, for a rank that joins them."""
        return {"step": self.step, "factors": self.state.all_factors}

    def join(self, shared: Mapping[str, Any]) -> None:
        """Be as the rank that :meth:`shared_state` is of; owe nothing, or the mean of all."""
        self._plans.clear()
        if not self.state.is_mean:
            self.state.load({}, self.network.rows)
        self.state.load_factors(shared["factors"])
        self.step = int(shared["step"])
        self._reserve_again()

    @property
    def keeps_state(self) -> bool:
        """Whether any codec of the settings owes something."""
        return self._keeps_state

    def rebind(
        self, network: Network, *, executor: Executor | None = None, averages: bool = False
    ) -> None:
        """Go on in other groups, with other members or another hierarchy. Collective there.

        What is under way in the old ones is given up, whatever has failed is forgotten, and the
        next step is the one that comes next. State is kept; what was owed by ranks that are gone is
        lost. Where one of the two networks is hierarchical every rank goes on from the mean
        residual of those that have taken a step. Kernels stay compiled; where the number of ranks
        is another some are compiled anew, unless somebody recovers. The old groups are not to be
        used again; those of an accelerator are aborted.

        Args:
            executor: as in the constructor. Reducers that share one rebind to another one together.
            averages: the network of another rank was hierarchical. Equal on all ranks.

        Raises:
            RuntimeError: a rank of ``network`` is lost; the state is as before, and another rebind
                has to follow.
        """
        self._stop(patience=0.0)
        for handle in self._in_flight:
            if not handle.done.done():
                handle.done.set_exception(RuntimeError("lightning_dist: other groups"))  # type: ignore[arg-type]
        self._in_flight, self._finite, self._sums = [], [], []
        self._delayed.clear()  # not there on every rank
        self.answer = Answer()
        self.stats.drop_step()
        old = self.network
        for channel in network.channels:
            channel.watch = old.data.watch or old.channels[0].watch
        if averages or old.intra is not None or network.intra is not None:
            # Ranks of a flat network may have been in others meanwhile: each has a row of its own.
            row = f"rank {network.rank}" if old.intra is None else f"row {old.rows.own}"
            self.state.average(network, row=row if self.step else None)
        self.network = network
        self.generation += 1
        compiled, self._plans = self.planner.compiled, self._make_plans()
        if self.recovers:  # others wait, and compiling takes longer than a restart
            self.planner.compile_no_more()
        for codec, (dtypes, sizes) in compiled.items():
            self.planner.fuse(codec, dtypes, sizes=sizes)
        self._reserve_again()
        self._scale = self._scale.to(network.device)
        self._use(executor)

    def _use(self, executor: Executor | None) -> None:
        self._owns_executor = executor is None
        self._executor = executor or executor_for(self.network.device, in_order=self._in_order)
        self._failures.executor = self._executor

    def _stop(self, patience: float) -> None:
        """End what is under way; if it waits for other ranks, give up after ``patience`` seconds.

        On an accelerator, where nothing that waits can be told to give up, groups are aborted.
        """
        end = self._executor.close if self._owns_executor else self._executor.drain
        if end(patience):
            return
        self.network.limit.give_up()
        for channel in self.network.channels if is_accelerator(self.network.device) else ():
            with suppress(RuntimeError):  # of a backend that cannot
                channel.group.abort()
        end()

    def close(self) -> None:
        """Stop the worker and take the residuals off the accelerator.

        The process groups stay, and so does :meth:`state_dict`. A step that is under way has half a
        second to end; then it is given up, and the groups are not to be used again. An executor
        that others use goes on, and does the same when it has come to it.
        """
        self.closed = True
        for call in self.at_close:
            call()
        self.at_close.clear()
        if not self._owns_executor:  # what others do there goes on
            self._executor.submit(self._release)
            self._executor.drain(_PATIENCE)
            return
        patience = _PATIENCE
        if is_accelerator(self.network.device) and self.in_step:
            # Busy, maybe for longer, with kernels of steps that the host has done with.
            patience = self.network.limit.seconds or _ACCELERATOR_PATIENCE
        self._stop(patience)
        self._release()

    def _release(self) -> None:
        self._plans.clear()
        self.state.to(torch.device("cpu"))
        self._delayed.to(torch.device("cpu")) if self.in_step else self._delayed.clear()
