"""Features of this package, and what each needs of an installed torch, Lightning or Accelerate.

A name that is private, or that not all admitted versions have, belongs to the features that use it:
nothing is refused for what it does not need.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from lightning_dist.base.log import get_logger
from lightning_dist.base.versions import installed_version, release

log = get_logger(__name__)

Table = Mapping[str, str]
"""Names, with spaces between them, by their owner: ``"module"``, ``"module:Class"`` or, for
arguments, ``"module:function"``."""

TESTED = {"torch": "2.15", "lightning": "2.6", "accelerate": "1.15", "transformers": "5.24"}
"""Newest minor version of each package that the tests have met."""

_STORES = ("STORE_ATTR", "LOAD_CONST")
"""Instructions of ``self.name = ...``, and of ``super().__setattr__("name", ...)``."""


@dataclass(frozen=True, eq=False)
class Feature:
    """A part of this package that only some versions of another package can serve.

    Args:
        title: the part, as its users call it; begins a sentence.
        since: the first version that has all of ``names``.
        names: what the part uses, apart from documented names that every version has.
        package: the other package.
    """

    title: str
    since: str
    names: Table = field(repr=False)
    package: str = "torch"

    @cached_property
    def missing(self) -> str | None:
        """The first name that is not there, as ``torch.Tensor._values``; None if all are."""
        return next(_missing_of(self.names), None)

    @property
    def by_version(self) -> str:
        """``"available"``, or what it needs, by the version of the package alone."""
        is_there = release(installed_version(self.package)) >= release(self.since)
        return "available" if is_there else f"needs {self.package} >= {self.since}"

    def require(self) -> None:
        """Verify that all names are there, once.

        A version above the newest one that was tested is warned of, and is not refused for that.

        Raises:
            ImportError: one is missing, with its name and the version that has it.
        """
        if self.missing is not None:
            raise ImportError(self.refusal)
        _warn_untested(self.package)

    @property
    def refusal(self) -> str:
        """Message for a version that lacks a name."""
        package, installed = self.package, installed_version(self.package)
        found = f"{package} {installed} has no {self.missing}"
        if _is_untested(package):
            return (
                f"{self.title} was last tested with {package} {TESTED[package]}, and {found}; "
                f"install '{package}=={TESTED[package]}.*'"
            )
        return (
            f"{self.title} needs {package} {self.since} or newer: {found}; "
            f"install '{package}>={self.since}', or leave it out"
        )


def is_there(owner: str, name: str) -> bool:
    """Whether a module or class has ``name``, declares it, or a method of the class sets it.

    Of a function, whether it takes an argument of that name.
    """
    module, _, attribute = owner.partition(":")
    try:
        found = import_module(module)
        kind = getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError):
        return False
    if inspect.isfunction(kind):
        return name in inspect.signature(kind).parameters
    if hasattr(kind, name) or not isinstance(kind, type):
        return hasattr(kind, name)
    # A compiled backward pass replaces Module.__init__.
    return any(
        name in vars(base).get("__annotations__", {})
        or any(_sets(member, name) for member in vars(base).values())
        for base in kind.__mro__
    )


def _missing_of(table: Table) -> Iterator[str]:
    for owner, names in table.items():
        for name in names.split():
            if not is_there(owner, name):
                yield f"{owner.replace(':', '.')}.{name}"


def _sets(method: Any, name: str) -> bool:
    function = inspect.unwrap(method) if inspect.isfunction(method) else None
    if not inspect.isfunction(function):  # one wrapped by another may be C's
        return False
    if name not in (*function.__code__.co_names, *function.__code__.co_consts):
        return False
    stores = _STORES if function.__name__ == "__init__" else _STORES[:1]
    code = dis.get_instructions(function)
    return any(instruction.argval == name and instruction.opname in stores for instruction in code)


def _is_untested(package: str) -> bool:
    return release(installed_version(package))[:2] > release(TESTED[package])


@cache
def _warn_untested(package: str) -> None:
    if _is_untested(package):
        log.warning(
            "lightning_dist was not tested with %s %s (newest: %s); all names that it uses are "
            "there, so training goes on",
            package,
            installed_version(package),
            TESTED[package],
        )


_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler"
_FSDP = "torch.distributed.fsdp._fully_shard"
_PYTORCH = "lightning.pytorch"
_STRATEGIES = f"{_PYTORCH}.strategies"
_CONNECTORS = f"{_PYTORCH}.trainer.connectors"

DDP = Feature(
    "Gradient compression and local steps",
    "2.7",
    {
        "torch": "_foreach_copy_",
        "torch._C": "_current_graph_task_id",
        "torch:Tensor": "_indices _values",
        "torch.utils._pytree": "tree_leaves tree_map_only",
        "torch.amp.grad_scaler:GradScaler": "_scale",
        "torch.autograd:Variable": "_execution_engine",
        "torch.nn.parallel:DistributedDataParallel": (
            "_build_debug_param_to_name_mapping _build_params_for_reducer _comm_hooks "
            "_ddp_init_helper _has_rebuilt_buckets bucket_bytes_cap find_unused_parameters "
            "is_multi_device_module parameters_to_ignore require_backward_grad_sync static_graph"
        ),
        "torch.distributed:Reducer": "_remove_autograd_hooks",
        "torch.distributed.distributed_c10d": "_set_pg_timeout _world",
        "torch.distributed:ProcessGroup": "_device_types _get_backend",
    },
)

ORDERED_GROUPS = Feature(
    "A node whose ranks are not consecutive",
    "2.13",
    {"torch.distributed:new_group": "sort_ranks"},
)
"""Groups whose ranks are not in ascending order."""

FLIGHT_RECORDER = Feature(
    "Flight record of CommProfiler",
    "2.9",
    {"torch._C._distributed_c10d": "_dump_fr_trace_json"},
)

COMPILED = Feature(
    "torch.compile", "2.7", {"torch._dynamo.eval_frame:OptimizedModule": "_orig_mod"}
)
"""Models that were compiled: a name that takes long to import."""

CHECKPOINTS = Feature(
    "Asynchronous checkpoints",
    "2.7",
    {
        "torch:Tensor": "_version",
        "torch:UntypedStorage": "_cdata",
        "torch.storage:TypedStorage": "_pickle_storage_type _size _untyped_storage",
        "torch.serialization": "location_tag normalize_storage_type",
        "torch.nn:Module": "_load_from_state_dict _load_state_dict_pre_hooks",
    },
)

SHARDED_CHECKPOINTS = Feature(
    "Checkpoints of sharded models",
    "2.7",
    {
        "torch.distributed.tensor:DTensor": "__create_chunk_list__",
        "torch:UntypedStorage": "_checkpoint_offset",
    },
)

RESTART = Feature(
    "Elastic restart",
    "2.7",
    {
        "torch:Tensor": "_version",
        "torch.optim.lr_scheduler:LRScheduler": "_last_lr",
        "torch.optim.lr_scheduler:SequentialLR": "_schedulers",
        "torch.utils.data:DataLoader": "_iterator",
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_shutdown_workers",
    },
)

LAUNCH = Feature(
    "lightning-dist launch",
    "2.7",
    {
        "torch.distributed.launcher.api": "LocalElasticAgent",
        _AGENT: "_monitor_workers _remaining_restarts _start_workers",
        "torch.distributed.elastic.multiprocessing.api": "get_subprocess_handler",
        _HANDLER: "_popen _stderr _stdout",
        "torch.distributed.run": "get_args_parser",
    },
)

AGENT = Feature(
    "lightning-dist launch of recovery='in_process'",
    "2.11",
    {
        _AGENT: (
            "_exit_barrier _monitor_workers _pcontext _remaining_restarts _rendezvous "
            "_set_local_rank_env _shutdown _worker_group"
        ),
        "torch.distributed.elastic.multiprocessing.api:SubprocessContext": "subprocess_handlers",
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler": (
            "_store"
        ),
    },
)
"""The launcher's part of recovery within the process."""

