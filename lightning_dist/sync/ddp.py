"""Plain torch DistributedDataParallel. The other integrations go through here."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves and refuses strings.

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # its stubs lack it
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import (
    before_compile,
    loss_scale_of,
    name_before_compile,
    names_ignored_by_ddp,
)
from lightning_dist.kernels.inductor import should_fuse
from lightning_dist.measurement.exposure import ExposureWatch
from lightning_dist.ranks.facts import all_facts, require_equal
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import as_real
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.buckets import DDPBuckets
from lightning_dist.sync.in_force import log_in_force
from lightning_dist.sync.networks import Groups, network_for
from lightning_dist.sync.onebit_adam import OneBitAdam
from lightning_dist.sync.optimizers import OptimizerWatch
from lightning_dist.sync.rules import (
    compresses_fewer_bytes,
    finds_unused,
    require_commit,
    require_compressible,
    require_ddp,
    require_delay,
    require_effect,
    require_one_momentum,
)
from lightning_dist.sync.trained import TrainedSet

log = get_logger(__name__)

# Beside the modules that are in DDP: Accelerate keeps a model as it was before DDP wrapped it, from
# where nothing leads to the hook; and a module must stay copyable, so nothing may be hung on it.
_attached: WeakKeyDictionary[nn.Module, ref[Reducer]] = WeakKeyDictionary()


@takes(ExchangeSettings, refuse=arguments_of(DistributedDataParallel))
def compress_ddp(
    model: DistributedDataParallel,
    settings: ExchangeSettings,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    groups: Groups | None = None,
) -> Reducer:
    """Compress the gradients of ``model``. Collective: every rank calls it with the same settings.

    Args:
        model: a DistributedDataParallel without a communication hook, or what ``torch.compile`` has
            made of one. It may have trained before.
        settings: each an argument of this function.
        grad_scaler: the GradScaler in use, so that residuals are kept unscaled.
        groups: two process groups over the ranks of ``model``, for payloads and for flags; in a
            hierarchical exchange also this rank's groups, innermost first. Not to be used for
            anything else. None: created here.

    Returns:
        The reducer: ``comm_stats()``, ``state_dict()``, ``load_state_dict()``, ``close()``.

    Raises:
        ValueError: a setting that is out of range or cannot take effect, a model that cannot be
            compressed, or ranks whose settings differ. Also, at its first step, an optimizer with
            momentum beside a codec that brings its own (``dgc``), or with parameters that were
            added to the model after it was wrapped.
    """
    inner: Any = before_compile(model)
    return attach(inner, settings, grad_scale=loss_scale_of(grad_scaler), groups=groups)


def attach(
    model: DistributedDataParallel,
    settings: ExchangeSettings,
    *,
    grad_scale: Callable[[], Tensor | None] | None = None,
    continue_from: Reducer | None = None,
    groups: Groups | None = None,
    one_of_several: bool = False,
) -> Reducer:
    """:func:`compress_ddp` with checked settings.

    Args:
        continue_from: the reducer of an earlier fit, whose groups are used again; if it was of this
            module, its residuals and step count go on.
        one_of_several: the settings are for other models too.
    """
    require_ddp(model)
    require_compressible(model.module, settings)
    require_commit(settings, model)
    require_delay(settings, model, scales=grad_scale is not None)
    network = network_for(
        model,
        settings,
        parameters=describe_parameters(model.module),
        continue_from=continue_from,
        groups=groups,
    )
    continue_from = if_attached_to(model.module, continue_from)
    topology = network.topology
    ignored, named = names_ignored_by_ddp(model.module), model.module.named_parameters()
    names = {p: name_before_compile(name) for name, p in named if name not in ignored}
    first, several = topology.rank == 0, topology.world_size > 1
    begins = require_effect(settings, names, says=first and several, one_of_several=one_of_several)
    compares = several and not settings.delay  # a mean that comes later by intention says nothing
    reducer = Reducer(
        names,
        settings=settings,
        network=network,
        state=None if continue_from is None else continue_from.state,
        grad_scale=grad_scale,
        allow_absent=finds_unused(model),
        observers=[ExposureWatch(network, advice_to=first)] if compares else (),
        in_order=_communicates(model),
    )
    if several and not compresses_fewer_bytes(settings, names, reducer.planner):
        begins = None
    if continue_from is not None:
        reducer.continue_from(continue_from)
        numel = {names[p]: as_real(p).numel() for p in names if p.requires_grad}
        before = continue_from.strides
        moved = [n for n in numel if n in before and before[n] != reducer.strides[n]]
        if moved and first:
            log.warning(
                "The memory format of %s has changed since the last fit: their residuals are "
                "dropped; to keep them, load a checkpoint of that fit",
                ", ".join(moved),
            )
        reducer.state.keep_only({name: of for name, of in numel.items() if name not in moved})
    trained = [as_real(parameter) for parameter in names if parameter.requires_grad]
    compile_kernels(reducer, [(each.dtype, each.numel()) for each in trained], says=first)
    buckets = DDPBuckets(reducer, find_unused=finds_unused(model), group=model.process_group)

    OptimizerWatch(reducer, model.module)
    model.register_comm_hook(buckets, lightning_dist_hook)
    reducer.at_close.append(TrainedSet(model, names, note=buckets.note).close)
    remember(model.module, reducer)
    if first:
        log_in_force(reducer, begins=begins)
    return reducer


def lightning_dist_hook(state: DDPBuckets, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Hook of DDP."""
    return state.reduce(bucket)


