"""Private and undocumented names of Lightning that ElasticRestart needs, verified on import.

Those of recovery within the process are verified where it begins.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_dist.base.features import ELASTIC_RESTART

ELASTIC_RESTART.require()

# Their public names are objects of a Trainer, which has no argument for another.
CheckpointConnector = _CheckpointConnector
DataLoaderSource = _DataLoaderSource
SignalConnector = _SignalConnector


# `strategy.cluster_environment` is not there for one device, which SLURM may have started.
def cluster_environment(trainer: pl.Trainer) -> Any:
    """The environment from which a trainer takes its ranks."""
    return trainer._accelerator_connector.cluster_environment


# A launcher has no method that passes a signal on.
def started_ranks(trainer: pl.Trainer) -> Sequence[Any]:
    """Processes of the ranks that Lightning has started; none where another launcher has."""
    launcher: Any = trainer.strategy.launcher
    return () if launcher is None else launcher.procs


# Callbacks cannot choose the checkpoint that is loaded.
def checkpoint_connector(trainer: pl.Trainer) -> CheckpointConnector:
    """The part of a trainer that loads checkpoints."""
    return trainer._checkpoint_connector


def set_checkpoint_connector(trainer: pl.Trainer, connector: CheckpointConnector) -> None:
    """Put ``connector`` in its place."""
    trainer._checkpoint_connector = connector


# Lightning's handler of SIGTERM begins a collective, and nothing turns it off.
def signal_connector(trainer: pl.Trainer) -> SignalConnector:
    """The part of a trainer that handles signals."""
    return trainer._signal_connector


def set_signal_connector(trainer: pl.Trainer, connector: SignalConnector) -> None:
    """Put ``connector`` in its place."""
    trainer._signal_connector = connector


def give_back_handlers(connector: SignalConnector, usual: SignalConnector) -> None:
    """Let ``usual`` restore the handlers that ``connector`` has found."""
    usual._original_handlers = connector._original_handlers


# Loaders are asked for after the hooks of callbacks, and workers begin at once.
def data_source(loop: Any) -> DataLoaderSource:
    """The source of the loaders of a fit or evaluation loop."""
    source: DataLoaderSource = loop._data_source
    return source


def set_data_source(loop: Any, source: DataLoaderSource) -> None:
    """Put ``source`` in its place."""
    loop._data_source = source


# `trainer.train_dataloader` is what the user gave, without the limits.
def combined_train_loader(trainer: pl.Trainer) -> Any:
    """The train dataloader with its limits; None before there is one."""
    return trainer.fit_loop._combined_loader


def forget_loader_states(trainer: pl.Trainer) -> None:
    """Let stateful train dataloaders not load what a checkpoint has of rank 0's."""
    trainer.fit_loop._combined_loader_states_to_load = []


# A tuner leaves no other mark on a trainer.
def is_searching(finder: Any) -> bool:
    """Whether a fit with this ``BatchSizeFinder`` or ``LearningRateFinder`` is its search."""
    return bool(finder._early_exit)


