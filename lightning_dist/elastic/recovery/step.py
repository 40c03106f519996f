"""A step that is taken again where a rank is lost, and what a training loop does for it.

:class:`StepRecovery` is of a model in DDP; what all ranks do between two steps, in a loop of the
user's own and under a Trainer, follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_dist.elastic.data.plan import lr_factor
from lightning_dist.elastic.private import order_buckets
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.progress import ElasticState, scale_learning_rates
from lightning_dist.elastic.recovery.frameworks import set_framework_rank
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.member import StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Outage, WorkerReport, leader_of
from lightning_dist.elastic.recovery.regroup import (
    ResidualMirror,
    compile_ahead,
    from_rank,
    regroup,
    require_flat,
    require_recoverable,
    send_buffers,
)
from lightning_dist.elastic.recovery.undo import StepUndo, UndoError
from lightning_dist.elastic.session import ElasticSession, TrainingLoop
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.reducer.stats import untraced
from lightning_dist.sync.ddp import describe_parameters
from lightning_dist.sync.onebit_adam import OneBitAdam


class StepRecovery:
    """One worker of a training: it holds back steps that fail, and enters generations.

    Args:
        generations: of this worker.
        model: whose gradients are compressed.
        optimizers: of ``model``.
        objects: by name, what else a step may change, as of :class:`.StepUndo`.
        steps: optimizer steps so far.
        script: what the script says of the training; a newcomer must say the same.
        with_closures: optimizers are given closures, in which the caller sees that a step is given
            up; otherwise a hook leaves optimizers nothing to do.
        mirror_every: steps between two copies of residuals to the next rank; None: there are none.

    Raises:
        ValueError: something whose step cannot be taken again.
    """

    def __init__(
        self,
        generations: Generations,
        model: DistributedDataParallel,
        *,
        optimizers: Sequence[Optimizer],
        objects: Mapping[str, Any],
        steps: Callable[[], int],
        script: Mapping[str, Any],
        with_closures: bool = False,
        mirror_every: int | None = None,
    ) -> None:
        if any(isinstance(optimizer, OneBitAdam) for optimizer in optimizers):
            raise ValueError(
                "OneBitAdam exchanges in its step, which cannot be repeated; use another "
                "optimizer, or recovery='restart'"
            )
        self.generations, self._model, self._steps = generations, model, steps
        self._script = dict(script)
        self._optimizers = list(optimizers)
        self.reducer = require_recoverable(model)
        """The reducer of the model."""
        # It skips optimizers, so that no hook of theirs comes before it changes its scale.
        if self.reducer.has_grad_scaler and not any(
            isinstance(each, GradScaler) for each in objects.values()
        ):
            raise ValueError(
                "Repeating a step needs the scale that its GradScaler had at the start of the "
                "step, and new ranks need it too; give the GradScaler to ElasticLoop in state=, or "
                "train in bfloat16 without one"
            )
        self.reducer.leave_failures_to(self)
        settings = self.reducer.settings
        self._mirror: ResidualMirror | None = None
        if mirror_every is not None:
            if not self.reducer.keeps_state:
                raise ValueError(
                    f"mirror_residuals has nothing to copy: codec {settings.inter} leaves no "
                    "residuals; leave it out"
                )
            require_flat(settings)
            self._mirror = ResidualMirror(self.reducer, every=mirror_every)
        if settings.compile_kernels is True and self.reducer.network.world_size == 1:
            compile_ahead(self.reducer, flat=mirror_every is not None)
        self._arrivals = 0
        self._limit = self.reducer.network.limit  # of the groups that are being connected
        generations.member.progress = lambda: self._arrivals + self.reducer.arrivals
        self._taken_over = ""  # the lost worker whose residuals this rank has
        self.outage = Outage()
        self._buffers_are_sent = model.forward_sync_buffers
        generations.on_broken = self._break
        model.forward_sync_buffers = False  # they are sent between steps, where that may fail
        self._hook = None
        if not with_closures:
            self._hook = register_optimizer_step_pre_hook(untraced(self._before_step))
        self._has_state = False
        self._next: Generation | None = None  # made while the reducer's thread has waited
        self._store_lost: StoreLostError | None = None
        self._undo = StepUndo(model.module, optimizers=optimizers, objects=objects)
        self.begin_step()

    # What the reducer asks, on its thread.

    def pauses(self) -> bool:
        """Newcomers wait."""
        return self.generations.member.waiting > 0

    def failed(self, error: RuntimeError) -> None:
        """The exchange of this generation has failed."""
        self.generations.member.abort(str(error))

    def vote_result(self) -> bool | None:
        """Decision of the next generation on the step whose payloads are complete."""
        try:
            self._next = self.generations.member.report(self._report(holds=True, failed=True))
        except StoreLostError as error:
            self._store_lost = error
            return None
        return self._next.finite if self.generations.member.name in self._next.applies else None

    # Steps, on the thread of the training.

    def begin_step(self) -> None:
        """Remember what a step changes before it is applied."""
        self._arrivals += 1
        self._begun = self.reducer.step
        self._undo.begin()

    @property
    def is_committed(self) -> bool:
        """Whether the mean of this step is here, on all ranks."""
        return self.reducer.step > self._begun

    @property
    def is_given_up(self) -> bool:
        """Whether the exchange of this step has failed, and nothing of it is applied."""
        return self.reducer.failure is not None and not self.is_committed

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            return
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is not None:
            raise ValueError(
                "An optimizer that is given a closure computes gradients in its step, which "
                "recovery='in_process' cannot repeat; call backward before step(), or use "
                "recovery='restart'"
            )
        if not self.is_given_up:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._undo.give_up()

    def undo(self) -> None:
        """Put everything as it was when the step began: its exchange has failed."""
        for parameter in self._model.module.parameters():
            parameter.grad = None
        try:
            self._undo.put_back()
        except UndoError as error:
            self.generations.end(str(error), code=EXIT_RESTART)

    @property
    def is_broken(self) -> bool:
        """Whether this generation is known to be at its end, because a rank is lost."""
        return (
            self._next is not None
            or self._store_lost is not None
            or self.generations.member.is_broken
            or self.reducer.failure is not None
        )

    @property
    def must_change(self) -> bool:
        """Whether this generation is at its end here."""
        return self.is_broken or self.reducer.answer.pauses

    def arrive(self) -> None:
        """This rank waits for others now."""
        self._arrivals += 1

    def synchronize(self) -> None:
        """Do the collectives of DDP's next forward pass, which could fail there."""
        self.arrive()
        order_buckets(self._model)
        world = dist.group.WORLD
        assert world is not None
        if self._buffers_are_sent:
            limit = self.reducer.network.limit
            send_buffers(self._model, Channel(world, name="buffers", limit=limit))
        if self._mirror is not None:
            self._mirror.refresh(world)

    # Generations.

    def begin(self) -> tuple[Generation, Membership]:
        """Wait for the first generation with this worker, and enter it."""
        return self._enter_one_from(self.generations.announce(self._facts))

    def change(self) -> tuple[Generation, Membership]:
        """End this generation here, and enter the next one."""
        if self._store_lost is not None:
            self.generations.end(str(self._store_lost), code=EXIT_RESTART)
        self.outage.begin()
        generation, self._next = self._next, None
        if generation is None:
            failed = self.generations.member.is_broken or self.reducer.failure is not None
            generation = self.generations.after(self._report(failed=failed))
        return self._enter_one_from(generation)

    def _enter_one_from(self, generation: Generation) -> tuple[Generation, Membership]:
        while True:
            try:
                self._arrivals = -self.reducer.arrivals
                members, data, control = self.generations.enter(
                    generation, has_state=self._has_state, failure=self.reducer.failure
                )
                if self.outage.norm is None and self._has_state:
                    self.outage.norm = self.reducer.residual_norm()
                limit = self._limit = WaitLimit(
                    self.reducer.settings.exchange_timeout, on_host=True
                )
                regroup(
                    self._model,
                    self.reducer,
                    self.generations.groups,
                    data=data,
                    control=control,
                    limit=limit,
                    begins=generation.source is None,
                    flat=self._mirror is not None,
                )
                set_framework_rank(rank=members.rank, world_size=members.world_size)
                if self._mirror is not None and (taken := self._mirror.regroup(generation.members)):
                    self._taken_over = taken
                return generation, members
            except RuntimeError as error:  # another worker is lost meanwhile
                self.generations.lost(error)
                generation = self.generations.after(self._report(failed=True))

    def transfer_state(self, generation: Generation, give: Callable[[], Any]) -> Any:
        """Value of ``give`` on the source of a generation, None where it is known. Collective."""
        if generation.source is None:  # all begin, from the weights of rank 0 as under DDP
            module = self._model.module
            module.load_state_dict(from_rank(module.state_dict(), rank=0))
            return None
        if not generation.heals:
            return None
        rank_of = generation.members.index
        is_source = self.generations.member.name == generation.source
        state = from_rank(
            give() if is_source else None,
            rank=rank_of(generation.source),
            to=[*map(rank_of, generation.heals)],
        )
        return None if is_source else state

    def has_state(self) -> None:
        """This worker is where the training is."""
        self._has_state = True
        if not self.outage.reasons:  # all begin
            self.outage = Outage(self.generations.member.generation.members)
            if self._mirror is not None:  # where the caller has made the first generation
                self._mirror.regroup(self.generations.member.generation.members)

    @property
    def facts(self) -> tuple[float | None, str, bool]:
        """Facts of this rank for :meth:`.Outage.enter`."""
        return self.outage.norm, self._taken_over, self.outage.is_redone

    def _report(self, *, failed: bool, holds: bool = False) -> WorkerReport:
        failure = self.reducer.failure
        return WorkerReport(
            self.generations.member.name,
            generation=self.generations.member.generation.number,
            step=self._steps() if self._has_state else -1,
            holds=holds,
            finite=self.reducer.answer.finite,
            failed=failed,
            reason="" if failure is None else str(failure)[:300],
            facts=self._facts,
        )

    @property
    def _facts(self) -> dict[str, str]:
        settings = {**self.reducer.settings.fingerprint(), **self._script}
        facts = {**settings, "parameters": describe_parameters(self._model.module)}
        return {name: repr(value) for name, value in facts.items()}

    def _break(self) -> None:
        self.outage.begin()
        for limit in (self.reducer.network.limit, self._limit):
            limit.give_up()

    def close(self) -> None:
        """The training is over; this worker beats until its process ends."""
        if self._hook is not None:
            self._hook.remove()


