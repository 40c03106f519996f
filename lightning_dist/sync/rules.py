"""Models that cannot be compressed, or not in the requested way: refused at the start."""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.base.accelerator import has_streams
from lightning_dist.base.log import get_logger
from lightning_dist.base.private import (
    communication_hooks,
    name_before_compile,
    names_ignored_by_ddp,
)
from lightning_dist.codecs import Codec
from lightning_dist.codecs.policies import NORMS_BIASES_EMBEDDINGS, patterns_of
from lightning_dist.measurement.expected import first_compressed_step
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.units.by_codec import require_units
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.onebit_adam import OneBitAdam

log = get_logger(__name__)

_OF_EXPERTS = {"allreduce": False, "skip_allreduce": True}
"""Marks of parameters that differ between ranks: of Megatron-LM and DeepSpeed, and of Tutel."""


def require_ddp(model: nn.Module) -> None:
    """Raise ValueError unless ``model`` is a DDP module that still takes a hook."""
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"compress_ddp needs a DistributedDataParallel, got {type(model).__name__}; wrap the "
            "model first: DistributedDataParallel(model); compress_fsdp is for those of fully_shard"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) installs a communication hook of its own "
            "and takes no second one; use torch.autocast, or Trainer(precision='bf16-mixed')"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) skips buckets, and the "
            "compressed step ends with the last one; leave it out"
        )
    hooks = [hook for hook, _ in communication_hooks(model)]
    if hooks:
        other, remedy = hooks[0].__qualname__, "remove that registration"
        if hooks[0].__module__.startswith(f"{__package__}."):
            other, remedy = "that of compress_ddp", "call compress_ddp once"
        raise ValueError(
            f"A model takes one communication hook, and {other} is registered already; {remedy}, "
            "or wrap the model in a new DistributedDataParallel"
        )


def require_commit(settings: ExchangeSettings, model: DistributedDataParallel) -> None:
    """Raise ValueError where residuals are to be written before it is known what is used."""
    if settings.commit == "immediate" and finds_unused(model):
        raise ValueError(
            "commit='immediate' writes residuals before it is known which parameters no rank has "
            "used, got find_unused_parameters=True; leave commit at 'auto'"
        )


def require_delay(
    settings: ExchangeSettings, model: DistributedDataParallel, *, scales: bool
) -> None:
    """Raise ValueError where a mean cannot be applied one step late."""
    if settings.delay and finds_unused(model):
        raise ValueError(
            "delay=1 applies the mean of a step in the next one, which may use other parameters, "
            "got find_unused_parameters=True; leave one of the two out"
        )
    if settings.delay and scales:
        raise ValueError(
            "delay=1 applies a mean under the loss scale of the next step, got a GradScaler; use "
            "bfloat16 (precision='bf16-mixed'), or leave delay out"
        )


def finds_unused(model: DistributedDataParallel) -> bool:
    """Whether DDP looks for parameters without a gradient."""
    return model.find_unused_parameters and not model.static_graph


def require_compressible(module: nn.Module, settings: ExchangeSettings | None = None) -> None:
    """Raise ValueError for models whose gradients, or weights, cannot be exchanged.

    Args:
        settings: of gradients; None: weights are exchanged.
    """
    trained = trained_by_ddp(module)
    if not trained:
        raise ValueError(
            "The model must have a parameter with requires_grad=True, and has none; unfreeze one, "
            "or run without a distributed strategy"
        )
    _require_device(trained)
    _require_no_experts(trained)
    if settings is not None:
        _require_sent_as_they_are(sparse_tables(module), settings)


def _require_sent_as_they_are(tables: Mapping[str, Tensor], settings: ExchangeSettings) -> None:
    for name, table in tables.items():
        steps, shape = settings.policy.boundaries(), tuple(table.shape)
        codecs = [settings.policy.for_tensor(name, shape, step=step) for step in steps]
        if settings.delay or not all(each.lossless for each in codecs):
            got = "delay=1" if settings.delay else f"codec {settings.inter}"
            raise ValueError(
                f"The gradient of {name!r} is sparse (sparse=True), so it is averaged at once and "
                f"uncompressed, got {got}; set codec=by_name(..., {{{name!r}: 'none'}}) without "
                "delay, make it with sparse=False, or freeze it"
            )


