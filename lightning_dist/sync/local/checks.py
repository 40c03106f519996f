"""Outer schedules, replicas and steps that local updates refuse."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_dist.base.log import get_logger
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas

log = get_logger(__name__)
_STABLE_OUTER_LR = 0.1
"""With which 1,000 outer steps of a small model stay finite; see the guide on local steps."""


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


def require_shards_as_workers(replicas: Replicas) -> None:
    """Raise ValueError unless a worker is what holds a sharded model."""
    if replicas != "rank":
        raise ValueError(
            f"replicas={replicas!r} is for models that each rank has as a whole, and "
            "here all ranks of a node are one worker; leave it out"
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
