"""Recovery of a trainer in its process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.features import TRAINER_RECOVERY
from lightning_dist.elastic import rng
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.progress import KEY, ElasticState
from lightning_dist.elastic.recovery.protocol import Generation
from lightning_dist.elastic.recovery.step import RecoverableLoop, StepRecovery
from lightning_dist.elastic.session import ElasticSession
from lightning_dist.frameworks.lightning.checkpoint.async_checkpoint import AsyncCheckpoint
from lightning_dist.frameworks.lightning.checkpoint.private import (
    dump_checkpoint,
    saved,
    set_saved,
)
from lightning_dist.frameworks.lightning.elastic import private
from lightning_dist.frameworks.lightning.elastic.data import TrainerDataShards
from lightning_dist.frameworks.lightning.elastic.loops import (
    RestartConnector,
    identify,
    place_at_step,
)
from lightning_dist.frameworks.lightning.elastic.trainer_loop import TrainerLoop
from lightning_dist.frameworks.lightning.strategy import CompressedDDPStrategy
from lightning_dist.ranks.agreement import Membership

T = TypeVar("T")


class _AgainError(RuntimeError):
    """Not all ranks have completed a section."""


class Sections:
    """Parts of a training between two steps in which ranks wait for each other.

    A validation is one, and so is each collective of the strategy outside of it. A section ends
    with a barrier. If a rank is lost before it, the others enter the next generation and begin the
    section again. If it is lost in the barrier, some ranks may be beyond it. They tell so in the
    next generation: then all have completed the section, and nobody repeats it. Newcomers wait.
    """

    def __init__(self, loop: RecoverableTrainerLoop, recovery: StepRecovery) -> None:
        self._loop, self._recovery = loop, recovery
        self._where = ""
        self.passed = 0
        """Sections that all ranks have completed, as far as this one knows. Newcomers learn it."""

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Inside, collectives raise where a rank is lost, and the caller handles it."""
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def run(
        self,
        body: Callable[[], T],
        *,
        undo: Callable[[], None] = lambda: None,
        instead: Callable[[], T] | None = None,
    ) -> T:
        """Result of ``body`` on this rank, once all ranks have completed it.

        Args:
            undo: called before ``body`` is called again.
            instead: result in a step that is taken again anyway.
        """
        if self._where:
            return body()
        if self._loop.is_in_step:
            return self._in_step(body, instead)
        with self.at("section"):
            while self._recovery.is_broken:
                self._enter_next()
                self._after_entering()
            while True:
                try:
                    result = body()
                    self.commit()
                    return result
                except RuntimeError as error:
                    if not self._where:  # it was committed by its body
                        raise
                    if not isinstance(error, _AgainError):
                        self._enter_next(error)
                    undo()
                    self._after_entering()

    def commit(self) -> None:
        """End the section in which this is called. Collective; nothing outside of one."""
        if self._where != "section":
            return
        try:
            self._recovery.arrive()
            dist.barrier()
            self.passed += 1
            self._where = ""
        except RuntimeError as error:
            before = self.passed
            self._enter_next(error)
            if self.passed == before:
                raise _AgainError from error
            self._after_entering()
            self._where = ""

    def _in_step(self, body: Callable[[], T], instead: Callable[[], T] | None) -> T:
        if instead is None or self._recovery.is_committed:
            with self.at("step"):
                return body()
        if self._loop.is_alone_in_hook:
            return instead()
        try:
            return body()
        except RuntimeError as error:  # the step is given up at its end, and taken again
            self._recovery.generations.lost(error)
            return instead()

    def _enter_next(self, error: RuntimeError | None = None) -> None:
        """Go on in the next generation, after ``error`` in this one."""
        while True:
            try:
                if error is not None:
                    self._recovery.generations.lost(error)
                self._loop.enter(*self._recovery.change(is_closed=True))
                return
            except RuntimeError as raised:
                if raised is error:  # nobody is lost
                    raise
                error = raised

    def _after_entering(self) -> None:
        with self.at(""):
            self._loop.after_entering()


