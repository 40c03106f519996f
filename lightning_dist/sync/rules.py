"""Rules that a training must keep, in one table: each is checked for every framework.

A rule looks at a :class:`Case` and returns what is wrong, with the value received and what to do.
Rules that need only settings stand beside their fields, in ``settings/``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.base.accelerator import has_streams
from lightning_dist.base.private import communication_hooks
from lightning_dist.measurement.exposure import first_compressed_step
from lightning_dist.settings.exchange import (
    DDP,
    FSDP2,
    LOCAL,
    LOCAL_SHARDS,
    ExchangeSettings,
    ShardedSettings,
)
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.buckets import finds_unused, sparse_tables, trained_by_ddp
from lightning_dist.sync.onebit_adam import OneBitAdam

if TYPE_CHECKING:
    from lightning_dist.reducer.reducer import Reducer

_OF_EXPERTS = {"allreduce": False, "skip_allreduce": True}
"""Marks of parameters that differ between ranks: of Megatron-LM and DeepSpeed, and of Tutel."""

Moment: TypeAlias = Literal["module", "model", "optimizers", "clipping", "steps"]
"""Moment at which a rule can be checked.

``"module"``: before DDP wraps it; ``"model"``: as it trains, when ranks are known;
``"optimizers"``: with those of the model; ``"clipping"``: when gradients are clipped; ``"steps"``:
when their number is known.
"""


@dataclass(frozen=True)
class Case:
    """A training as rules see it.

    Args:
        model: ``None`` if it is not at hand.
        parameters: those whose gradients travel; None: all.
        attached: what keeps the replicas of the model equal already.
        world_size: ranks.
        reducer: of the model.
        steps: optimizer steps that follow.
    """

    settings: ExchangeSettings
    model: nn.Module | None = None
    optimizers: Sequence[Optimizer] = ()
    environment: Environment = field(default_factory=Environment)
    parameters: Container[Tensor] | None = None
    attached: Sync | None = None
    world_size: int = 1
    reducer: Reducer | None = None
    steps: float = 0

    @property
    def module(self) -> nn.Module:
        """The model without DDP."""
        assert self.model is not None
        return self.ddp.module if self.ddp is not None else self.model

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model in DDP; None if it is not."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None


@dataclass(frozen=True)
class Rule:
    """A rule of the table.

    Args:
        name: what has to hold.
        at: when it can be checked.
        of: kinds of training that it is for, as ``kind`` of their settings.
        problem: the message for a case in which it does not hold; None if it does.
    """

    name: str
    at: Moment
    of: Collection[str]
    problem: Callable[[Case], str | None]


def check(case: Case, *, at: Moment) -> None:
    """Raise ValueError for the first rule that does not hold."""
    for rule in RULES:
        if rule.at == at and case.settings.kind in rule.of:
            message = rule.problem(case)
            if message is not None:
                raise ValueError(message)


# Modules.


def _trains_nothing(case: Case) -> str | None:
    if trained_by_ddp(case.module):
        return None
    return (
        "The model must have a parameter with requires_grad=True, and has none; unfreeze one, "
        "or run without a distributed strategy"
    )


def _is_on_several_devices(case: Case) -> str | None:
    devices = {name: p.device for name, p in trained_by_ddp(case.module).items()}
    name, device = next(iter(devices.items()))
    for other, where in devices.items():
        if where != device:
            return (
                f"Compressed DDP needs one device per process, and {name!r} is on {device} and "
                f"{other!r} on {where}; start a process for each device, or use plain DDP"
            )
    if device.type == "cpu" or has_streams(device):
        return None
    return (
        "Gradients must be on the CPU or on an accelerator with streams, such as CUDA, and "
        f"{name!r} is on {device}; use plain DDP there"
    )


def _has_experts(case: Case) -> str | None:
    marked = (
        (name, mark, value)
        for name, parameter in trained_by_ddp(case.module).items()
        for mark, value in _OF_EXPERTS.items()
        if getattr(parameter, mark, None) is value
    )
    name, mark, value = next(marked, ("", "", None))
    if not name:
        return None
    return (
        f"Every rank must have the same parameters, and {name!r} is marked as that of "
        f"an expert ({mark}={value}), of which ranks have different ones: a mean would "
        "mix them; wrap the model without its experts, or run without expert "
        "parallelism"
    )


def _compresses_sparse_gradients(case: Case) -> str | None:
    settings = case.settings
    for name, table in sparse_tables(case.module).items():
        steps, shape = settings.policy.boundaries(), tuple(table.shape)
        codecs = [settings.policy.for_tensor(name, shape, step=step) for step in steps]
        if settings.delay or not all(codec.lossless for codec in codecs):
            got = "delay=1" if settings.delay else f"codec {settings.inter}"
            return (
                f"The gradient of {name!r} is sparse (sparse=True), so it is averaged at once and "
                f"uncompressed, got {got}; set codec=by_name(..., {{{name!r}: 'none'}}) without "
                "delay, make it with sparse=False, or freeze it"
            )
    return None


# Models in DDP.


def _is_not_in_ddp(case: Case) -> str | None:
    if case.ddp is not None:
        return None
    return (
        f"compress_ddp needs a DistributedDataParallel, got {type(case.model).__name__}; wrap the "
        "model first: DistributedDataParallel(model); compress_fsdp is for those of fully_shard"
    )


def _mixes_precision_in_ddp(case: Case) -> str | None:
    if case.ddp is None or case.ddp.mixed_precision is None:
        return None
    return (
        "DistributedDataParallel(mixed_precision=...) installs a communication hook of its own "
        "and takes no second one; use torch.autocast, or Trainer(precision='bf16-mixed')"
    )


def _skips_buckets(case: Case) -> str | None:
    if not getattr(case.ddp, "skip_all_reduce_unused_params", False):
        return None
    return (
        "DistributedDataParallel(skip_all_reduce_unused_params=True) skips buckets, and the "
        "compressed step ends with the last one; leave it out"
    )


def _has_a_hook(case: Case) -> str | None:
    assert case.ddp is not None
    hooks = [hook for hook, _ in communication_hooks(case.ddp)]
    if not hooks:
        return None
    other, remedy = hooks[0].__qualname__, "remove that registration"
    if hooks[0].__module__.startswith(f"{__package__}."):
        other, remedy = "that of compress_ddp", "call compress_ddp once"
    return (
        f"A model takes one communication hook, and {other} is registered already; {remedy}, "
        "or wrap the model in a new DistributedDataParallel"
    )


def _writes_what_may_be_unused(case: Case) -> str | None:
    assert case.ddp is not None
    if case.settings.state_update != "immediate" or not finds_unused(case.ddp):
        return None
    return (
        "state_update='immediate' writes residuals before it is known which parameters no rank has "
        "used, got find_unused_parameters=True; leave state_update at 'auto'"
    )


def _delays_what_may_be_unused(case: Case) -> str | None:
    assert case.ddp is not None
    if not case.settings.delay or not finds_unused(case.ddp):
        return None
    return (
        "delay=1 applies the mean of a step in the next one, which may use other parameters, "
        "got find_unused_parameters=True; leave one of the two out"
    )


def _delays_scaled_gradients(case: Case) -> str | None:
    if not case.settings.delay or case.environment.grad_scale is None:
        return None
    return (
        "delay=1 applies a mean under the loss scale of the next step, got a GradScaler; use "
        "bfloat16 (precision='bf16-mixed'), or leave delay out"
    )


# Sharded models, and local steps.


def _is_attached_already(case: Case) -> str | None:
    """Both would exchange in each step, and closing one would take the hooks of the other."""
    if case.attached is None:
        return None
    return (
        f"A model is compressed once, and {case.attached.entry} was called on it before; close "
        "what it returned first"
    )


def _keeps_scaled_errors(case: Case) -> str | None:
    settings = case.settings
    assert isinstance(settings, ShardedSettings)
    keeps = settings.parameters is not None and settings.keeps_rounded_errors
    if not keeps or case.environment.grad_scale is None:
        return None
    return (
        "With parameters= and error_feedback=True gradients must not be scaled, got a "
        "GradScaler: the error would be kept scaled, also of steps that it skips; use an "
        "unbiased codec such as 'qsgd:bits=8', or compute in bfloat16 without a GradScaler"
    )


def _has_ddp_inside(case: Case) -> str | None:
    if not any(isinstance(child, DistributedDataParallel) for child in case.module.modules()):
        return None
    return (
        f"{type(case.module).__name__} has a DistributedDataParallel inside, which averages "
        "gradients in every step; give the module that it wraps"
    )


def _has_no_ddp_to_begin_with(case: Case) -> str | None:
    if not _ddp_steps(case) or _is_over_all_ranks(case):
        return None
    return (
        "ddp_steps is a number of steps of plain DDP, so the model must be a "
        f"DistributedDataParallel over all {case.world_size} ranks; wrap it, or leave ddp_steps out"
    )


def _averages_in_every_step(case: Case) -> str | None:
    is_silenced = case.environment.wraps  # a framework has wrapped it, and we silence it
    if _ddp_steps(case) or is_silenced or case.world_size == 1 or not _is_over_all_ranks(case):
        return None
    return (
        "The model is a DistributedDataParallel over all ranks, which averages gradients in "
        "every step; give the module itself, or one over the ranks of a worker "
        "(process_group=), or set ddp_steps"
    )


def _ddp_steps(case: Case) -> int:
    assert isinstance(case.settings, LocalUpdateSettings)
    return case.settings.ddp_steps


def _is_over_all_ranks(case: Case) -> bool:
    return case.ddp is not None and case.ddp.process_group.size() == case.world_size


def _leaves_ddp_to_the_framework(case: Case) -> str | None:
    if not _ddp_steps(case) or not case.environment.steps_itself:
        return None
    return (
        "With manual optimization Lightning decides itself when DDP averages gradients; "
        "leave ddp_steps out"
    )


def _has_one_worker(case: Case) -> str | None:
    mesh = case.environment.mesh
    if mesh is None or mesh.size(0) > 1:
        return None
    return (
        f"Local updates need several workers, got one node of {mesh.size(1)} ranks; start several "
        "nodes, or give replicate_size=, the number of workers"
    )


# Optimizers.


def _applies_momentum_twice(case: Case) -> str | None:
    """Codec and optimizer both would, which trains to nothing."""
    if not any(leaf.momentum_correction for leaf in case.settings.inter.leaves()):
        return None
    for optimizer, group in _groups_of_model(case):
        if group.get("momentum") or "betas" in group:
            return (
                f"codec {case.settings.inter.name!r} gives the gradients momentum, and "
                f"{type(optimizer).__name__} has its own; use torch.optim.SGD without momentum, or "
                "'topk'"
            )
    return None


def _groups_of_model(case: Case) -> Iterator[tuple[Optimizer, Mapping[str, object]]]:
    kept = case.parameters
    for optimizer in case.optimizers:
        for group in optimizer.param_groups:
            if kept is None or any(parameter in kept for parameter in group["params"]):
                yield optimizer, group


def _delays_for_another_optimizer(case: Case) -> str | None:
    seen, count = set[Tensor](), 0
    for optimizer in case.optimizers:  # one within another has some of the same parameters
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        count += stepped.isdisjoint(seen)
        seen |= stepped
    if not case.settings.delay or count < 2:
        return None
    return (
        "With delay=1 a backward pass gets the mean of the previous one, which must belong to "
        f"the same optimizer, got {count} optimizers; use one, or leave delay out"
    )


def _has_onebit_adam(case: Case) -> bool:
    return any(isinstance(optimizer, OneBitAdam) for optimizer in case.optimizers)


def _delays_momenta(case: Case) -> str | None:
    if not case.settings.delay or not _has_onebit_adam(case):
        return None
    return (
        "delay=1 applies means of gradients one step late, and OneBitAdam needs "
        "exchanged momenta in the same step; leave delay out, or use another optimizer"
    )


def _clips_momenta(case: Case) -> str | None:
    if not _has_onebit_adam(case):
        return None
    return (
        "Gradient clipping would clip OneBitAdam's momenta after its freeze_step, not "
        "gradients; leave it out, or use another optimizer"
    )


def _exchanges_momenta_of_shards(case: Case) -> str | None:
    if not _has_onebit_adam(case):
        return None
    return (
        "OneBitAdam exchanges momenta of whole parameters, and here they are sharded; use "
        "torch.optim.AdamW"
    )


def _exchanges_in_local_steps(case: Case) -> str | None:
    for optimizer in case.optimizers:
        if isinstance(optimizer, OneBitAdam | ZeroRedundancyOptimizer):
            return (
                f"{type(optimizer).__name__} exchanges between ranks in every step, and local "
                "steps are of one worker alone; use torch.optim.AdamW"
            )
    return None


def _saves_whole_workers(case: Case) -> str | None:
    is_sharded = any(isinstance(child, FSDPModule) for child in case.module.modules())
    if case.environment.saves_shards or not is_sharded:
        return None
    return (
        "LocalUpdateStrategy, Accelerate and ElasticLoop save workers whose ranks have the "
        "whole model, got one that fully_shard has sharded; use "
        "LocalUpdateModelParallelStrategy with Lightning or Fabric, or call "
        "lightning_dist.local_updates in a loop of your own, and save its state_dict() and "
        "the model and optimizer of every rank"
    )


# Number of steps.


def _begins_too_late(case: Case) -> str | None:
    reducer = case.reducer
    assert reducer is not None
    shapes = {name: tuple(p.shape) for p, name in reducer.names.items() if p.requires_grad}
    begins = first_compressed_step(case.settings.policy, shapes)
    if begins is None or begins < reducer.step + case.steps:
        return None
    return (
        f"Compression must start before training ends, got step {begins} as its first "
        f"(start_step, warmup or after_steps) and a training of {reducer.step + case.steps} steps; "
        "set it lower, or use strategy='ddp'"
    )


def _freezes_too_late(case: Case) -> str | None:
    for optimizer in case.optimizers:
        if isinstance(optimizer, OneBitAdam) and optimizer.freeze_step >= case.steps:
            return (
                "OneBitAdam compresses nothing before its freeze_step, which must come before the "
                f"training ends, got freeze_step={optimizer.freeze_step} and {case.steps} steps; "
                "15 to 25 % of them is usual"
            )
    return None


def _has_no_outer_step(case: Case) -> str | None:
    settings = case.settings
    assert isinstance(settings, LocalUpdateSettings)
    if int(case.steps - settings.ddp_steps) // settings.sync_every >= 1:
        return None
    return (
        f"A training of {case.steps:g} steps must have an outer step, got sync_every="
        f"{settings.sync_every} and ddp_steps={settings.ddp_steps}; set them lower"
    )


_LOCAL = (LOCAL, LOCAL_SHARDS)
_MODULES = (DDP, *_LOCAL)
_GRADIENTS = (DDP, FSDP2)

RULES: Sequence[Rule] = (
    Rule("a parameter is trained", "module", _MODULES, _trains_nothing),
    Rule("a process trains on one device", "module", _MODULES, _is_on_several_devices),
    Rule("ranks have the same parameters", "module", _MODULES, _has_experts),
    Rule("sparse gradients are not compressed", "module", (DDP,), _compresses_sparse_gradients),
    Rule("the model is in DDP", "model", (DDP,), _is_not_in_ddp),
    Rule("DDP has no mixed precision", "model", (DDP,), _mixes_precision_in_ddp),
    Rule("DDP sends every bucket", "model", (DDP,), _skips_buckets),
    Rule("DDP has no other hook", "model", (DDP,), _has_a_hook),
    Rule("what is written was used", "model", (DDP,), _writes_what_may_be_unused),
    Rule("what is delayed will be used", "model", (DDP,), _delays_what_may_be_unused),
    Rule("what is delayed is not scaled", "model", (DDP,), _delays_scaled_gradients),
    Rule("a model is attached once", "model", (FSDP2, *_LOCAL), _is_attached_already),
    Rule("errors in 8 bits are not scaled", "model", (FSDP2,), _keeps_scaled_errors),
    Rule("workers have no DDP inside", "model", _LOCAL, _has_ddp_inside),
    Rule("ddp_steps have DDP", "model", _LOCAL, _has_no_ddp_to_begin_with),
    Rule("local steps have no DDP", "model", _LOCAL, _averages_in_every_step),
    Rule("ddp_steps are the framework's", "model", _LOCAL, _leaves_ddp_to_the_framework),
    Rule("there are several workers", "model", (LOCAL_SHARDS,), _has_one_worker),
    Rule("momentum is applied once", "optimizers", _GRADIENTS, _applies_momentum_twice),
    Rule("what is delayed is its own", "optimizers", (DDP,), _delays_for_another_optimizer),
    Rule("momenta are not delayed", "optimizers", (DDP,), _delays_momenta),
    Rule("momenta are not clipped", "clipping", (DDP,), _clips_momenta),
    Rule("momenta are whole", "optimizers", (FSDP2,), _exchanges_momenta_of_shards),
    Rule("local steps are local", "optimizers", _LOCAL, _exchanges_in_local_steps),
    Rule("shards of workers can be saved", "optimizers", _LOCAL, _saves_whole_workers),
    Rule("compression begins", "steps", _GRADIENTS, _begins_too_late),
    Rule("OneBitAdam's begins", "steps", (DDP,), _freezes_too_late),
    Rule("there is an outer step", "steps", _LOCAL, _has_no_outer_step),
)
