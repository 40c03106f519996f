"""Recovery of a trainer in its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.features import TRAINER_RECOVERY
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.progress import KEY, ElasticState
from lightning_dist.elastic.recovery.loop import RecoverableLoop
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.elastic.recovery.worker import WorkerRecovery
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


class RecoverableTrainerLoop(TrainerLoop, RecoverableLoop):
    """A :class:`TrainerLoop` of ``recovery="in_process"``, from ``on_train_start`` on."""

    data: TrainerDataShards

    def __init__(self, trainer: pl.Trainer, session: ElasticSession) -> None:
        super().__init__(trainer, session)
        self._begins_epoch = self._hands_over = False
        self._joined: Membership | None = None
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
            objects={},
            steps=lambda: trainer.global_step,
            script=self.script,
            with_closures=True,
            mirror_every=strategy.mirror_every,
        )
        self.session.lifecycle.waits_for_another = strategy.generations.member.waits_for_another
        self.session.lifecycle.lapsed = strategy.generations.member.lapsed
        if strategy.joins:
            self._join(recovery)
        else:
            recovery.has_state()
        strategy.complete_step = self._complete_step

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
        assert isinstance(self.recovery, StepRecovery)
        return self.recovery

    @property
    def _strategy(self) -> CompressedDDPStrategy:
        strategy = self._trainer.strategy
        assert isinstance(strategy, CompressedDDPStrategy)
        return strategy

    @override
    def end_step(self) -> None:
        recovery = self._recovery
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
    def end(self) -> None:
        super().end()
        if self.recovery is not None:  # it has begun
            self.recovery.close()
            self._strategy.complete_step = None

    # Between two steps.

    @override
    def sync_point(self) -> None:
        before = self.session.members
        super().sync_point()
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

    @override
    def add_to(self, checkpoint: dict[str, Any]) -> None:
        if not self._hands_over:
            super().add_to(checkpoint)
            return
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[KEY] = self.here().as_dict()

    # Generations.

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
            if not was_leader:
                self._show_progress()
        if is_new:
            self._strategy.meets()
            return
        self.data.reshard(state.position, rank=members.rank, world_size=members.world_size)
        plan, is_between = self.data.plan(), self._begins_epoch
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
    def begin_step(self, recovery: WorkerRecovery) -> None:
        super().begin_step(recovery)
        self._logged = private.logged_values(self._trainer)

    @override
    def take_again(self, *, has_computed: bool = True) -> None:
        private.restore_logged(self._trainer, self._logged)
        super().take_again(has_computed=has_computed)

    def _complete_step(self, closure: Callable[[], Any]) -> Any:
        """Compute ``closure``; again, with the shards of the present ranks, where one is lost."""
        recovery, compute = self._recovery, closure
        while True:
            try:
                if not recovery.is_broken:
                    result = compute()
                    if not recovery.is_given_up:
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