RECOVERY = Feature(
    "recovery='in_process'",
    "2.14",
    {
        "torch.nn.parallel:DistributedDataParallel": ("_has_rebuilt_buckets forward_sync_buffers"),
        "torch.distributed:Reducer": "_rebuild_buckets",
        "torch.distributed:init_process_group": "enable_reconfigure",
        "torch.distributed:ProcessGroup": "_device_types _get_backend",
        "torch.distributed.distributed_c10d": (
            "ReconfigureOptions _new_process_group_helper _world"
        ),
    },
)
"""The workers' part."""

FSDP = Feature(
    "FSDP2",
    "2.9",
    {
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state",
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup": (
            "fsdp_params mesh_info offload_policy reduce_grads _is_hsdp _all_gather_comm "
            "_reduce_scatter_comm device gradient_divide_factor force_sum_reduction_for_comms"
        ),
        f"{_FSDP}._fsdp_collectives": "_get_gradient_divide_factors",
        f"{_FSDP}._fsdp_state:FSDPState": "_root_post_backward_final_callback",
        f"{_FSDP}._fsdp_param:FSDPParam": (
            "_orig_size fsdp_placement mp_policy padded_sharded_param_size sharded_param"
        ),
        "torch:Tensor": "_post_accumulate_grad_hooks",
    },
)

