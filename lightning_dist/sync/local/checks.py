"""Models, optimizers and codecs that cannot take local steps: refused at the start."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_dist.base.log import get_logger
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.sync.onebit_adam import OneBitAdam

log = get_logger(__name__)
_STABLE_OUTER_LR = 0.1
"""With which 1,000 outer steps of a small model stay finite; see the guide on local steps."""


def require_local(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError unless the optimizers step alone."""
    for each in optimizers:
        if isinstance(each, OneBitAdam | ZeroRedundancyOptimizer):
            raise ValueError(
                f"{type(each).__name__} exchanges between ranks in every step, and local steps are "
                "of one worker alone; use torch.optim.AdamW"
            )


def warn_of_bursts(settings: LocalUpdateSettings) -> None:
    """Log a warning where the residual of many windows is applied at once, which may diverge."""
    for codec in settings.inter.leaves():
        kept = "residual" in settings.memory_of(codec).kinds
        if codec.seldom and kept and settings.outer_lr > _STABLE_OUTER_LR:
            log.warning(
                "codec %s sends an element once in many outer steps, and then the changes of all "
                "of them: with outer_lr=%g the weights may diverge. Set outer_lr=%g, or use 'topk' "
                "or error_feedback=False",
                codec,
                settings.outer_lr,
                _STABLE_OUTER_LR,
            )


def require_replicas(replicas: Replicas, settings: LocalUpdateSettings) -> None:
    """Raise ValueError unless frameworks know what is a worker."""
    if replicas not in ("rank", "node"):
        raise ValueError(f"replicas must be 'rank' or 'node', got {replicas!r}")
    if replicas == "node" and settings.ddp_steps:
        raise ValueError(
            "ddp_steps are steps of DDP over all ranks, and replicas='node' has DDP inside the "
            "nodes; give one of the two"
        )


def require_workers(
    module: nn.Module,
    synced: DistributedDataParallel | None,
    settings: LocalUpdateSettings,
    *,
    world_size: int,
) -> None:
    """Raise ValueError unless every worker changes its model alone."""
    if any(isinstance(each, DistributedDataParallel) for each in module.modules()):
        raise ValueError(
            f"{type(module).__name__} has a DistributedDataParallel inside, which averages "
            "gradients in every step; give the module that it wraps"
        )
    over_all = synced is not None and synced.process_group.size() == world_size
    if settings.ddp_steps and not over_all:
        raise ValueError(
            "ddp_steps is a number of steps of plain DDP, so the model must be a "
            f"DistributedDataParallel over all {world_size} ranks; wrap it, or leave ddp_steps out"
        )
    if over_all and not settings.ddp_steps and world_size > 1:
        raise ValueError(
            "The model is a DistributedDataParallel over all ranks, which averages gradients in "
            "every step; give the module itself, or one over the ranks of a worker "
            "(process_group=), or set ddp_steps"
        )


def require_scheduler(made: object, *, outer: Optimizer) -> None:
    """Raise ValueError unless it is None or a scheduler of ``outer`` that counts steps alone."""
    if made is not None and (
        not isinstance(made, LRScheduler)
        or isinstance(made, ReduceLROnPlateau)
        or made.optimizer is not outer
    ):
        raise ValueError(
            "outer_schedule must make, from the outer optimizer, a torch LRScheduler that depends "
            f"on the number of outer steps alone, got {type(made).__name__}; for a factor of the "
            "rate use lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
        )


def require_stepped(gradients: float) -> None:
    """Raise ValueError where finite gradients wait for the first step of an optimizer.

    A GradScaler skips a step whose gradients are not finite, and a worker without a batch has none.

    Args:
        gradients: norm of all gradients of the worker.
    """
    if 0 < gradients < float("inf"):
        raise ValueError(
            "updates.step() must follow a step of the optimizer, and some gradients are not used "
            "yet, as in the middle of gradient accumulation; call it once after every "
            "optimizer.step(), and give local_updates the optimizer that steps"
        )