def compile_kernels(
    reducer: Reducer,
    gradients: Sequence[tuple[torch.dtype, int]],
    *,
    says: bool,
    ahead: Network | None = None,
) -> None:
    """Compile the kernels of ``reducer`` where its settings say so.

    Args:
        gradients: dtype and elements of each one.
        ahead: a network that the reducer may be bound to later; None: its own.
    """
    settings, network = reducer.settings, ahead or reducer.network
    codecs = settings.inter.leaves()
    if network.world_size == 1 or not should_fuse(
        settings.compile_kernels,
        numel=sum(numel for _, numel in gradients),
        device=network.device,
        says=says and any(codec.fusable for codec in codecs),
    ):
        return
    dtypes, sizes = {dtype for dtype, _ in gradients}, {numel for _, numel in gradients}
    planner = reducer.planner if ahead is None else reducer.planner_for(ahead)
    for codec in codecs:
        planner.fuse(codec, dtypes, sizes=sizes)
    reducer.planner.compiled.update(planner.compiled)


def remember(module: nn.Module, reducer: Reducer) -> None:
    """Let :func:`reducer_of` find ``reducer``, which compresses the gradients of ``module``."""
    _attached[module] = ref(reducer)


def if_attached_to(module: nn.Module, reducer: Reducer | None) -> Reducer | None:
    """``reducer`` if it is the last one that was attached to ``module``, else None."""
    attached = _attached.get(module)
    return reducer if attached is not None and attached() is reducer else None


def reducer_of(module: nn.Module) -> Reducer | None:
    """The reducer that compresses the gradients of ``module``.

    DDP has wrapped it, or FSDP sharded. The last one that was attached; None if there is none, or
    it is closed.
    """
    attached = _attached.get(module)
    reducer = None if attached is None else attached()
    return None if reducer is None or reducer.closed else reducer


def connect_optimizers(optimizers: Iterable[Any], reducer: Reducer, *, clips: bool = False) -> None:
    """Let a OneBitAdam among ``optimizers`` exchange its momentum through ``reducer``. Collective.

    Raises:
        ValueError: there are two, or not the same on all ranks; gradients are clipped, which would
            clip momenta; a codec brings momentum and the optimizer has its own.
    """
    optimizers = list(optimizers)
    network, settings = reducer.network, reducer.settings
    onebit = [repr(o.defaults) for o in optimizers if isinstance(o, OneBitAdam)]
    facts = {"OneBitAdam": onebit}
    require_equal(all_facts(facts, group=network.data.group, device=network.device))
    for optimizer in optimizers:
        require_one_momentum(optimizer, settings)
        if isinstance(optimizer, OneBitAdam):
            if settings.delay:
                raise ValueError(
                    "delay=1 applies means of gradients one step late, and OneBitAdam needs "
                    "exchanged momenta in the same step; leave delay out, or use another optimizer"
                )
            if clips:
                refuse_clipping(optimizer)
            optimizer.attach(reducer)


def refuse_clipping(optimizer: object) -> None:
    """Raise ValueError if what is clipped are no gradients."""
    if isinstance(optimizer, OneBitAdam):
        raise ValueError(
            "Gradient clipping would clip OneBitAdam's momenta after its freeze_step, not "
            "gradients; leave it out, or use another optimizer"
        )


def connect_to_own(optimizer: Any, reducers: Iterable[Reducer]) -> None:
    """:func:`connect_optimizers`, with those ``reducers`` that have parameters of ``optimizer``."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for reducer in reducers:
        if not own.isdisjoint(reducer.names):
            connect_optimizers([optimizer], reducer)


def _communicates(model: DistributedDataParallel) -> bool:
    """Whether DDP or a layer has collectives of its own in a backward pass."""
    # That of DDP says which parameters the ranks have used.
    synchronised = any(isinstance(each, nn.SyncBatchNorm) for each in model.modules())
    return synchronised or finds_unused(model)


def describe_parameters(module: nn.Module) -> str:
    """A short text that differs where parameters differ, whether or not they are compiled."""
    named = {name_before_compile(n): p for n, p in module.named_parameters() if p.requires_grad}
    trained = [(name, str(p.dtype), *p.shape) for name, p in named.items()]
    digest = hashlib.sha256(repr(trained).encode()).hexdigest()[:12]
    numel = sum(p.numel() for p in named.values())
    return f"{len(trained)} tensors, {numel} elements, digest {digest}"