LIGHTNING = Feature(
    "Strategies for Lightning",
    "2.5",
    {
        f"{_STRATEGIES}:DDPStrategy": (
            "_configure_launcher _ddp_kwargs _get_process_group_backend _launcher _setup_model "
            "_start_method _timeout configure_ddp load_optimizer_state_dict save_checkpoint"
        ),
        f"{_STRATEGIES}:ModelParallelStrategy": (
            "_device_mesh _get_process_group_backend _save_distributed_checkpoint "
            "_setup_distributed _timeout"
        ),
        f"{_STRATEGIES}.launchers:_MultiProcessingLauncher": (
            "get_extra_results procs update_main_process_results"
        ),
        "lightning.pytorch:LightningModule": "_device_mesh",
        "lightning.fabric.utilities.distributed": "_init_dist_connection",
    },
    "lightning",
)

ASYNC_CHECKPOINT = Feature(
    "AsyncCheckpoint",
    "2.5.6",
    {
        "lightning.pytorch.callbacks:ModelCheckpoint": (
            "_ModelCheckpoint__resolve_ckpt_dir _enable_version_counter _find_last_checkpoints "
            "_fs _last_checkpoint_saved _last_global_step_saved _link_checkpoint "
            "_remove_checkpoint _save_checkpoint _save_last_checkpoint _save_topk_checkpoint "
            "_should_remove_checkpoint _should_save_on_exception _update_best_and_save file_exists"
        ),
        "lightning.pytorch:Trainer": "_checkpoint_connector",
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector": (
            "_ckpt_path dump_checkpoint"
        ),
    },
    "lightning",
)

ELASTIC_RESTART = Feature(
    "ElasticRestart",
    "2.5.6",
    {
        f"{_PYTORCH}.callbacks:BatchSizeFinder": "_early_exit",
        f"{_PYTORCH}.callbacks:LearningRateFinder": "_early_exit",
        f"{_PYTORCH}:Trainer": "_accelerator_connector _checkpoint_connector _signal_connector",
        f"{_CONNECTORS}.accelerator_connector:_AcceleratorConnector": "cluster_environment",
        f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector": (
            "_loaded_checkpoint restore_callbacks restore_datamodule restore_loops restore_model "
            "restore_training_state resume_start"
        ),
        f"{_CONNECTORS}.data_connector:_DataLoaderSource": "dataloader instance name",
        f"{_CONNECTORS}.signal_connector:_SignalConnector": (
            "_get_current_signal_handlers _original_handlers register_signal_handlers"
        ),
        f"{_PYTORCH}.loops.fit_loop:_FitLoop": (
            "_combined_loader _combined_loader_states_to_load _data_fetcher _data_source "
            "_should_accumulate epoch_loop epoch_progress max_batches setup_data"
        ),
        f"{_PYTORCH}.loops.training_epoch_loop:_TrainingEpochLoop": (
            "_batches_that_stepped _should_check_val_fx automatic_optimization batch_progress "
            "scheduler_progress val_loop"
        ),
        f"{_PYTORCH}.loops.evaluation_loop:_EvaluationLoop": "_data_source batch_progress",
        f"{_PYTORCH}.loops.loop:_Loop": (
            "_loaded_from_state_dict _restarting _resuming_from_checkpoint"
        ),
        f"{_PYTORCH}.loggers:CSVLogger": "_experiment _version",
        f"{_PYTORCH}.loggers:TensorBoardLogger": "_version",
        f"{_PYTORCH}.loggers:WandbLogger": "_experiment _id _wandb_init",
        f"{_PYTORCH}.strategies.launchers:_SubprocessScriptLauncher": "procs",
    },
    "lightning",
)