# The loops have no public way to say what comes next, nor to set what they have counted.
def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the optimizer waits for more passes."""
    return bool(trainer.fit_loop._should_accumulate())


def is_validation_due(trainer: pl.Trainer) -> bool:
    """Whether a trainer validates before it takes the next batch."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def set_steps(trainer: pl.Trainer, steps: int) -> None:
    """Set the steps that loggers are given."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


# The setter of `restarting` keeps it False where progress says that nothing was under way.
def end_restart(loop: Any) -> None:
    """Let a loop go on as if it had not been restarted."""
    loop._restarting = False


def begin_with_fresh_loader(loop: Any) -> None:
    """Let a loop begin as after an epoch, with a loader that was not iterated."""
    end_restart(loop)  # a restarted loop asks first whether a validation is due at batch 0
    loop._loaded_from_state_dict = False
    loop._resuming_from_checkpoint = True


# It is asked before every batch, of rank 0, and swallows what goes wrong.
def leave_out_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Let Lightning not ask whether rank 0 has got a SIGTERM."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


# Loaders are made once, and the state of a loop is taken into account once.
def begin_fit_again(trainer: pl.Trainer) -> None:
    """Let a fit that has not taken a batch begin where its loops have been placed."""
    trainer.fit_loop.reset()


def forget_train_loader(trainer: pl.Trainer) -> None:
    """Let the train dataloader be made anew when it is needed."""
    trainer.fit_loop._combined_loader = None


def forget_validation_loader(trainer: pl.Trainer) -> None:
    """Let validation dataloaders be made anew when they are needed."""
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


# A loop iterates its loader once in an epoch.
def iterate_again(trainer: pl.Trainer, *, passes: int) -> None:
    """Iterate the train dataloader anew, as after ``passes`` batches."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    iter(fetcher)
    fetcher.fetched += passes


# A batch of a loop is one micro-batch, and the closure of it is made once.
def next_batch(trainer: pl.Trainer) -> Any:
    """The next batch, as a loop would take it."""
    fetcher, batches = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
    assert fetcher is not None
    batch, _, _ = next(fetcher)
    batches.is_last_batch = fetcher.done
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    trainer._logger_connector.on_batch_start(batch)
    return batch


def give_batch(closure: Any, trainer: pl.Trainer, batch: Any, index: int) -> None:
    """Let ``closure`` compute ``batch``, number ``index`` of the epoch."""
    loop = trainer.fit_loop.epoch_loop
    arguments = loop._build_kwargs(OrderedDict(), batch, index)
    fresh = loop.automatic_optimization._make_closure(arguments, trainer.optimizers[0], index)
    closure._step_fn, closure._zero_grad_fn = fresh._step_fn, fresh._zero_grad_fn


# `trainer.callback_metrics` computes those of an epoch, by collectives.
def known_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Scalars of ``trainer.callback_metrics`` as they were computed last."""
    known: Any = trainer._logger_connector._callback_metrics
    return {name: float(value) for name, value in known.items() if value.numel() == 1}


# What `self.log` adds up over an epoch is nobody else's. Each value is a tensor of its own.
_ADDED_UP = ("value", "cumulated_batch_size")


def logged_values(trainer: pl.Trainer) -> list[tuple[Any, dict[str, Any]]]:
    """Values logged in this epoch so far; not the states of torchmetrics."""
    results: Any = trainer.fit_loop.epoch_loop._results
    return [
        (result, {name: getattr(result, name) for name in _ADDED_UP if hasattr(result, name)})
        for result in results.values()
        if result.is_tensor
    ]


def restore_logged(trainer: pl.Trainer, values: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """Forget what was logged after :func:`logged_values`."""
    results: Any = trainer.fit_loop.epoch_loop._results
    known = {id(result): before for result, before in values}
    for result in results.values():
        if id(result) in known:
            vars(result).update(known[id(result)])
        elif result.is_tensor:
            result.reset()


# Loggers take these when they are made, before anybody knows which run it is.
def set_tensorboard_version(logger: Any, version: str) -> None:
    """Let a TensorBoardLogger to which its user gave no version have this one."""
    if logger._version is None:
        logger._version = version


def set_csv_version(logger: Any, suffix: str) -> None:
    """Let a CSVLogger that has written nothing write beside what another rank has written."""
    if logger._experiment is None:
        logger._version = f"{os.path.basename(logger.log_dir)}-{suffix}"


def set_wandb_run(logger: Any, run_id: str) -> None:
    """Let a WandbLogger to which its user gave no run go on with ``run_id``, or begin it."""
    settings: dict[str, Any] = logger._wandb_init
    if logger._experiment is None and settings.get("id") is None:
        logger._id = run_id
        settings.update(id=run_id, resume="allow")