class RecoverableLoop(TrainingLoop):
    """A session whose ranks may be lost: what all ranks do between two steps, until they can."""

    session: ElasticSession
    recovery: StepRecovery | None = None
    """None where lost ranks mean a restart of all."""

    # What a Trainer and a loop of the user's own do differently.

    def export_state(self) -> Any:
        """All states that a worker needs to be where this one is, beside :meth:`here`."""
        raise NotImplementedError

    def import_state(self, handed: Any, state: ElasticState, members: Membership) -> None:
        """Be where the member is whose :meth:`export_state` and :meth:`here` these are."""
        raise NotImplementedError

    def resume(self, state: ElasticState, *, is_new: bool) -> None:
        """Shard what is left, from ``state`` on, over the present members; no collective."""
        raise NotImplementedError

    def rates(self) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        """Optimizers and schedulers."""
        raise NotImplementedError

    # What is the same for both.

    def here(self) -> ElasticState:
        """State of this rank, see :meth:`.ElasticSession.here`."""
        return self.session.here()

    def close_step(self) -> None:
        """:meth:`.ElasticSession.close_step` at the position of this rank."""
        position = self.position
        if position.samples or position.epoch:
            self.session.close_step(None if position.samples else position.epoch - 1)

    def take_again(self, *, has_computed: bool = True) -> None:
        """This step cannot be completed: go on with those who are left, from its begin.

        Args:
            has_computed: something of it was computed here.
        """
        assert self.recovery is not None
        self.recovery.undo()
        self.recovery.outage.is_redone |= has_computed
        self.sync_point()

    def sync_point(self) -> None:
        """Between steps: what all ranks do there, with those who are left where some are lost."""
        recovery = self.recovery
        if recovery is None:
            self.close_step()
            return
        while True:
            try:
                if recovery.must_change:
                    self.enter(*recovery.change())
                recovery.synchronize()
                self.close_step()
                break
            except RuntimeError as error:
                recovery.generations.lost(error)
        self.report_outage(recovery)
        self.begin_step(recovery)

    def report_outage(self, recovery: StepRecovery) -> None:
        """Report the generations since the last call, if there were any."""
        if recovery.outage.reasons:
            generation = recovery.generations.member.generation
            report = recovery.outage.report(generation, step=self.steps)
            recovery.outage = Outage(generation.members)
            recovery.reducer.notify_regrouped(generation.number, reason=report.reason)
            self.session.report_outage(report)

    def begin_step(self, recovery: StepRecovery) -> None:
        """Remember what a step changes before it is applied."""
        recovery.begin_step()

    def enter(self, generation: Generation, members: Membership) -> None:
        """Go on as a member of ``generation``; collective among them."""
        recovery = self.recovery
        assert recovery is not None
        handed = recovery.transfer_state(generation, self._handover)
        members.ranks.leader = leader_of(generation)
        if handed is not None:
            self.import_state(handed["states"], handed["here"], members)
            recovery.reducer.join(handed["reducer"])
        self.session.move(self, members, facts=None if handed is None else handed["session"])
        state: ElasticState = self.here() if handed is None else handed["here"]
        self.resume(state, is_new=handed is not None)
        before, (_, now) = state.layout, self.data.layouts
        factor = lr_factor(self.session.settings.batch_policy, before=before, now=now)
        optimizers, schedulers = self.rates()
        scale_learning_rates(optimizers, schedulers, factor=factor)
        recovery.outage.enter(generation, members.ranks.gather(recovery.facts))
        if handed is not None:
            recovery.has_state()

    def _handover(self) -> dict[str, Any]:
        assert self.recovery is not None
        return {
            "states": self.export_state(),
            "reducer": self.recovery.reducer.shared_state(),
            "session": self.session.facts(),
            "here": self.here(),
        }
