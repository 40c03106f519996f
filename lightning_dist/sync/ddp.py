"""Plain torch DistributedDataParallel, whose gradient buckets are averaged compressed."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves and refuses strings.

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # its stubs lack it
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.base.log import get_logger
from lightning_dist.base.private import (
    before_compile,
    name_before_compile,
    names_ignored_by_ddp,
)
from lightning_dist.kernels.inductor import should_fuse
from lightning_dist.measurement.exposure import ExposureWatch
from lightning_dist.ranks.facts import Spread, all_facts, require_equal
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import as_real
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.base import Environment, Groups, Sync, continued, remember
from lightning_dist.sync.buckets import DDPBuckets, TrainedSet, finds_unused
from lightning_dist.sync.effect import (
    compresses_fewer_bytes,
    log_effective_settings,
    require_effect,
    watch_optimizers,
)
from lightning_dist.sync.networks import network_for
from lightning_dist.sync.onebit_adam import OneBitAdam
from lightning_dist.sync.rules import Case, check

log = get_logger(__name__)


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
    environment = Environment(grad_scaler=grad_scaler, groups=groups)
    return GradientSync.attach(before_compile(model), settings, environment).reducer


class GradientSync(Sync):
    """Averages the gradients of a model in DDP, compressed; the state of DDP's hook."""

    entry: ClassVar[str] = "compress_ddp"
    reducer: Reducer

    def __init__(self, model: DistributedDataParallel, reducer: Reducer) -> None:
        self.settings, self.reducer = reducer.settings, reducer
        self._ddp, self._module = ref(model), ref(model.module)  # DDP holds its hook's state
        self.buckets = DDPBuckets(
            reducer, find_unused=finds_unused(model), group=model.process_group
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a copy of the model exchanges nothing, and process groups cannot be copied."""
        return type(None), ()

    @classmethod
    def attach(cls, model: nn.Module, settings: ExchangeSettings, environment: Environment) -> Self:
        case = Case(settings, model, environment=environment)
        check(case, at="model")
        check(case, at="module")
        assert case.ddp is not None
        reducer, begins = _reducer_for(case.ddp, settings, environment)
        sync = cls(case.ddp, reducer)
        watch_optimizers(reducer, case.module)
        case.ddp.register_comm_hook(sync, lightning_dist_hook)
        names = reducer.names
        reducer.at_close.append(TrainedSet(case.ddp, names, note=sync.buckets.note).close)
        remember(case.module, sync)
        if reducer.network.rank == 0:
            log_effective_settings(reducer, begins=begins)
        return sync

    def connect(self, optimizers: Sequence[Optimizer], environment: Environment) -> None:
        """Let a OneBitAdam among ``optimizers`` exchange its momentum. Collective."""
        super().connect(optimizers, environment)
        self.reducer.wait()  # its thread must not be using the group
        network = self.reducer.network
        onebit = [optimizer for optimizer in optimizers if isinstance(optimizer, OneBitAdam)]
        facts = {"OneBitAdam": [repr(optimizer.defaults) for optimizer in onebit]}
        require_equal(all_facts(facts, group=network.data.group, device=network.device))
        case = Case(self.settings, None, optimizers, environment, parameters=self.names)
        check(case, at="optimizers")
        if environment.clips:
            check(case, at="clipping")
        for optimizer in onebit:
            optimizer.attach(self.reducer)

    @property
    def model(self) -> nn.Module:
        module: nn.Module | None = self._module()
        assert module is not None, "somebody uses it"
        return module

    def expect_steps(self, steps: int | None, *, done: int, is_trial: bool) -> None:
        expect_compression(self, steps, done=done, is_trial=is_trial)

    def no_sync(self) -> AbstractContextManager[None]:
        model = self._ddp()
        context: AbstractContextManager[None] = nullcontext() if model is None else model.no_sync()
        return context

    def finish(self) -> None:
        self.reducer.wait()

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        return self.reducer.state_dict(to=to)

    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        return self.reducer.spread_state_dict()

    def load_own_state(self, state: Mapping[str, Any] | None) -> None:
        self.reducer.load_state_dict(state)


def _reducer_for(
    model: DistributedDataParallel, settings: ExchangeSettings, environment: Environment
) -> tuple[Reducer, int | None]:
    """A reducer of the gradients of ``model``, and the first step that compresses one."""
    before = environment.before
    network = network_for(
        model,
        settings,
        parameters=describe_parameters(model.module),
        continue_from=None if before is None else before.reducer,
        groups=environment.groups,
    )
    kept = continued(model.module, before)
    continue_from = None if kept is None else kept.reducer
    topology = network.topology
    ignored, named = names_ignored_by_ddp(model.module), model.module.named_parameters()
    names = {p: name_before_compile(name) for name, p in named if name not in ignored}
    first, several = topology.rank == 0, topology.world_size > 1
    begins = require_effect(
        settings, names, says=first and several, one_of_several=environment.several_models
    )
    compares = several and not settings.delay  # a mean that comes later by intention says nothing
    reducer = Reducer(
        names,
        settings=settings,
        network=network,
        state=None if continue_from is None else continue_from.state,
        grad_scale=environment.grad_scale,
        allow_absent=finds_unused(model),
        observers=[ExposureWatch(network, advice_to=first)] if compares else (),
        in_order=_communicates(model),
    )
    if several and not compresses_fewer_bytes(settings, names, reducer.planner):
        begins = None
    if continue_from is not None:
        reducer.continue_from(continue_from)
        numel = {names[p]: as_real(p).numel() for p in names if p.requires_grad}
        strides = continue_from.strides
        moved = [n for n in numel if n in strides and strides[n] != reducer.strides[n]]
        if moved and first:
            log.warning(
                "The memory format of %s has changed since the last fit: their residuals are "
                "dropped; to keep them, load a checkpoint of that fit",
                ", ".join(moved),
            )
        reducer.state.keep_only({name: of for name, of in numel.items() if name not in moved})
    trained = [as_real(parameter) for parameter in names if parameter.requires_grad]
    compile_kernels(reducer, [(real.dtype, real.numel()) for real in trained], says=first)
    return reducer, begins


def expect_compression(sync: Sync, steps: int | None, *, done: int, is_trial: bool) -> None:
    """:meth:`.Sync.expect_steps` of what has a reducer of gradients."""
    reducer = sync.reducer
    assert reducer is not None
    if is_trial:  # which may well end before compression begins
        if reducer.never_compressed is not None:
            reducer.never_compressed.detach()
    elif steps is not None and not done and reducer.network.world_size > 1:
        optimizers = sync.optimizers
        case = Case(reducer.settings, optimizers=optimizers, reducer=reducer, steps=steps)
        check(case, at="steps")


def lightning_dist_hook(state: GradientSync, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Hook of DDP."""
    return state.buckets.reduce(bucket)


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


def _communicates(model: DistributedDataParallel) -> bool:
    """Whether DDP or a layer has collectives of its own in a backward pass."""
    # That of DDP says which parameters the ranks have used.
    synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return synchronised or finds_unused(model)


def describe_parameters(module: nn.Module) -> str:
    """A short text that differs where parameters differ, whether or not they are compiled."""
    named = {name_before_compile(n): p for n, p in module.named_parameters() if p.requires_grad}
    trained = [(name, str(p.dtype), *p.shape) for name, p in named.items()]
    digest = hashlib.sha256(repr(trained).encode()).hexdigest()[:12]
    numel = sum(p.numel() for p in named.values())
    return f"{len(trained)} tensors, {numel} elements, digest {digest}"
