"""Reducer of flat tensors: its groups, its observers, and its state between steps.

The path of a gradient is in ``pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.base.log import get_logger
from lightning_dist.ranks import Topology
from lightning_dist.ranks.facts import Spread
from lightning_dist.reducer.network import Executor, Network, executor_for
from lightning_dist.reducer.pipeline import Pipeline
from lightning_dist.reducer.plan.planner import Planner, future_on
from lightning_dist.reducer.plan.slices import (
    ParameterSlice,
    as_real,
    require_strides,
    strides_in_bucket,
)
from lightning_dist.reducer.state import (
    ReducerState,
    require_mapping,
    require_names,
    require_one_state,
)
from lightning_dist.reducer.stats import Observer, run_config
from lightning_dist.reducer.step_end import Answer, Recovery
from lightning_dist.settings.exchange import ExchangeSettings

log = get_logger(__name__)

STATE_VERSION = 1

_PATIENCE = 0.5
"""Seconds that a step under way is given where the reducer is closed."""
_ACCELERATOR_PATIENCE = 60.0
"""Seconds for kernels that an accelerator has not come to; one that hangs does not end."""


class Reducer(Pipeline):
    """Averages flat tensors made of named slices over the ranks of a network, compressed.

    A step is :meth:`start` for every tensor, then :meth:`finish`. Adapters make the tensors:
    DistributedDataParallel's buckets come from ``sync.buckets``. Several reducers may be in the
    middle of a step at once, each with tensors and state of its own; over the same network they
    share an executor, and all ranks call them in the same order.

    Args:
        names: name of every parameter that a slice may be of.
        state: initial state; empty by default.
        grad_scale: the current scale of a GradScaler as a 0-d tensor, or None for 1; None: there is
            no GradScaler. Residuals are kept unscaled, so that a change of the scale does not
            change their weight.
        allow_absent: whether slices may be absent on some ranks, equal on all ranks.
        sharded: tensors hold this rank's shard of the mean of its node already, as after FSDP's
            reduce-scatter; they are averaged over the ranks with the same shard.
        observers: receive the events of each step, but not of single collectives.
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
        settings: ExchangeSettings,
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
        super().__init__(
            settings=settings,
            network=network,
            state=state,
            grad_scale=grad_scale,
            allow_absent=allow_absent,
            sharded=sharded,
            observers=observers,
        )
        self.names, self._prefix = names, prefix
        self.strides = {name: strides_in_bucket(parameter) for parameter, name in names.items()}
        self._reserved: list[tuple[Sequence[ParameterSlice], torch.dtype]] = []
        self.generation = 0  # networks before this one
        self._was_given_state = False
        self.at_close: list[Callable[[], None]] = []
        self.never_compressed: finalize[..., Any] | None = None  # says so at the end
        self._shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
        self.planner = self.planner_for(network)
        self.keeps_state = any(map(self.planner.keeps_state, self.settings.policy.leaves()))
        self._in_order = in_order
        self._use(executor)

    def planner_for(self, network: Network) -> Planner:
        """A planner of these settings and this state."""
        if self._sharded and network.intra is not None:
            assert network.intra.inter is not None, "every rank goes on with its shard"
            network = network.intra.inter
        return Planner(
            network,
            self.state,
            self.settings,
            self._shapes,
            immediate=self.immediate,
            sharded=self._sharded,
        )

    @property
    def has_grad_scaler(self) -> bool:
        """Whether gradients are scaled."""
        return self._grad_scale is not None

    def leave_failures_to(self, recovery: Recovery) -> None:
        """From now on an exchange that fails does not raise, and ``recovery`` decides.

        The contents of a tensor whose exchange has failed are lost. :attr:`step` counts a step that
        was applied as soon as the futures of its tensors are ready; if it was not applied, all
        state is as before it: under the immediate update, and where the exchange is hierarchical,
        restored from a copy, of 4 bytes an element. After a failure nothing is exchanged until
        :meth:`rebind`.

        Raises:
            ValueError: a setting with which steps cannot be applied without other ranks.
        """
        if self.settings.delay:
            raise ValueError(
                "A failed step can be repeated only if its own means are applied, and "
                f"delay={self.settings.delay} applies those of the step before; leave it out"
            )
        if self._allow_absent:
            raise ValueError(
                "With find_unused_parameters=True DDP itself communicates in a backward pass, "
                "which fails if a rank is lost; leave it out, and use every parameter"
            )
        if self._sharded:
            raise ValueError(
                "A failed step can be repeated only if every rank has the whole model, and this "
                "model is sharded; use DistributedDataParallel"
            )
        self._recovery = recovery

    def observe(self, observer: Observer) -> None:
        """Send all events to ``observer``, those of collectives too, from the next bucket on."""
        self._observers.append(observer)
        for channel in self.network.channels:
            channel.watch = observer

    @property
    def is_watched(self) -> bool:
        """Whether an observer receives the events of collectives."""
        return any(channel.watch is not None for channel in self.network.channels)

    def notify_regrouped(self, generation: int, *, reason: str) -> None:
        """Report to observers that training goes on with other ranks, from this step on."""
        for observer in self._observers:
            observer.regrouped(generation, step=self.step, reason=reason)

    def detach(self, observer: Observer) -> None:
        """Send no more events to ``observer``."""
        self._forget(observer)
        for channel in self.network.channels:
            channel.watch = None

    @property
    def topology(self) -> Topology:
        """Nodes and groups of the ranks."""
        return self.network.topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent: totals, ``last_step`` and ``per_codec``; see the guide."""
        return self.stats.as_mapping()

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions, for the configuration of a tracked run."""
        state_update = "immediate" if self.immediate else "deferred"
        return {**run_config(self.settings, self.network), "state_update": state_update}

    def reserve(self, slices: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
        """Allocate the state of ``slices`` under the codecs of this step.

        State that is not reserved is allocated when it is first needed, at the peak of a backward
        pass.

        Args:
            dtype: of the tensors that they will be slices of.
        """
        self._reserved.append((slices, dtype))
        if self.network.world_size > 1:
            self.planner.reserve(slices, dtype, step=self.step)

    def _reserve_again(self) -> None:
        reserved, self._reserved = self._reserved, []
        for slices, dtype in reserved:
            with suppress(ValueError):  # state of another model: the next step says so
                self.reserve(slices, dtype)

    def wait(self) -> None:
        """Wait for the means of a step that are delayed; those of others are waited for.

        Raises:
            RuntimeError: the exchange has failed.
        """
        if not self._delayed.active or self.network.world_size == 1 or self.closed:
            return
        self._drain()
        if self.failure is not None:
            raise RuntimeError(f"lightning_dist: {self.failure}") from self.failure

    def _settle(self) -> None:
        """Let nothing be under way, before state is used or communicated by the calling thread.

        A step that an exception has cut short is abandoned.
        """
        self.wait()
        if self.network.world_size == 1 or self.closed or self.failure is not None:
            return
        self._drain()
        if self._in_flight:
            self.abandon()
            self._drain()

    def _drain(self) -> None:
        """Wait until the executor has come to its end."""
        landed = future_on(self.network.device)
        # Of a tensor: a future waits for the streams of what is in it.
        self._executor.submit(partial(landed.set_result, self._scale))
        landed.wait()

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Residuals of this rank, by parameter name."""
        return self.state.residuals

    def residual_norm(self) -> float:
        """Norm of all residuals of this rank."""
        parts = [part for part in self.state.residuals.values() if part.numel()]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes`` and the payloads' ``buffer_bytes``.

        With delayed means also ``delayed_bytes``.
        """
        delayed = {"delayed_bytes": self._delayed.nbytes} if self._delayed.active else {}
        return {
            "residual_bytes": self.state.nbytes,
            "buffer_bytes": self.planner.nbytes,
            **delayed,
        }

    @property
    def gathers_state(self) -> bool:
        """True if ranks have state of their own; if not, :meth:`state_dict` is not collective."""
        factors = any(leaf.keeps_factors for leaf in self.settings.policy.leaves())
        has_own = self.keeps_state or self._was_given_state or factors
        return has_own or self._sharded or self.recovers

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all ranks on rank ``to``, None elsewhere. Collective; between backward passes.

        Tensors and plain values only: ``{"version", "world_size", "step", "residuals"}``, residuals
        as ``{parameter name: (W, numel)}`` on the CPU, unscaled; with a hierarchical exchange one
        row per outermost group. Rows lie as their parameter does in memory; ``"strides"`` has those
        of parameters that are not row-major. With ``dgc`` also ``"momenta"``, with ``powersgd``
        ``"factors"``, of shards by the element that each starts at, with ``delay`` the means
        ``"delayed"``, which the next step applies.
        """
        self._settle()
        if not self.gathers_state:
            return self._described({"residuals": {}}) if self.network.rank == to else None
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state = self.state.gather(self.network, to=to)
        return None if state is None else self._described(state)

    def spread_state_dict(self, *, device: str = "cpu") -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with the tensors that differ between ranks left there.

        The tensors of the state are empty memory; the spreads are the parts that this rank has.
        """
        self._settle()
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state, spreads = self.state.spread(self.network, device=device)
        return self._described(state), spreads

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        strides = {name: list(kept) for name, kept in self.strides.items() if kept is not None}
        about = {"world_size": self.network.world_size, "step": self.step, "strides": strides}
        delayed = {"delayed": self._delayed.state()} if self._delayed.active else {}
        described = {"version": STATE_VERSION, **about, **state, **delayed}
        return {self._prefix + key: value for key, value in described.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same state on every rank; None starts afresh.

        Collective. With another number of rows every rank starts from the mean residual.

        Raises:
            ValueError: ranks were given different states, or it is of another model or version.
        """
        require_mapping(state)
        self._settle()
        if self.network.world_size > 1 and not self.closed and self.failure is None:
            require_one_state(state, self.network, prefix=self._prefix, sharded=self._sharded)
        self.planner.clear()  # they hold views of the old residuals
        own_state: Mapping[str, Any] = {"step": 0}
        if state is not None:
            own_state = _own_keys(state, self._prefix)
            require_names(own_state, self.names.values())
            require_strides(own_state, self.names)
        self._was_given_state = bool(own_state.get("residuals") or own_state.get("momenta"))
        self.state.load(own_state, self.network)
        self._load_delayed(own_state.get("delayed", {}))
        self.step = int(own_state["step"])
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
        """Take over :meth:`shared_state` of another rank, without residuals or with the mean."""
        self.planner.clear()
        if not self.state.is_mean:
            self.state.load({}, self.network)
        self.state.load_factors(shared["factors"])
        self.step = int(shared["step"])
        self._reserve_again()

    @property
    def in_step(self) -> bool:
        """Whether the groups can be used again: no exchange has failed or was left half done."""
        return self.failure is None and not self._in_flight

    def rebind(self, network: Network, *, averages: bool = False) -> None:
        """Go on in other groups, with other members or another hierarchy. Collective there.

        Exchanges of the old groups are given up, failures are cleared, and the count of steps goes
        on. State is kept; residuals of ranks that are gone are lost. If one of the two networks is
        hierarchical, every rank goes on from the mean residual of those that have taken a step.
        Kernels stay compiled; for another number of ranks some are compiled anew, except during
        recovery. The old groups must not be used again; those of an accelerator are aborted.

        Args:
            averages: the network of another rank was hierarchical. Equal on all ranks.

        Raises:
            RuntimeError: a rank of ``network`` is lost; the state is as before, and another rebind
                has to follow.
        """
        self._stop(patience=0.0)
        self._end(self._give_up(), RuntimeError("the reducer was bound to other groups"))
        self._delayed.clear()  # not there on every rank
        self.answer = Answer()
        old = self.network
        for channel in network.channels:
            channel.watch = old.data.watch or old.channels[0].watch
        if averages or old.intra is not None or network.intra is not None:
            # Ranks of a flat network may have been in others meanwhile: each has a row of its own.
            row = f"rank {network.rank}" if old.intra is None else f"row {old.row}"
            self.state.average(network, row=row if self.step else None)
        self.network = network
        self.generation += 1
        compiled, self.planner = self.planner.compiled, self.planner_for(network)
        if self.recovers:  # other ranks wait, and compiling takes longer than a restart
            self.planner.compile_no_more()
        for codec, (dtypes, sizes) in compiled.items():
            self.planner.fuse(codec, dtypes, sizes=sizes)
        self._reserve_again()
        self._scale = self._scale.to(network.device)
        self._use(None)

    def _use(self, executor: Executor | None) -> None:
        self._owns_executor = executor is None
        self._executor = executor or executor_for(self.network.device, in_order=self._in_order)

    def _stop(self, patience: float) -> None:
        """Complete the exchanges in flight, or give them up after ``patience`` seconds.

        On an accelerator, where a wait cannot be interrupted, groups are aborted.
        """
        end = self._executor.close if self._owns_executor else self._executor.drain
        if end(patience):
            return
        self.network.limit.give_up()
        # Under recovery they are aborted already, and may have new members.
        aborts = is_accelerator(self.network.device) and not self.recovers
        for channel in self.network.channels if aborts else ():
            with suppress(RuntimeError):  # of a backend that cannot
                channel.group.abort()
        end()

    def close(self) -> None:
        """Stop the worker and take the residuals off the accelerator.

        The process groups stay, and so does :meth:`state_dict`. A step in flight has half a second
        to complete, with kernels of an accelerator a minute or ``exchange_timeout``; then it is
        given up, and the groups must not be used again. An executor that is shared is not stopped.
        A second call changes nothing.
        """
        if self.closed:
            return
        self.closed = True
        for call in self.at_close:
            call()
        self.at_close.clear()
        if not self._owns_executor:  # other reducers go on with it
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
        for handle in self._in_flight:  # which stay: the groups are out of step
            handle.undo()
        self._end(self._in_flight, RuntimeError("the reducer was closed in a step"))
        self.planner.clear()
        self.state.to(torch.device("cpu"))
        self._delayed.to(torch.device("cpu")) if self.in_step else self._delayed.clear()


def _own_keys(state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """State that a reducer with ``prefix`` has saved among others.

    Raises:
        ValueError: it is none that this version can read.
    """
    own_state = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
    version = own_state.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"The compression state must be of version {STATE_VERSION}, got {version!r}; "
            + (
                "give what state_dict() returned on rank 0"
                if version is None
                else "it was written by another version of lightning_dist: resume with that one, "
                "or start without"
            )
        )
    return own_state
