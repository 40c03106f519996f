"""Loops and data connectors of a trainer that goes on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_dist.elastic.data.plan import Position
from lightning_dist.elastic.data.sampling import keep_workers
from lightning_dist.elastic.progress import require_same_optimizer
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.elastic import private
from lightning_dist.frameworks.lightning.elastic.data import TrainerDataShards
from lightning_dist.frameworks.lightning.private import restricted


class RestartConnector(private.CheckpointConnector):
    """Loads the checkpoint that a restart goes on from, whatever the script asked for.

    Args:
        usual: the trainer's own, which this stands in for.
        path: of the checkpoint; None for what the script asked for.
        weights_only: how it is read, unless the script said so in ``fit``.
        on_loaded: given the checkpoint before anything of it is restored, empty if there is none;
            and how it is read.
        on_loops: called when the loops have their state from the checkpoint.
    """

    def __init__(
        self,
        usual: private.CheckpointConnector,
        *,
        path: str | None,
        weights_only: bool,
        on_loaded: Callable[[dict[str, Any], bool], None],
        on_loops: Callable[[], None],
    ) -> None:
        super().__init__(usual.trainer)
        self.__dict__.update(usual.__dict__)
        self.usual = usual
        self._path = path
        self._weights_only = weights_only
        self._on_loaded = on_loaded
        self._on_loops = on_loops

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:  # after a fit that failed
            super().resume_start(checkpoint_path, **restricted(weights_only))
            return
        if self._path and checkpoint_path and str(checkpoint_path) != self._path:
            rank_zero.info(
                "elastic: resuming from the newest checkpoint of this run; "
                f"ckpt_path={str(checkpoint_path)!r} is not loaded"
            )
        policy = self._weights_only if weights_only is None else weights_only
        super().resume_start(self._path or checkpoint_path, **restricted(policy))
        self._on_loaded(self._loaded_checkpoint, policy)

    def import_state(self, checkpoint: dict[str, Any]) -> None:
        """Load ``checkpoint``, which another rank has handed over."""
        self._loaded_checkpoint = checkpoint
        self._on_loaded(checkpoint, self._weights_only)
        self.restore_datamodule()
        self.restore_model()
        self.restore_callbacks()
        self.restore_training_state()
        self._loaded_checkpoint = {}

    @override
    def restore_training_state(self) -> None:
        states = self._loaded_checkpoint.get("optimizer_states", ())
        for optimizer, state in zip(self.trainer.optimizers, states, strict=False):
            require_same_optimizer(optimizer, state, path=str(self.trainer.ckpt_path))
        super().restore_training_state()

    @override
    def restore_loops(self) -> None:
        super().restore_loops()
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
            self._on_loops()


class Preempted(SIGTERMException):
    """The training has stopped on all ranks at one step; ends the process with a code."""


class NoticeConnector(private.SignalConnector):
    """Leaves signals to :class:`~lightning_dist.elastic.process.lifecycle.PreemptionListener`.

    Lightning's own handler begins a broadcast from within the handler, on the ranks that got the
    signal, and looks at rank 0's only.

    Args:
        usual: the trainer's own, which this stands in for.
        start: installs the handlers.
    """

    def __init__(self, usual: private.SignalConnector, start: Callable[[], None]) -> None:
        super().__init__(usual.trainer)
        self.usual = usual
        self._start = start

    @override
    def register_signal_handlers(self) -> None:
        self._original_handlers = self._get_current_signal_handlers()
        self._start()


def notice_signals(environment: Any) -> tuple[signal.Signals, ...]:
    """SIGTERM, and under SLURM the signal with which it announces a requeue."""
    signals = [signal.SIGTERM]
    if asks_for_requeue(environment):
        signals.append(environment.requeue_signal or signal.SIGUSR1)
    return tuple(signals)


def asks_for_requeue(environment: Any) -> bool:
    """Whether this is a SLURM job that is requeued when it is preempted."""
    return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)


def requeue(environment: Any, reasons: list[str]) -> None:
    """Ask SLURM to start this job again, unless all that was said is SIGTERM (scancel)."""
    if not asks_for_requeue(environment):
        return
    if not set(reasons) - {"", signal.SIGTERM.name}:
        return
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{job}_{task}" if job and task else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", name], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero.warn(f"The job was not requeued: scontrol requeue {name}: {error}")


class KeptSource(private.DataLoaderSource):
    """Loaders whose workers outlive a launcher's signal, as their process does.

    A source is asked whenever loaders are made, and before any of their workers begins: at the
    sanity check, at the first validation after a restart, and when loaders are made anew.

    Args:
        usual: the loop's own, which this stands in for.
        take: what is done with them; the train dataloader is sharded.
    """

    def __init__(
        self,
        usual: private.DataLoaderSource,
        *,
        trainer: pl.Trainer,
        take: Callable[[Any], Any] = lambda loaders: loaders,
    ) -> None:
        super().__init__(usual.instance, usual.name)
        self.usual = usual
        self._trainer, self._take = trainer, take

    @override
    def dataloader(self) -> Any:
        loaders = super().dataloader()
        environment = private.cluster_environment(self._trainer)
        # Ranks that take the same samples, as those of a tensor-parallel group, seed them alike.
        samplers = self._trainer.distributed_sampler_kwargs or {}
        seeded, rank = int(os.environ.get("PL_SEED_WORKERS", 0)), samplers.get("rank", 0)
        for loader in _each(loaders):
            # seed_everything(workers=True): Lightning would not, where there is something already.
            if seeded and getattr(loader, "worker_init_fn", loader) is None:
                loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
            keep_workers(loader, notice_signals(environment))
        return self._take(loaders)


def place_sources(trainer: pl.Trainer, data: TrainerDataShards) -> None:
    """Stand in for the sources of a fit; the train dataloader is sharded by ``data``."""
    _restore_sources(trainer)
    fit: Any = trainer.fit_loop
    validation = fit.epoch_loop.val_loop
    train = KeptSource(private.data_source(fit), trainer=trainer, take=data.take)
    private.set_data_source(fit, train)
    kept = KeptSource(private.data_source(validation), trainer=trainer)
    private.set_data_source(validation, kept)


def _each(loaders: Any) -> list[Any]:
    """All of what a user may give a loop: one, a collection, or Lightning's own of several."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)


