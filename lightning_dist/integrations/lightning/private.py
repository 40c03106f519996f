"""Private and undocumented names of Lightning and Fabric, verified when this is imported.

Classes of ours override some of them and inherit others, which stand in :data:`NAMES` too; all
else of the package goes through the functions. How names are verified is in
:mod:`lightning_dist.private`.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn
from torchmetrics import Metric

from lightning_dist.private import Table, require_names

_PYTORCH = "lightning.pytorch"
_CONNECTORS = f"{_PYTORCH}.trainer.connectors"

NAMES: Table = {
    f"{_PYTORCH}.callbacks:ModelCheckpoint": (
        "_ModelCheckpoint__resolve_ckpt_dir _enable_version_counter _find_last_checkpoints _fs "
        "_last_checkpoint_saved _last_global_step_saved _link_checkpoint _remove_checkpoint "
        "_save_checkpoint _save_last_checkpoint _save_topk_checkpoint _should_remove_checkpoint "
        "_should_save_on_exception _update_best_and_save file_exists"
    ),
    f"{_PYTORCH}.callbacks:BatchSizeFinder": "_early_exit",
    f"{_PYTORCH}.callbacks:LearningRateFinder": "_early_exit",
    f"{_PYTORCH}:Trainer": (
        "_accelerator_connector _checkpoint_connector _logger_connector _signal_connector "
        "val_check_batch"
    ),
    f"{_CONNECTORS}.accelerator_connector:_AcceleratorConnector": "cluster_environment",
    f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector": (
        "_ckpt_path _loaded_checkpoint dump_checkpoint restore_callbacks restore_datamodule "
        "restore_loops restore_model restore_training_state resume_start"
    ),
    f"{_CONNECTORS}.data_connector:_DataLoaderSource": "dataloader instance name",
    f"{_CONNECTORS}.signal_connector:_SignalConnector": (
        "_get_current_signal_handlers _original_handlers register_signal_handlers"
    ),
    f"{_PYTORCH}.loops.fit_loop:_FitLoop": (
        "_combined_loader _combined_loader_states_to_load _data_fetcher "
        "_data_source _loaded_from_state_dict _restarting _resuming_from_checkpoint "
        "_should_accumulate epoch_loop epoch_progress max_batches reset setup_data"
    ),
    f"{_PYTORCH}.loops.training_epoch_loop:_TrainingEpochLoop": (
        "_batches_that_stepped _broadcast_sigterm_tensor _build_kwargs _loaded_from_state_dict "
        "_restarting _results _resuming_from_checkpoint _should_check_val_fx "
        "automatic_optimization batch_progress scheduler_progress val_loop"
    ),
    f"{_PYTORCH}.loops.evaluation_loop:_EvaluationLoop": (
        "_combined_loader _data_source _loaded_from_state_dict _on_evaluation_end _restarting "
        "_resuming_from_checkpoint batch_progress"
    ),
    f"{_PYTORCH}.loops.fetchers:_DataFetcher": "fetched",
    f"{_CONNECTORS}.logger_connector.result:_ResultMetric": (
        "cumulated_batch_size is_tensor meta value"
    ),
    f"{_PYTORCH}.loops.optimization.automatic:_AutomaticOptimization": "_make_closure",
    f"{_PYTORCH}.loops.optimization.automatic:Closure": "_step_fn _zero_grad_fn",
    f"{_PYTORCH}.trainer.connectors.logger_connector.logger_connector:_LoggerConnector": (
        "_callback_metrics epoch_end_reached on_batch_start reset_results"
    ),
    f"{_PYTORCH}.loggers:CSVLogger": "_experiment _version",
    f"{_PYTORCH}.loggers:TensorBoardLogger": "_version",
    f"{_PYTORCH}.loggers:WandbLogger": "_experiment _id _wandb_init",
    f"{_PYTORCH}.strategies:DDPStrategy": (
        "_configure_launcher _ddp_kwargs _get_process_group_backend _launcher _setup_model "
        "_start_method _timeout configure_ddp load_optimizer_state_dict save_checkpoint"
    ),
    f"{_PYTORCH}.strategies:ModelParallelStrategy": (
        "_device_mesh _get_process_group_backend _save_distributed_checkpoint _setup_distributed "
        "_timeout"
    ),
    f"{_PYTORCH}:LightningModule": "_current_fx_name _device_mesh _on_before_batch_transfer",
    f"{_PYTORCH}.strategies.launchers:_MultiProcessingLauncher": (
        "get_extra_results procs update_main_process_results"
    ),
    f"{_PYTORCH}.strategies.launchers:_SubprocessScriptLauncher": "procs",
    "torchmetrics:Metric": "_computed _update_count",
    "lightning.fabric.strategies.ddp:DDPStrategy": (
        "_backward_sync_control _configure_launcher _ddp_kwargs _get_process_group_backend "
        "_setup_distributed _timeout setup_module"
    ),
    "lightning.fabric.strategies:ModelParallelStrategy": (
        "_backward_sync_control _device_mesh _get_process_group_backend "
        "_save_distributed_checkpoint _setup_distributed _timeout"
    ),
    "lightning.fabric.utilities.distributed": "_init_dist_connection",
    "lightning.fabric.wrappers:_FabricModule": "_forward_module",
}

require_names("lightning", NAMES)

# Their public names are objects of a Trainer, which has no argument for another.
CheckpointConnector = _CheckpointConnector
DataLoaderSource = _DataLoaderSource
MultiProcessingLauncher = _MultiProcessingLauncher
SignalConnector = _SignalConnector


# A strategy makes its group with the default store, which outlives a start.
def init_process_group_over(store: Any, strategy: Any) -> None:
    """Make the default process group as a ``DDPStrategy`` would, over ``store``."""
    device = strategy.root_device
    _init_dist_connection(
        strategy.cluster_environment,
        strategy._get_process_group_backend(),
        store=store,
        timeout=group_timeout(strategy),
        device_id=None if device.type == "cpu" else device,
    )


# A strategy takes it and does not tell it.
def group_timeout(strategy: Any) -> timedelta | None:
    """The timeout of the process groups of a ``DDPStrategy``; None for torch's default."""
    timeout: timedelta | None = strategy._timeout
    return timeout