def sparse_tables(module: nn.Module) -> dict[str, nn.Parameter]:
    """Embeddings whose gradients are sparse and averaged by DDP, by name."""
    tables = [
        child.weight
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    ]
    return {
        name_before_compile(name): parameter
        for name, parameter in trained_by_ddp(module).items()
        if any(parameter is table for table in tables)
    }


def trained_by_ddp(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters whose gradients DDP averages, by name: trained, and not left to others."""
    ignored = names_ignored_by_ddp(module)
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}


def _require_no_experts(trained: Mapping[str, Tensor]) -> None:
    """Raise ValueError for parameters that their libraries have marked as those of experts."""
    for name, parameter in trained.items():
        for mark, value in _OF_EXPERTS.items():
            if getattr(parameter, mark, None) is value:
                raise ValueError(
                    f"Every rank must have the same parameters, and {name!r} is marked as that of "
                    f"an expert ({mark}={value}), of which ranks have different ones: a mean would "
                    "mix them; wrap the model without its experts, or run without expert "
                    "parallelism"
                )


def _require_device(trained: Mapping[str, Tensor]) -> None:
    devices = {name: parameter.device for name, parameter in trained.items()}
    name, device = next(iter(devices.items()))
    for other, where in devices.items():
        if where != device:
            raise ValueError(
                f"Compressed DDP needs one device per process, and {name!r} is on {device} and "
                f"{other!r} on {where}; start a process for each device, or use plain DDP"
            )
    if device.type != "cpu" and not has_streams(device):
        raise ValueError(
            "Gradients must be on the CPU or on an accelerator with streams, such as CUDA, and "
            f"{name!r} is on {device}; use plain DDP there"
        )


def require_effect(
    settings: ExchangeSettings,
    names: Mapping[Tensor, str],
    *,
    says: bool,
    one_of_several: bool = False,
) -> int | None:
    """The first synchronised step that compresses a parameter; None: none does, said once.

    Args:
        one_of_several: other models may have what a rule of `by_name` is for: warn, do not raise.

    Raises:
        ValueError: the codec fits no parameter of the model, or a rule of `by_name` none, or it
            has no communication units.
    """
    for problem in _unmatched(settings.inter, list(names.values())):
        if not one_of_several:
            raise ValueError(problem)
        if says:
            log.warning("%s; ignore this if it is for another model", problem)
    trained = {name: tuple(p.shape) for p, name in names.items() if p.requires_grad}
    for leaf in settings.inter.leaves():
        require_units(leaf)
    wanted = [leaf for leaf in settings.inter.leaves() if not leaf.lossless]
    begins = first_compressed_step(settings.policy, trained)
    if not wanted or begins is not None:
        return begins
    choosy = [(leaf, *leaf.accepts) for leaf in wanted if leaf.accepts]
    if choosy and all(
        codec.for_tensor("", shape, step=0).lossless
        for codec, _, _ in choosy
        for shape in trained.values()
    ):
        codec, accepted, remedy = choosy[0]
        raise ValueError(
            f"codec {codec} compresses {accepted}, and none of the model's {len(trained)} "
            f"parameters is one: {remedy}, or use int8"
        )
    if says:
        log.warning(
            "Nothing is compressed: all %d parameters are 1-D or small for codec %s; lower "
            "min_compress_numel (0 compresses all)",
            len(trained),
            settings.inter,
        )
    return None


def require_begun(reducer: Reducer, optimizers: Sequence[object], *, steps: float) -> None:
    """Raise ValueError where nothing would be compressed in the ``steps`` that follow."""
    shapes = {name: tuple(p.shape) for p, name in reducer.names.items() if p.requires_grad}
    begins = first_compressed_step(reducer.settings.policy, shapes)
    if begins is not None and begins >= reducer.step + steps:
        raise ValueError(
            f"Compression must start before training ends, got step {begins} as its first "
            f"(start_step, warmup or after_steps) and a training of {reducer.step + steps} steps; "
            "set it lower, or use strategy='ddp'"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, OneBitAdam) and optimizer.freeze_step >= steps:
            raise ValueError(
                "OneBitAdam compresses nothing before its freeze_step, which must come before the "
                f"training ends, got freeze_step={optimizer.freeze_step} and {steps} steps; 15 to "
                "25 % of them is usual"
            )


def _unmatched(codec: Codec, names: Sequence[str]) -> Iterator[str]:
    """Errors in patterns of the user's that are found in no name, frozen ones too."""
    for pattern in patterns_of(codec):
        if pattern != NORMS_BIASES_EMBEDDINGS and not any(re.search(pattern, n) for n in names):
            text = re.sub(r"[^\w.]", "", pattern.replace("\\.", ".")) or pattern
            near = heapq.nlargest(3, names, key=lambda name: _likeness(text, name))
            yield (
                f"by_name: a pattern must be found in the name of a parameter, got {pattern!r}, "
                f"which is found in none of {len(names)}; the nearest are "
                f"{', '.join(map(repr, near))}"
            )


def _likeness(text: str, name: str) -> float:
    """Of a text and a name, or a part of it between dots."""
    parts = {name, *name.split(".")}
    return max(difflib.SequenceMatcher(None, text, part).ratio() for part in parts)


def compresses_fewer_bytes(
    settings: ExchangeSettings, names: Mapping[Tensor, str], planner: Planner
) -> bool:
    """Whether the codec sends fewer bytes of some parameter; for a small model says once if not.

    Raises:
        ValueError: it would send more than uncompressed gradients, whatever their size.
    """
    codec, wanted = None, list(_lossy(settings, names))
    for codec, part, dtype in wanted:
        if not planner.affordable(codec, part, dtype).lossless:
            return True
    if codec is None:
        return False
    ranks, count = planner.network.rows.count, len({part.name for _, part, _ in wanted})
    if planner.affordable(codec, ParameterSlice("", 0, (1 << 24,)), torch.float32).lossless:
        raise ValueError(
            f"codec {codec} between {ranks} ranks sends more than uncompressed gradients: its "
            "bytes grow with the number of ranks; lower the ratio, reduce inside nodes first "
            "(hierarchical=True), or use 'int4' or 'powersgd'"
        )
    if planner.network.rank == 0:
        log.warning(
            "Nothing is compressed: all %d parameters that codec %s is for are so small that it "
            "would send more bytes between %d ranks",
            count,
            codec,
            ranks,
        )
    return False


def _lossy(
    settings: ExchangeSettings, names: Mapping[Tensor, str]
) -> Iterator[tuple[Codec, ParameterSlice, torch.dtype]]:
    """Parameters that are compressed at some step, with the codec."""
    for step in settings.policy.boundaries():
        for parameter, name in names.items():
            shape = tuple(parameter.shape)
            codec = settings.policy.for_tensor(name, shape, step=step)
            if parameter.requires_grad and parameter.numel() and not codec.lossless:
                real = as_real(parameter)
                yield codec, ParameterSlice(name, 0, tuple(real.shape)), real.dtype


def require_one_optimizer(settings: ExchangeSettings, count: int) -> None:
    """Raise ValueError where means that are delayed would be applied by another optimizer."""
    if settings.delay and count > 1:
        raise ValueError(
            "With delay=1 a backward pass gets the mean of the previous one, which must belong to "
            f"the same optimizer, got {count} optimizers; use one, or leave delay out"
        )


def brings_momentum(settings: ExchangeSettings) -> bool:
    """Whether the codec gives the gradients momentum."""
    return any(leaf.momentum_correction for leaf in settings.inter.leaves())


def require_one_momentum(
    optimizer: Optimizer, settings: ExchangeSettings, *, of: Container[Tensor] | None = None
) -> None:
    """Raise ValueError where codec and optimizer both apply momentum, which trains to nothing.

    Args:
        of: the parameters whose gradients are compressed; None: all of the optimizer's.
    """
    if not brings_momentum(settings):
        return
    for group in optimizer.param_groups:
        mine = of is None or any(parameter in of for parameter in group["params"])
        if (group.get("momentum") or "betas" in group) and mine:
            raise ValueError(
                f"codec {settings.inter.name!r} gives the gradients momentum, and "
                f"{type(optimizer).__name__} has its own; use torch.optim.SGD without momentum, or "
                "'topk'"
            )


def require_first(attached: object | None, *, name: str) -> None:
    """Raise ValueError where ``name`` was called on a model before, and ``attached`` is still open.

    Both would exchange in each step, and closing one would take the hooks of the other.
    """
    if attached is not None:
        raise ValueError(
            f"A model is compressed once, and {name} was called on it before; close what it "
            "returned first"
        )
