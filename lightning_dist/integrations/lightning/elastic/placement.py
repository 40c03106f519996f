"""A session of a fit: where Lightning's loops are, and how its checkpoints are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.saves import committed_line
from lightning_dist.elastic.data.plan import MicroBatch, Position
from lightning_dist.elastic.membership import Membership
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.progress import KEY, ElasticState, Generators
from lightning_dist.elastic.session import Session
from lightning_dist.integrations.lightning import private
from lightning_dist.integrations.lightning.checkpoint.session_io import save_into
from lightning_dist.integrations.lightning.checkpoint.supported import weights_may_change
from lightning_dist.integrations.lightning.elastic.connectors import (
    Preempted,
    RestartConnector,
    identify,
    requeue,
)
from lightning_dist.integrations.lightning.elastic.data import TrainerDeal
from lightning_dist.integrations.lightning.elastic.loops import (
    place_at_epoch_begin,
    place_at_step,
    place_within_epoch,
)
from lightning_dist.integrations.lightning.recovering import RecoversInProcess
from lightning_dist.integrations.torch.recovery import RecoverablePlacement, StepRecovery
from lightning_dist.log import prefixed


class TrainerPlacement(RecoverablePlacement):
    """Operations of a fit for its session, and its position in the data.

    Args:
        trainer: of the fit.
        session: from the set-up of the fit to its end.
    """

    data: TrainerDeal

    def __init__(self, trainer: pl.Trainer, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self.session = session
        self._blocking: dict[str, float] = {}  # of saves under way, by path
        self._watched: list[Optimizer] = []
        self._epoch: int | None = None
        self._before_iteration: int | None = None  # batches of this epoch, of other iterations
        self._before_epoch = self._in_epoch = 0  # samples
        self._validated_step = -1
        self._rng_of_step: dict[str, Any] | None = None
        self._begins_epoch = self._computes = self._hands_over = False
        self._joined: Membership | None = None
        self._logged: Sequence[Any] = ()
        self.validates_first = False
        """Whether the loop begins with a validation that a fault has cut short."""
        self.micro_batch: MicroBatch | None = None
        """Micro-batch that this rank computes; None where samples are not counted."""
        if find_spec("omegaconf") is not None:  # Lightning would import it within the first save
            import_module("omegaconf")

    @property
    @override
    def steps(self) -> int:
        return self._trainer.global_step

    @property
    @override
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @override
    def tell(self, text: str) -> None:
        rank_zero_info(prefixed(text))

    @override
    def warn(self, text: str) -> None:
        rank_zero_warn(text)

    @override
    def stopping(self, reasons: list[str]) -> None:
        if self._trainer.is_global_zero:
            requeue(private.cluster_environment(self._trainer), reasons)

    def watch_optimizers(self) -> None:
        """Know the optimizers; other ones if a module has put others in their place."""
        optimizers = list(self._trainer.strategy.optimizers)
        checkpointer = self._session.retention.checkpointer
        if checkpointer is not None and [*map(id, optimizers)] != [*map(id, self._watched)]:
            checkpointer.wait_for_copy()
            checkpointer.watch(optimizers)
            self._watched = optimizers

    @override
    def write(self, checkpointer: Checkpointer | None, path: str) -> None:
        began = time.perf_counter()
        self.watch_optimizers()
        sharded = self._session.settings.sharded
        save_into(checkpointer, self._trainer, path, sharded=sharded)
        if checkpointer is not None and weights_may_change(self._trainer):
            checkpointer.wait_for_copy()
        self._session.metrics.blocking_s = self._blocking[path] = time.perf_counter() - began

    @override
    def committed(self, event: Committed) -> None:
        line = committed_line(event, blocking_s=self._blocking.pop(event.target, 0.0))
        rank_zero_info(prefixed(line))
        self._log(self._session.metrics.by_name())

    def log_costs(self) -> None:
        """Tell the loggers what restarts have cost; on rank 0."""
        if self._session.costs:
            self._log(self._session.costs)

    def _log(self, values: dict[str, float]) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=max(self._trainer.global_step - 1, 0))

    def take_up(self, data: TrainerDeal) -> None:
        """Know where to go on: the session has been loaded."""
        state = self._session.resumed
        self.data = data
        self.generators = Generators(
            state,
            rank=data.rank,
            world_size=data.world_size,
            device=self._trainer.strategy.root_device,
        )
        if state is not None:
            self._before_epoch = state.total_samples - state.position.samples
            self._validated_step = state.total_steps if state.validated else -1

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop

    @property
    def _processed(self) -> int:
        """Batches of this epoch that are computed; asked when needed: hooks have any order."""
        return int(self._loop.epoch_loop.batch_progress.current.processed)

    @property
    def has_begun(self) -> bool:
        """Whether a batch was taken in this process."""
        return self._epoch is not None

    def begin_epoch(self) -> None:
        """A new epoch; the loader is about to be iterated."""
        self._before_epoch += self._in_epoch
        self._in_epoch = 0
        self._before_iteration = None
        self.data.cursor.set_epoch(self._trainer.current_epoch)
        self.data.refresh()
        self.generators.restore()

    def begin_micro_batch(self, index: int) -> None:
        """Batch ``index`` of the epoch is there."""
        self.generators.restore()
        self._epoch = self._trainer.current_epoch
        if self._before_iteration is None:
            self._before_iteration = self._processed
        self.micro_batch = self.data.plan().micro_batch_at(index) if self.data.is_dealt else None

    def end_micro_batch(self) -> None:
        """The optimizer has stepped, or gradients are accumulated."""
        if self.data.is_dealt:
            self._in_epoch = self.data.plan().after(self._processed).samples
        # A validation that is cut short begins anew, so it has to draw the same again.
        due = private.is_validation_due(self._trainer)
        self._rng_of_step = self.generators.capture() if due else None

    def end_validation(self) -> None:
        """What was due at this step is over."""
        self._validated_step = self._trainer.global_step
        self._rng_of_step = None
        if self.recovery is not None:
            self.begin_step(self.recovery)

    @property
    def _is_stopped(self) -> bool:
        return self._trainer.should_stop and private.may_stop_early(self._trainer)

    @property
    def _is_validated(self) -> bool:
        return self.position.samples == 0 or self._validated_step == self._trainer.global_step

    @property
    def position(self) -> Position:
        """Of the last optimizer step."""
        ended = self._loop.epoch_progress.current.processed
        if not self.data.is_dealt:
            return Position(ended)
        if self._epoch is None:
            return self.data.cursor.begin
        if self._has_ended:
            return Position(ended)
        return self.data.plan().after(self._processed)

    @property
    def _has_ended(self) -> bool:
        """Whether the epoch of the last batch is over; one that max_steps has cut short is not."""
        if self._epoch is None or self._loop.epoch_progress.current.processed <= self._epoch:
            return False
        return bool(self._loop.epoch_loop.batch_progress.is_last_batch)

    @property
    def total_samples(self) -> int:
        """Samples that optimizer steps have used, of all epochs."""
        if not self.data.is_dealt:
            return 0
        return self._before_epoch + (self._in_epoch if self._has_ended else self.position.samples)

    def place_loops(self) -> None:
        """Let Lightning's loops, just restored, count as this number of ranks does."""
        state, data = self._session.resumed, self.data
        if state is None:
            return
        if state.stopped:
            self._trainer.should_stop = True
            rank_zero_info(
                prefixed(
                    f"elastic: training was stopped at step {state.total_steps} before its last "
                    "epoch; nothing is left to do"
                )
            )
        private.forget_loader_states(self._trainer)
        self._loop.setup_data()
        if data.goes_on_by_itself:
            return  # within an epoch, as Lightning counts it
        position, steps = state.position, state.total_steps
        before = position.epoch * len(data.plan()) if data.is_dealt else 0
        if not data.is_dealt or position.samples == 0:
            place_at_epoch_begin(self._trainer, position.epoch, steps=steps, passes=before)
            return
        passes = data.plan().micro_batches_after(position.steps)
        self.validates_first = place_within_epoch(
            self._trainer,
            position,
            steps=steps,
            passes=passes,
            total_passes=before + passes,
            validated=state.validated,
        )

    def _loader_state(self) -> Any:
        """Of a loader that keeps its position itself; None between epochs."""
        loader = self.data.remembered
        if loader is None or self._has_ended:
            return None
        if self._before_iteration is None:
            return self.data.own_state
        done = self._processed
        accumulate = self._trainer.accumulate_grad_batches
        beyond = done % accumulate if private.is_accumulating(self._trainer) else 0
        return loader.state_after(done - beyond - self._before_iteration)

    def restore_metrics(self) -> None:
        """What had been logged at the checkpoint: schedulers and callbacks may wait for it."""
        saved = [] if self._session.resumed is None else self._session.resumed.metrics
        if saved:
            own = saved[self._trainer.global_rank % len(saved)]
            metrics = {name: torch.tensor(value) for name, value in own.items()}
            self._trainer.callback_metrics.update(metrics)

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Put all of this into a checkpoint. Collective.

        Nothing where the train dataloader has not been made yet: no position is known then.
        """
        trainer, position = self._trainer, self.position
        if not self.data.is_known:
            return
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        if self._hands_over:
            checkpoint[KEY] = self.here().as_dict()
            return
        logged = trainer.callback_metrics
        checkpoint[KEY] = self._session.describe(
            self.data.layouts,
            position,
            samples=self.total_samples,
            steps=trainer.global_step,
            rng=self._rng_of_step or self.generators.capture(),
            loader=self._loader_state(),
            metrics={name: float(each) for name, each in logged.items() if each.numel() == 1},
            size=self.data.size,
            validated=self._is_validated,
            stopped=self._is_stopped,
        )

    # Recovery within the process.

    def recover(self) -> None:
        """From now on lost ranks are recovered from; who has come later meets the others."""
        strategy, trainer = self._strategy, self._trainer
        assert strategy.generations is not None
        private.leave_out_sigterm_broadcast(trainer)
        self.recovery = recovery = StepRecovery(
            strategy.generations,
            strategy.model,
            optimizers=trainer.optimizers,
            counters={},
            steps=lambda: trainer.global_step,
            with_closures=True,
        )
        self._session.lifecycle.waits_for_another = strategy.generations.waits_for_another
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
        self.settle()

    @property
    def members(self) -> Membership:
        """All ranks."""
        return self._joined or self._session.members

    @property
    def _strategy(self) -> RecoversInProcess:
        strategy = self._trainer.strategy
        assert isinstance(strategy, RecoversInProcess)
        return strategy

    def end_step(self) -> None:
        """The optimizer has stepped."""
        recovery = self.recovery
        if recovery is None:
            return
        if recovery.is_given_up:
            recovery.generations.end(
                "gradients were exchanged outside of the closure of optimizer.step(), which cannot "
                "be computed again where a rank is lost",
                code=EXIT_RESTART,
            )
        recovery.generations.took_step()

    def complete(self) -> None:
        """The training has ended as it should. Collective."""
        recovery = self.recovery
        while True:
            try:
                self._session.complete(saves=self.has_begun or recovery is not None)
                return
            except RuntimeError as error:
                if recovery is None:
                    raise
                recovery.generations.lost(error)
                self._begins_epoch = self._has_ended
                self.settle()

    def end(self) -> None:
        """The end of this process's part in the fit."""
        self.data.close()
        strategy = self._trainer.strategy
        if self.recovery is not None:
            self.recovery.close()
            assert isinstance(strategy, RecoversInProcess)
            strategy.complete_step = None

    @override
    def settle(self) -> None:
        before = self._session.members
        super().settle()
        if self._session.members is not before:
            self.log_costs()

    def settle_epoch(self) -> None:
        """:meth:`settle` between two epochs."""
        self._begins_epoch = True
        self.settle()
        self._begins_epoch = False

    @override
    def close_step(self) -> None:
        position, settings = self.position, self._session.settings
        if position.samples:
            if position.samples >= self.data.plan().used:
                return
            is_due = settings.is_due_after_step(self.steps)
        elif position.epoch:
            is_due = settings.is_due_after_epoch(position.epoch - 1, steps=self.steps)
        else:
            return
        if is_due:
            self._session.save()
        self.stop_if_told()

    def stop_if_told(self) -> None:
        """Where any rank is to end: one checkpoint of all, and the end of this process."""
        code = self._session.stop_if_told()
        if code is not None:
            raise Preempted(code)

    @override
    def here(self) -> ElasticState:
        first, now = self.data.layouts
        logged = self._trainer.callback_metrics
        return ElasticState(
            run_id=self._session.history.run_id,
            seed=self._session.history.seed,
            first=first,
            layout=now,
            position=self.position,
            total_samples=self.total_samples,
            total_steps=self.steps,
            size=self.data.size,
            validated=self._is_validated,
            metrics=[{name: float(each) for name, each in logged.items() if each.numel() == 1}],
            stopped=self._is_stopped,
        )

    @override
    def handed_over(self) -> dict[str, Any]:
        self._hands_over = True
        try:
            return private.dump_checkpoint(self._trainer, weights_only=False)
        finally:
            self._hands_over = False

    @override
    def take_over(self, handed: Any, state: ElasticState, members: Membership) -> None:
        trainer, strategy = self._trainer, self._strategy
        connector = private.checkpoint_connector(trainer)
        assert isinstance(connector, RestartConnector)
        strategy.become(members)
        self.data.close()
        private.forget_train_loader(trainer)
        self._joined = members
        with strategy.apart():
            connector.take_over(handed)
            private.begin_fit_again(trainer)

    @override
    def go_on(self, state: ElasticState, *, is_new: bool) -> None:
        trainer, members = self._trainer, self._session.members
        self._strategy.become(members)
        self._joined, self._watched = None, []
        private.forget_validation_loader(trainer)
        generations = self._strategy.generations
        assert generations is not None
        if members.ranks.is_leader:
            run = self._session.history.run_id
            identify(trainer, run_id=run, takes_over=generations.name)
        if is_new:
            self._strategy.meets()
            return
        self.data.deal_again(state.position, rank=members.rank, world_size=members.world_size)
        if not self._begins_epoch:
            passes = self.data.plan().first_micro_batch
            place_at_step(trainer, passes, within=self._computes)
            private.iterate_again(trainer, passes=passes)

    @override
    def rates(self) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return self._trainer.optimizers, schedulers

    @override
    def begin_step(self, recovery: StepRecovery) -> None:
        super().begin_step(recovery)
        self._logged = private.logged_values(self._trainer)

    @override
    def take_again(self) -> None:
        private.restore_logged(self._trainer, self._logged)
        super().take_again()

    def _complete_step(self, closure: Callable[[], Any]) -> Any:
        """Compute ``closure``; again, with what the present ranks are dealt, where one is lost."""
        recovery = self.recovery
        assert recovery is not None
        compute = closure
        self._computes = True
        try:
            while True:
                try:
                    result = compute()
                    if not recovery.is_given_up:
                        return result
                except RuntimeError as error:
                    if recovery.is_committed:
                        raise
                    recovery.generations.lost(error)
                self.take_again()
                compute = partial(self._compute_again, closure)
        finally:
            self._computes = False

    def _compute_again(self, closure: Callable[[], Any]) -> Any:
        trainer = self._trainer
        batches = self._loop.epoch_loop.batch_progress
        while True:
            batch, index = private.next_batch(trainer), batches.current.processed
            self.begin_micro_batch(index)
            private.give_batch(closure, trainer, batch, index)
            self._session.lifecycle.heartbeat()
            assert self.micro_batch is not None
            if self.micro_batch.ends_step:
                return closure()
            with trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                closure()
            for each in (batches.current, batches.total):
                each.processed = each.completed = each.processed + 1
                each.ready = each.started = each.processed + 1