# `LightningModule.device_mesh` has no setter.
def give_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Let ``module.device_mesh`` be ``mesh``."""
    module._device_mesh = mesh


# `dirpath` is set in setup(), and `ckpt_path="last"` asks before it.
def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """The folder in which a callback keeps its checkpoints, also before its set-up."""
    found: Any = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    path: str = os.fspath(found)
    return path


# What it has saved may not be among the best, nor be called last.
def newest_saved(callback: ModelCheckpoint) -> str:
    """The path of the checkpoint that a callback has asked for last."""
    path: str = callback._last_checkpoint_saved
    return path


# The states of callbacks leave it out, and ranks that differ in it do not save together.
def saved(callback: ModelCheckpoint) -> tuple[Any, ...]:
    """Folder, step and path of the last save of a callback, for another rank."""
    return callback.dirpath, callback._last_global_step_saved, callback._last_checkpoint_saved


def set_saved(callback: ModelCheckpoint, saved: tuple[Any, ...]) -> None:
    """Take over what :func:`saved` has returned on another rank."""
    callback.dirpath, callback._last_global_step_saved, callback._last_checkpoint_saved = saved


# Ours, which overrides it, is static as well.
def link_checkpoint(trainer: pl.Trainer, path: str, link: str) -> None:
    """Let ``link`` be a symbolic link to the checkpoint at ``path``."""
    ModelCheckpoint._link_checkpoint(trainer, path, link)


# trainer.save_checkpoint() ends with a barrier, at which training would wait for all ranks.
def dump_checkpoint(trainer: pl.Trainer, *, weights_only: bool) -> dict[str, Any]:
    """The state of a training, as it goes into a checkpoint."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only)


# Setting `trainer.ckpt_path` would hold for later fits too.
def set_loaded_path(trainer: pl.Trainer, path: str) -> None:
    """Let ``trainer.ckpt_path`` be ``path``, until the next fit."""
    trainer._checkpoint_connector._ckpt_path = path


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
    found: DataLoaderSource = loop._data_source
    return found


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