def restore_usual(trainer: pl.Trainer) -> None:
    """Give the trainer back what ElasticRestart has stood in for."""
    connector, signals = private.checkpoint_connector(trainer), private.signal_connector(trainer)
    if isinstance(connector, RestartConnector):
        private.set_checkpoint_connector(trainer, connector.usual)
    if isinstance(signals, NoticeConnector):
        private.give_back_handlers(signals, signals.usual)
        private.set_signal_connector(trainer, signals.usual)
    _restore_sources(trainer)


def _restore_sources(trainer: pl.Trainer) -> None:
    loops: tuple[Any, ...] = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in loops:
        source = private.data_source(loop)
        if isinstance(source, KeptSource):
            source.usual.instance = source.instance
            private.set_data_source(loop, source.usual)


def identify(trainer: pl.Trainer, *, run_id: str, takes_over: str = "") -> None:
    """Give the loggers the identity that belongs to ``run_id``, before they are first used.

    A WandbLogger without ``id=`` goes on in the same run; a TensorBoardLogger without ``version=``
    in the same folder. A CSVLogger begins a folder of its own where another rank has logged.

    Args:
        takes_over: name of this worker, where it logs in the place of another one.
    """
    for number, logger in enumerate(trainer.loggers):
        name = f"{run_id}-{number}" if number else run_id
        if isinstance(logger, WandbLogger):
            private.set_wandb_run(logger, name)
        elif isinstance(logger, TensorBoardLogger):
            private.set_tensorboard_version(logger, name)
        elif isinstance(logger, CSVLogger) and takes_over:
            private.set_csv_version(logger, takes_over)


def place_at_epoch_begin(trainer: pl.Trainer, epoch: int, *, steps: int, passes: int) -> None:
    """Let the fit loop begin ``epoch`` as if it had just ended the one before.

    Args:
        steps: optimizer steps so far.
        passes: batches of this rank so far.
    """
    fit_loop = trainer.fit_loop
    _set_all(fit_loop.epoch_progress, epoch)
    batches = fit_loop.epoch_loop.batch_progress
    _set_all(batches, 0)
    _set(batches.total, passes)
    batches.is_last_batch = False
    private.set_steps(trainer, steps)
    fit_loop.epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    fit_loop.epoch_loop.scheduler_progress.reset_on_run()
    for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
        private.begin_with_fresh_loader(loop)


def place_within_epoch(
    trainer: pl.Trainer,
    position: Position,
    *,
    steps: int,
    passes: int,
    total_passes: int,
    validated: bool,
) -> bool:
    """Let the fit loop go on within an epoch, and make up for a validation that was cut short.

    Returns whether it begins with that validation.

    Args:
        steps: optimizer steps so far.
        passes: batches of this rank in this epoch so far, if all of it had had this layout.
        total_passes: the same, of all epochs.
        validated: whether a validation that is due at this position is over.
    """
    loop = trainer.fit_loop
    progress: Any = loop.epoch_progress
    _set_all(progress, position.epoch)
    for tracker in (progress.total, progress.current):
        tracker.ready = tracker.started = position.epoch + 1
    batches = loop.epoch_loop.batch_progress
    _set(batches.current, passes)
    _set(batches.total, total_passes)
    batches.is_last_batch = passes >= loop.max_batches
    validation: Any = loop.epoch_loop.val_loop.batch_progress
    _set(validation.current, 0)
    done = validation.total.completed
    _set(validation.total, done)
    if not validated:  # "in the middle of it": Lightning then runs it, from its first batch
        validation.total.ready = validation.total.started = done + 1
    due = private.is_validation_due(trainer)
    # Where a validation is due the loop passes the end of that batch again, which counts it.
    private.set_steps(trainer, steps - due)
    return due and not validated


def place_at_step(trainer: pl.Trainer, passes: int | None, *, before: int) -> None:
    """Let the epoch loop count as if all steps so far had been taken with the present layout.

    Args:
        passes: batches of this epoch; None between two epochs.
        before: batches of the epochs before.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    counts = [(progress.total, before + (passes or 0))]
    if passes is not None:
        counts.append((progress.current, passes))
    for tracker, count in counts:
        more = count - tracker.processed
        tracker.ready, tracker.started = tracker.ready + more, tracker.started + more
        tracker.processed, tracker.completed = tracker.processed + more, tracker.completed + more


def _set_all(progress: Any, count: int) -> None:
    _set(progress.total, count)
    _set(progress.current, count)


def _set(tracker: Any, count: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = count