class RecoverableTrainerLoop(TrainerLoop, RecoverableLoop):
    """A :class:`TrainerLoop` of ``recovery="in_process"``, from ``on_train_start`` on."""

    data: TrainerDataShards
    sections: Sections

    def __init__(self, trainer: pl.Trainer, session: ElasticSession) -> None:
        super().__init__(trainer, session)
        self._begins_epoch = self._hands_over = False
        self._has_synced, self._has_to_sync = True, False  # since the last step; before the end
        self._joined: Membership | None = None
        self._is_new = self._joins_repeated = False
        self._logged: Sequence[Any] = ()

    def recover(self) -> None:
        """Recover from lost ranks from now on; who has come later meets the others."""
        strategy, trainer = self._strategy, self._trainer
        assert strategy.generations is not None
        TRAINER_RECOVERY.require()
        private.leave_out_sigterm_broadcast(trainer)
        self.recovery = recovery = StepRecovery(
            strategy.generations,
            strategy.ddp,
            optimizers=trainer.optimizers,
            counters={},
            steps=lambda: trainer.global_step,
            with_closures=True,
            mirror_every=strategy.mirror_every,
        )
        self.sections = Sections(self, recovery)
        private.guard_validation(trainer, self._validate, self.sections.commit)
        private.compute_at_epoch_end(trainer, strategy.run_collective)
        self.session.lifecycle.waits_for_another = strategy.generations.member.waits_for_another
        self.session.lifecycle.lapsed = strategy.generations.member.lapsed
        if strategy.joins:
            self._join(recovery)
        else:
            recovery.has_state()
        strategy.complete_step = self._complete_step
        strategy.together = self.sections.run

    def _join(self, recovery: StepRecovery) -> None:
        generation, members = recovery.begin()
        while True:
            try:
                self.enter(generation, members)
                break
            except RuntimeError as error:
                recovery.generations.lost(error)
                if not self._strategy.joins:  # it has gone wrong after the state came
                    break
                generation, members = recovery.change()
        recovery.has_state()
        self.sync_point()

    @property
    @override
    def members(self) -> Membership:
        return self._joined or super().members

    @property
    def _recovery(self) -> StepRecovery:
        assert self.recovery is not None
        return self.recovery

    @property
    def _strategy(self) -> CompressedDDPStrategy:
        strategy = self._trainer.strategy
        assert isinstance(strategy, CompressedDDPStrategy)
        return strategy

    @override
    def end_step(self) -> None:
        recovery, self._joins_repeated = self._recovery, False
        if recovery.is_given_up:
            recovery.generations.end(
                "gradients were exchanged outside the closure of optimizer.step(), so they cannot "
                "be recomputed after a rank is lost",
                code=EXIT_RESTART,
            )
        recovery.generations.took_step()

    @override
    def end_validation(self) -> None:
        super().end_validation()
        self.begin_step(self._recovery)

    @override
    def complete(self) -> None:
        self._begins_epoch = self._has_ended
        if self._has_to_sync:
            self.sync_point()
        with self.sections.at("end"):
            RecoverableLoop.complete(self)
        self._strategy.together = None

    @override
    def end(self) -> None:
        super().end()
        if self.recovery is not None:  # it has begun
            self.recovery.close()
            self._strategy.complete_step = self._strategy.together = None

    # Between two steps.

    @override
    def sync_point(self) -> None:
        before = self.session.members
        with self.sections.at("sync_point"):
            super().sync_point()
        self._has_synced, self._has_to_sync = True, False
        if self.session.members is not before:
            self.log_costs()

    def epoch_sync_point(self) -> None:
        """:meth:`sync_point` between two epochs."""
        self._begins_epoch = True
        self.sync_point()
        self._begins_epoch = False

    @override
    def close_step(self) -> None:
        done = self.position.samples
        if not done or done < self.data.plan().used:
            super().close_step()

    def after_entering(self) -> None:
        """A generation was entered in a section: sync here, unless all do it after the section."""
        if self._has_synced:
            self.sync_point()
            return
        self._has_to_sync = True
        self.report_outage(self._recovery)
        self.log_costs()

    @property
    def is_in_step(self) -> bool:
        """Whether a batch was taken for a step that is not over."""
        return private.has_batch(self._trainer) or private.is_accumulating(self._trainer)

    @property
    def is_alone_in_hook(self) -> bool:
        """True in a hook that this rank calls and the others skip.

        Ranks that repeat a step recompute its micro-batches without ``on_train_batch_start`` and,
        but for the last one, ``on_train_batch_end``. A rank that has joined in it calls both.
        """
        return self._joins_repeated and private.is_between_micro_batches(self._trainer)

    def _validate(self, run: Callable[[], Any]) -> Any:
        begin_again, put_generators_back = private.hold_validation(self._trainer), rng.hold()

        def undo() -> None:
            begin_again()
            put_generators_back()
            self._recovery.outage.reasons.append("the validation is run again")

        return self.sections.run(run, undo=undo)

    @override
    def add_to(self, checkpoint: dict[str, Any]) -> None:
        if not self._hands_over:
            self._strategy.run_collective(partial(super().add_to, checkpoint))
            return
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[KEY] = self.here().as_dict()

    # Generations.

    @override
    def enter(self, generation: Generation, members: Membership) -> None:
        self.sections.passed = max(members.ranks.gather(self.sections.passed))
        super().enter(generation, members)
        if self._is_new:
            self._joins_repeated = self._recovery.outage.is_redone

    @override
    def here(self) -> ElasticState:
        metrics = [private.known_metrics(self._trainer)]
        return self.session.here(metrics=metrics, **self._facts)

    @override
    def export_state(self) -> dict[str, Any]:
        self._hands_over = True
        try:
            checkpoint = dump_checkpoint(self._trainer, weights_only=False)
        finally:
            self._hands_over = False
        return {"checkpoint": checkpoint, "saved": [*map(saved, self._saving)]}

    @property
    def _saving(self) -> list[ModelCheckpoint]:
        savers = self._trainer.checkpoint_callbacks
        return [saver for saver in savers if isinstance(saver, ModelCheckpoint)]

    @override
    def import_state(self, handed: Any, state: ElasticState, members: Membership) -> None:
        trainer, strategy = self._trainer, self._strategy
        connector = private.checkpoint_connector(trainer)
        assert isinstance(connector, RestartConnector)
        strategy.become(members)
        self.data.close()
        private.forget_train_loader(trainer)
        self._joined = members
        for callback, last in zip(self._saving, handed["saved"], strict=True):
            set_saved(callback, last)
        with strategy.apart():
            connector.import_state(handed["checkpoint"])
            private.begin_fit_again(trainer)

    @override
    def resume(self, state: ElasticState, *, is_new: bool) -> None:
        trainer, members = self._trainer, self.session.members
        was_leader = trainer.is_global_zero
        self._strategy.become(members)
        self._joined = None
        private.forget_validation_loader(trainer)
        for callback in self._saving:
            if isinstance(callback, AsyncCheckpoint):
                callback.move(members.ranks.leader)
        generations = self._strategy.generations
        assert generations is not None
        if members.ranks.is_leader:
            run = self.session.history.run_id
            identify(trainer, run_id=run, takes_over=generations.member.name)
            if not was_leader and not self._has_ended:
                self._show_progress()
        self._is_new = is_new
        if is_new:
            self._strategy.meets()
            return
        self.data.reshard(state.position, rank=members.rank, world_size=members.world_size)
        plan, is_between = self.data.plan(), self._begins_epoch or self._has_ended
        before, passes = state.position.epoch * len(plan), plan.first_micro_batch
        place_at_step(trainer, None if is_between else passes, before=before)
        if not is_between:
            # Before its first batch in this process the epoch loop adds those that it counts.
            private.iterate_again(trainer, passes=passes if self.has_begun else 0)

    def _show_progress(self) -> None:
        """Let the progress bar, which other ranks than the leader disable, begin here."""
        bar, module = self._trainer.progress_bar_callback, self._trainer.lightning_module
        if bar is not None:
            bar.enable()
            bar.on_train_start(self._trainer, module)
            bar.on_train_epoch_start(self._trainer, module)

    @override
    def rates(self) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return self._trainer.optimizers, schedulers

    # Steps.

    @override
    def begin_step(self, recovery: StepRecovery) -> None:
        super().begin_step(recovery)
        self._logged = private.logged_values(self._trainer)

    @override
    def take_again(self, *, has_computed: bool = True) -> None:
        private.restore_logged(self._trainer, self._logged)
        super().take_again(has_computed=has_computed)

    def _complete_step(self, closure: Callable[[], Any]) -> Any:
        """Compute ``closure``; again, with the shards of the present ranks, where one is lost."""
        recovery, compute = self._recovery, closure
        with self.sections.at("step"):
            while True:
                try:
                    if not recovery.is_broken:
                        result = compute()
                        if not recovery.is_given_up:
                            self._has_synced = False
                            return result
                except RuntimeError as error:
                    if recovery.is_committed:
                        raise
                    recovery.generations.lost(error)
                self.take_again()
                compute = partial(self._compute_again, closure)

    def _compute_again(self, closure: Callable[[], Any]) -> Any:
        trainer = self._trainer
        batches = self._loop.epoch_loop.batch_progress
        while True:
            batch, index = private.next_batch(trainer), batches.current.processed
            self.begin_micro_batch(index)
            private.give_batch(closure, trainer, batch, index)
            self.session.lifecycle.heartbeat()
            assert self.micro_batch is not None
            if self.micro_batch.ends_step:
                return closure()
            with trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                closure()
            for tracker in (batches.current, batches.total):
                tracker.processed = tracker.completed = tracker.processed + 1
                tracker.ready = tracker.started = tracker.processed + 1