TRAINER_RECOVERY = Feature(
    "recovery='in_process' of a Trainer",
    "2.6",
    {
        f"{_PYTORCH}:Trainer": "_logger_connector",
        f"{_PYTORCH}.loops.fit_loop:_FitLoop": "reset",
        f"{_PYTORCH}.loops.training_epoch_loop:_TrainingEpochLoop": (
            "_broadcast_sigterm_tensor _build_kwargs _results"
        ),
        f"{_PYTORCH}.loops.evaluation_loop:_EvaluationLoop": "_combined_loader",
        f"{_PYTORCH}.loops.fetchers:_DataFetcher": "fetched",
        f"{_PYTORCH}.loops.optimization.automatic:_AutomaticOptimization": "_make_closure",
        f"{_PYTORCH}.loops.optimization.automatic:Closure": "_step_fn _zero_grad_fn",
        f"{_CONNECTORS}.logger_connector.result:_ResultMetric": (
            "cumulated_batch_size is_tensor value"
        ),
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector": (
            "_callback_metrics on_batch_start"
        ),
        f"{_PYTORCH}:LightningModule": "_on_before_batch_transfer",
    },
    "lightning",
)
"""Steps that are repeated by the ranks that are left."""

FABRIC = Feature(
    "Strategies for Fabric",
    "2.5",
    {
        "lightning.fabric.strategies.ddp:DDPStrategy": (
            "_backward_sync_control _configure_launcher _ddp_kwargs _get_process_group_backend "
            "_setup_distributed _timeout setup_module"
        ),
        "lightning.fabric.strategies:ModelParallelStrategy": (
            "_backward_sync_control _device_mesh _get_process_group_backend "
            "_save_distributed_checkpoint _setup_distributed _timeout"
        ),
        "lightning.fabric.wrappers:_FabricModule": "_forward_module",
    },
    "lightning",
)

ACCELERATE = Feature(
    "CompressedDDPPlugin",
    "1.10",
    {
        "accelerate:Accelerator": ("_custom_objects _models _optimizers ddp_handler prepare_model"),
        "accelerate:ParallelismConfig": "fsdp_dim_names",
        "accelerate.utils.other": "load",
    },
    "accelerate",
)

ACCELERATE_COMMANDS = Feature(
    "lightning-dist config and launch for Accelerate",
    "1.10",
    {
        "accelerate.commands.config.config": "get_user_input",
        "accelerate.commands.config.config_args": "load_config_from_file",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.commands.launch": "launch_command_parser main",
    },
    "accelerate",
)
"""Names of the command line, which a training does not import."""

TRANSFORMERS = Feature(
    "CompressedDDPMixin",
    "5.23",
    {
        "transformers:Trainer": (
            "_load_optimizer_and_scheduler _save_optimizer_and_scheduler _wrap_model "
            "create_accelerator_and_postprocess"
        ),
    },
    "transformers",
)
"""Methods that ``CompressedDDPMixin`` overrides."""

FEATURES = (
    *(DDP, FSDP, CHECKPOINTS, SHARDED_CHECKPOINTS, RESTART, LAUNCH, RECOVERY, AGENT),
    *(ORDERED_GROUPS, FLIGHT_RECORDER, COMPILED),
    *(LIGHTNING, FABRIC, ASYNC_CHECKPOINT, ELASTIC_RESTART, TRAINER_RECOVERY),
    *(ACCELERATE, ACCELERATE_COMMANDS, TRANSFORMERS),
)
"""All of them, those of torch first."""
