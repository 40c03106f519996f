"""``ElasticRestart``: a job goes on with whatever ranks there are, and sees every sample once."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Metrics
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.elastic.data.plan import MicroBatch
from lightning_dist.elastic.process.lifecycle import Ended
from lightning_dist.elastic.progress import KEY, ElasticState
from lightning_dist.elastic.retention import not_ours
from lightning_dist.elastic.session import ElasticSession
from lightning_dist.frameworks.lightning.base import BeforeSetup, SyncStrategy
from lightning_dist.frameworks.lightning.checkpoint.resume import resume_io
from lightning_dist.frameworks.lightning.checkpoint.trainer_saves import (
    require_effective,
    require_supported,
)
from lightning_dist.frameworks.lightning.elastic import private
from lightning_dist.frameworks.lightning.elastic.data import (
    TrainerDataShards,
    is_trial,
    refuse_choices,
    require_loadable_hparams,
    require_own_folder,
    require_plain_trainer,
    require_recoverable_fit,
)
from lightning_dist.frameworks.lightning.elastic.loops import (
    NoticeConnector,
    Preempted,
    RestartConnector,
    identify,
    notice_signals,
    place_sources,
    restore_usual,
)
from lightning_dist.frameworks.lightning.elastic.recovery import RecoverableTrainerLoop
from lightning_dist.frameworks.lightning.elastic.trainer_loop import TrainerLoop
from lightning_dist.frameworks.lightning.launcher import follow_launcher
from lightning_dist.ranks.agreement import Membership
from lightning_dist.settings.run import CheckpointSettings, RunSettings
from lightning_dist.settings.signatures import takes
from lightning_dist.sync.arguments import refuse_pytorch_lightning

_UNRESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ElasticRestart(BeforeSetup, Checkpoint):
    """Saves checkpoints, and resumes from the newest complete one in ``dirpath`` at every start.

    Under ``torchrun`` the number of ranks may change at every restart. Parameters, optimizer,
    schedulers, scaler, callbacks, loops, residuals, random number generators and the position in
    the data are restored, and global batches keep their order. On SIGTERM, SLURM's requeue signal
    or a positive ``preemption_check`` on any rank, all ranks write one checkpoint and exit. To keep
    the best checkpoints of a metric, add a ``ModelCheckpoint`` or ``AsyncCheckpoint`` with a folder
    of its own.
    """

    reshards_data = True

    @takes(RunSettings, refuse=refuse_choices)
    @takes(CheckpointSettings, "saving")
    def __init__(
        self, settings: RunSettings, saving: CheckpointSettings, *, strict_data: bool = True
    ) -> None:
        """Check the arguments.

        Args:
            settings: each an argument of the callback. ``fit(weights_only=...)`` comes before
                ``weights_only``.
            strict_data: raise for a train dataloader whose samples cannot be tracked; False: warn,
                and repeat the epoch after a restart.
            saving: each an argument of the callback.

        Raises:
            ValueError: a setting that is out of range or cannot take effect.
        """
        self._settings = replace(settings, saving=saving)
        self._exact = strict_data
        self._session = ElasticSession(self._settings)
        self.best_model_path = ""
        """The newest checkpoint at the end of a fit: what ``ckpt_path="best"`` means alone."""
        self._at: TrainerLoop | None = None  # while a fit of the run is under way
        self._found: str | None = None  # the checkpoint of this run that is loaded
        self._foreign = ""
        self._is_restricted = True
        self._has_begun = self._polls_validation = False
        self._ended: int | None = None  # epoch whose end is not closed yet
        self._joins = False
        """Whether this process has come later than the others of a job."""

    @property
    def micro_batch(self) -> MicroBatch | None:
        """Samples that this rank computes, and their weight; None outside a fit."""
        return None if self._at is None else self._at.micro_batch

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints on this rank."""
        return self._session.metrics

    @property
    def last_committed(self) -> Committed | None:
        """The newest checkpoint of this fit that is durable; on a rank that writes."""
        return self._session.last_committed

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        refuse_pytorch_lightning(trainer=trainer)
        require_supported(trainer.strategy, sharded=self._settings.saving.sharded)
        restore_usual(trainer)  # after a fit that ended with an exception
        io = resume_io(trainer, verify=self._settings.saving.verify)
        if stage != "fit" or is_trial(trainer):
            return
        if _wants_recovery(trainer):
            self._settings.require_recoverable()
        require_effective(self._settings.saving, trainer)
        require_plain_trainer(trainer)
        require_own_folder(trainer, self._settings.folder)
        self._stand(trainer)
        if not isinstance(trainer.strategy, SyncStrategy):
            follow_launcher(trainer.strategy)  # for the samplers of validation
        self._at, self._has_begun = None, False
        kind = RecoverableTrainerLoop if _recovers(trainer) else TrainerLoop
        loop = kind(trainer, self._session)
        self._joins = _rendezvous(trainer, self._session)
        io.weights_only = self._settings.weights_only
        self._found = io.verified = None if self._joins else self._session.open(loop)
        connector = RestartConnector(
            private.checkpoint_connector(trainer),
            path=self._found,
            weights_only=self._settings.weights_only,
            on_loaded=lambda *loaded: self._find_position(loop, trainer, *loaded),
            on_loops=loop.place_loops,
        )
        private.set_checkpoint_connector(trainer, connector)
        signals = private.signal_connector(trainer)
        listening = NoticeConnector(signals, lambda: self._listen(trainer))
        private.set_signal_connector(trainer, listening)
        warnings.filterwarnings("ignore", message=_UNRESUMABLE)  # our loaders are

    def _stand(self, trainer: pl.Trainer) -> None:
        """Last: another callback is ``trainer.checkpoint_callback``, which knows what is best.

        But end the run before others put averaged weights into the model.
        """
        self._step_back(trainer)
        inner: Any = trainer
        others = (callback for callback in inner.callbacks if callback is not self)
        inner.callbacks = [_BeforeOthers(on_train_end=self._complete), *others, self]

    def _step_back(self, trainer: pl.Trainer) -> None:
        inner: Any = trainer
        inner.callbacks = [
            callback for callback in inner.callbacks if not isinstance(callback, _BeforeOthers)
        ]

    def _listen(self, trainer: pl.Trainer) -> None:
        """Begin to note signals."""

        def end_the_others() -> None:
            for process in private.started_ranks(trainer):
                process.terminate()

        signals = notice_signals(private.cluster_environment(trainer))
        self._session.lifecycle.note(
            signals, asks=trainer.local_rank == 0, on_notice=end_the_others
        )

    @override
    def before_setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == "fit" and not is_trial(trainer) and trainer.is_global_zero:
            account = self._session.history
            account.look(self._settings.folder, rank=trainer.global_rank)
            identify(trainer, run_id=account.run_id)

    def _find_position(
        self,
        loop: TrainerLoop,
        trainer: pl.Trainer,
        checkpoint: dict[str, Any],
        weights_only: bool,
    ) -> None:
        """Find the position in the data to resume from, before anything is restored."""
        self._is_restricted = weights_only
        if weights_only:
            require_loadable_hparams(trainer)
        path = str(trainer.ckpt_path)
        state: ElasticState | None = None
        if KEY in checkpoint:
            state = ElasticState.from_dict(checkpoint[KEY], path=path)
        elif checkpoint and self._found is not None:
            raise ValueError(not_ours(path))
        self._foreign = path if checkpoint and state is None else ""
        self._session.load(state, is_own=self._joins or self._found is not None)
        rank, world_size = loop.data_ranks
        data = TrainerDataShards(
            trainer,
            exact=self._exact,
            on_first=lambda: loop.generators.restore(),
            rank=rank,
            world_size=world_size,
            policy=self._settings.batch_policy,
            resumed=state,
            path=path,
            begun=self._session.history.first,
            seed=self._session.history.seed,
        )
        loop.set_data(data)
        self._at = loop
        place_sources(trainer, data)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        session = self._session
        if self._at is None:
            return
        if _wants_recovery(trainer):
            require_recoverable_fit(trainer, self._at.data)
        if isinstance(self._at, RecoverableTrainerLoop):
            self._at.recover()
        session.retention.saves.watch(trainer.strategy.optimizers)  # which are there now
        if self._joins:
            self._join(self._at)
            return
        data = self._at.data
        first, now = data.layouts
        if data.is_sharded:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            session.scale_rates(trainer.optimizers, schedulers, first=first, now=now)
        self._at.restore_metrics()
        run = session.history.run_id
        session.retention.save_for(run, restricted=self._is_restricted, resumed=self._found)
        self._has_begun = True
        foreign = ""
        if self._foreign:
            epoch, step = trainer.current_epoch, trainer.global_step
            foreign = (
                f"{self._foreign} (epoch {epoch}, step {step}), which was not saved under "
                f"ElasticRestart: its samples of epoch {epoch} are not known, and the order of "
                "samples starts anew"
            )
        session.begin(first, data.layout, foreign=foreign)
        session.lifecycle.heartbeat()
        if self._at.validates_first:  # it begins with seeds for the workers of its loader
            self._at.generators.restore()

    def _join(self, loop: TrainerLoop) -> None:
        loop.restore_metrics()
        self._has_begun = True
        self._session.lifecycle.heartbeat()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._at is None:
            return
        ended, self._ended = self._ended, None
        if isinstance(self._at, RecoverableTrainerLoop):
            if self._at.has_begun:
                self._at.epoch_sync_point()
        elif ended is not None:
            self._session.close_step(ended)
        self._at.begin_epoch()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._at is not None:
            self._at.begin_micro_batch(batch_idx)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any
    ) -> None:
        now = self.micro_batch
        if now is not None and now.weight != 1.0 and loss.requires_grad:
            weight = now.weight
            loss.register_hook(lambda gradient: gradient * weight)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        session = self._session
        if self._at is None:
            return
        self._at.end_micro_batch()
        session.lifecycle.heartbeat()
        if private.is_accumulating(trainer):
            return
        self._at.end_step()
        if session.step(self._at.total_samples):
            self._at.log_costs()
        # What ends an epoch comes after this hook; a checkpoint waits for it.
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        if isinstance(self._at, RecoverableTrainerLoop):
            self._at.sync_point()
            return
        session.close_step()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The checkpoint of an epoch is taken at the begin of the next, when all has ended."""
        self._ended = None if self._at is None else trainer.current_epoch
        # What waits for a metric (ReduceLROnPlateau) is not stepped in an epoch that was resumed.
        private.end_restart(trainer.fit_loop)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self._at is None:
            return
        self._at.generators.restore()
        batches = sum(trainer.num_val_batches)
        number = int(batches) if batches != float("inf") else -1
        numbers = self._session.members.ranks.gather(number)
        self._polls_validation = number >= 0 and len(set(numbers)) == 1

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._session.lifecycle.heartbeat()
        if self._polls_validation and self._at is not None and not trainer.sanity_checking:
            self._session.stop_if_requested()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and self._at is not None:
            self._at.end_validation()

    def _complete(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The training ends, and the callbacks that follow have not done anything yet."""
        self._session.lifecycle.heartbeat()
        if self._at is None:
            return
        self._ended = None
        self._at.complete()
        self.best_model_path = self._session.newest
        if self._session.costs.get("elastic/restarts"):
            self._at.log_costs()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._at is not None and not self._has_begun:
            self._session.nothing_is_left(self._at.data.layout)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, Ended):
            self._session.lifecycle.leave()
        self._session.close(exception, stopped=isinstance(exception, Preempted | Ended))
        self._end()  # Lightning calls no teardown() then

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()
        self._session.close()
        self._step_back(trainer)
        restore_usual(trainer)

    def _end(self) -> None:
        if self._at is not None:
            self._at.end()
        self._at = self._ended = None
        self._polls_validation = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._at is not None:
            self._at.add_to(checkpoint)


def _wants_recovery(trainer: pl.Trainer) -> bool:
    return getattr(trainer.strategy, "recovery", "restart") == "in_process"


class _BeforeOthers(LambdaCallback):
    """Callback that completes a run before all others; of whichever fit of the trainer."""


def _recovers(trainer: pl.Trainer) -> bool:
    return getattr(trainer.strategy, "generations", None) is not None


def _rendezvous(trainer: pl.Trainer, session: ElasticSession) -> bool:
    """Meet all ranks of the start; whether this process has come later, and is alone so far."""
    strategy: Any = trainer.strategy
    if not _recovers(trainer):
        session.rendezvous()
        return False
    if strategy.joins:
        # For one rank this makes none.
        session.rendezvous(Membership(make=strategy.generations.groups.new))
        return True
    session.rendezvous(strategy.members)
    return False