# No hook stands between the last collective of a validation's metrics and what callbacks do then.
def guard_validation(
    trainer: pl.Trainer,
    validate: Callable[[Callable[[], Any]], Any],
    commit: Callable[[], None],
) -> None:
    """Let a fit validate by ``validate``, which is given what the loop does.

    Args:
        commit: called when the metrics are there, before the hooks at the end.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    usual, end = loop.run, loop._on_evaluation_end

    def commit_and_end(*args: Any, **kwargs: Any) -> None:
        commit()
        end(*args, **kwargs)

    loop.run, loop._on_evaluation_end = lambda: validate(usual), commit_and_end


# Metrics of torchmetrics exchange when they are first computed, wherever that is.
def compute_at_epoch_end(trainer: pl.Trainer, meet: Callable[[Callable[[], None]], None]) -> None:
    """Let ``meet`` compute the metrics of an epoch's steps before the hooks at its end."""
    connector: Any = trainer._logger_connector
    usual = connector.epoch_end_reached

    def compute() -> None:
        results: Any = trainer.fit_loop.epoch_loop._results
        for each in results.values():
            if not each.is_tensor and each.meta.on_epoch:
                each.value.compute()  # and keep what comes of it

    def reached() -> None:
        usual()
        if trainer.training:
            meet(compute)

    connector.epoch_end_reached = reached


def hold_validation(trainer: pl.Trainer) -> Callable[[], None]:
    """Remember what a validation changes before its end; returns what puts it back."""
    loop, module = trainer.fit_loop.epoch_loop.val_loop, trainer.lightning_module
    progress, hook = loop.batch_progress.state_dict(), module._current_fx_name
    modes = [(each, each.training) for each in module.modules()]
    metrics = [
        (each, {**copy.deepcopy(each.metric_state), **{name: vars(each)[name] for name in _CACHED}})
        for each in module.modules()
        if isinstance(each, Metric)
    ]

    def begin_again() -> None:
        loop.teardown()
        loop.batch_progress.load_state_dict(progress)
        end_restart(loop)
        trainer._logger_connector.reset_results()
        module._current_fx_name = hook
        for each, mode in modes:
            each.training = mode
        for metric, state in metrics:
            vars(metric).update(copy.deepcopy(state))

    return begin_again


def has_batch(trainer: pl.Trainer) -> bool:
    """Whether a batch was taken from the train dataloader that is not processed yet."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready > batches.processed)


# Nobody else knows which hook runs.
def is_between_micro_batches(trainer: pl.Trainer) -> bool:
    """True in ``on_train_batch_start`` and ``on_train_batch_end``."""
    hook = trainer.lightning_module._current_fx_name
    return hook in ("on_train_batch_start", "on_train_batch_end")


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
    made = loop.automatic_optimization._make_closure(arguments, trainer.optimizers[0], index)
    closure._step_fn, closure._zero_grad_fn = made._step_fn, made._zero_grad_fn


_CACHED = ("_computed", "_update_count")
"""A metric's values beside its states."""


# `trainer.callback_metrics` computes those of an epoch, by collectives.
def known_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Scalars of ``trainer.callback_metrics`` as they were computed last."""
    known: Any = trainer._logger_connector._callback_metrics
    return {name: float(each) for name, each in known.items() if each.numel() == 1}


# What `self.log` adds up over an epoch is nobody else's. Each value is a tensor of its own.
_ADDED_UP = ("value", "cumulated_batch_size")


def logged_values(trainer: pl.Trainer) -> list[tuple[Any, dict[str, Any]]]:
    """Values logged in this epoch so far; not the states of torchmetrics."""
    results: Any = trainer.fit_loop.epoch_loop._results
    return [
        (each, {name: getattr(each, name) for name in _ADDED_UP if hasattr(each, name)})
        for each in results.values()
        if each.is_tensor
    ]


def restore_logged(trainer: pl.Trainer, values: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """Forget what was logged after :func:`logged_values`."""
    results: Any = trainer.fit_loop.epoch_loop._results
    known = {id(each): before for each, before in values}
    for each in results.values():
        if id(each) in known:
            vars(each).update(known[id(each)])
        elif each.is_tensor:
            each.reset()


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


# Fabric's `module` is the one that the user gave, without DDP.
def without_fabric(model: nn.Module) -> nn.Module:
    """The module that Fabric has wrapped for a user; the model itself if it has not."""
    inner: nn.Module = getattr(model, "_forward_module", model)
    return inner
