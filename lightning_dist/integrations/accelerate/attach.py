"""What must hold before compression is attached to an Accelerator: a hook that would never run, or
ranks that do not know of each other, are said then and not found out at the end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
)

from lightning_dist.integrations.accelerate.async_state.refusals import kind_of
from lightning_dist.integrations.accelerate.handler import handler_of
from lightning_dist.integrations.accelerate.private import ddp_handler, prepared_models
from lightning_dist.topology.launcher import promised_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

_TWO_ON_CPU = (
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "train.py"
)


def require_attachable(accelerator: Accelerator) -> None:
    """Raise ValueError where the hook would not run or not be the only one; warn of one process."""
    if handler_of(accelerator) is not None:
        raise ValueError(
            "one CompressedDDPPlugin can be attached to an Accelerator, and one is attached "
            "already; attach it once, or give it in kwargs_handlers and do not attach it"
        )
    prepared = prepared_models(accelerator)
    if prepared:
        raise ValueError(
            "a CompressedDDPPlugin must be attached before accelerator.prepare, got an Accelerator "
            f"with a prepared {type(prepared[0]).__name__}; attach it right after Accelerator(...)"
        )
    _require_ddp(accelerator)
    _require_no_hook(ddp_handler(accelerator))
    if accelerator.num_processes == 1:
        _about_one_process()


def _require_ddp(accelerator: Accelerator) -> None:
    kind = kind_of(accelerator)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            "a CompressedDDPPlugin compresses the gradients of DistributedDataParallel, got an "
            f"Accelerator with {kind}, which exchanges them itself; launch with --multi_gpu "
            "(distributed_type: MULTI_GPU), or leave the plugin out"
        )
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.tp_enabled:
        raise ValueError(
            "a CompressedDDPPlugin compresses the gradients of DistributedDataParallel, which "
            f"Accelerate does not use with tensor parallelism, got tp_size={parallelism.tp_size}; "
            "leave tp_size at 1, or the plugin out"
        )


def _require_no_hook(given: DistributedDataParallelKwargs | None) -> None:
    if given is None:
        return
    no_hook = DDPCommunicationHookType.NO
    for name, default in (("comm_hook", no_hook), ("comm_wrapper", no_hook)):
        if getattr(given, name) != default:
            raise ValueError(
                f"a model takes one communication hook and the CompressedDDPPlugin registers its "
                f"own, got DistributedDataParallelKwargs({name}={getattr(given, name)}); leave it "
                "out, or the plugin"
            )
    if given.comm_state_option:
        raise ValueError(
            "comm_state_option belongs to a hook of torch and cannot take effect beside a "
            f"CompressedDDPPlugin, got {given.comm_state_option}; leave it out"
        )
    if type(given).register_comm_hook is not DistributedDataParallelKwargs.register_comm_hook:
        raise ValueError(
            "a model takes one communication hook and the CompressedDDPPlugin registers its own, "
            f"got a {type(given).__name__} with a register_comm_hook of its own; use a "
            "DistributedDataParallelKwargs, or leave the plugin out"
        )


def _about_one_process() -> None:
    """One process of one, or one of several that will train for themselves."""
    promised = promised_ranks()
    if promised is not None:
        name, count = promised
        raise ValueError(
            f"all processes of a launch must train together, but {name}={count} and this "
            "Accelerator has num_processes=1: every process would train for itself. On CPU set "
            "ACCELERATE_USE_CPU=true in the environment and leave use_cpu and cpu= out "
            f"({_TWO_ON_CPU}); start a job of one process without a launcher"
        )
    log.warning(
        "the Accelerator has one process, so nothing is exchanged or compressed. If you asked for "
        "several: 'accelerate launch --cpu --num_processes 2' starts one; write '%s'",
        _TWO_ON_CPU,
    )
