"""Models that ``fully_shard`` (FSDP2) has sharded over a fast dimension of a device mesh.

``compress_fsdp`` is the way to them, and to those that are sharded over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.base.log import get_logger
from lightning_dist.base.private import map_tensors, name_before_compile
from lightning_dist.exchange.rounds import replicate
from lightning_dist.ranks.facts import Read, Spread, read_whole, run_of
from lightning_dist.reducer.plan.planner import Handle
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.state import ResidualParts, require_mapping, row_or_mean
from lightning_dist.settings.exchange import ExchangeSettings, ShardedSettings
from lightning_dist.settings.signatures import arguments_of, takes
from lightning_dist.sync.base import Environment, Sync, continued, remember, syncs_of
from lightning_dist.sync.buckets import flags_of
from lightning_dist.sync.ddp import compile_kernels, describe_parameters, expect_compression
from lightning_dist.sync.effect import require_effect, show, watch_optimizers
from lightning_dist.sync.fsdp.checks import (
    BackwardEnd,
    ParameterGroup,
    shard_dimension,
    trained_groups,
)
from lightning_dist.sync.fsdp.private import runs_after_accumulation
from lightning_dist.sync.fsdp.shards import CompressedShards
from lightning_dist.sync.fsdp.tensor_parts import ROWS, TensorPart, TensorParts, of_this_kind
from lightning_dist.sync.networks import sharded_network
from lightning_dist.sync.rules import Case, check

log = get_logger(__name__)

_ZEROS_FOR_UNUSED = (
    "call model.set_reduce_scatter_unused_params(True) before training (torch 2.13 or newer)"
)


@takes(ShardedSettings, refuse=arguments_of(fully_shard))
def compress_fsdp(
    model: nn.Module,
    settings: ShardedSettings,
    *,
    mesh: DeviceMesh,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Compress the gradients of a sharded ``model`` between its replicas. Collective.

    ``mesh`` has two dimensions, replicas and shards (of a mesh that has more, such as one for
    tensor parallelism, give these two), and ``fully_shard`` was called over the
    dimension of the shards::

        mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        gradients = compress_fsdp(model, "int8", mesh=mesh)

    Gradients are reduce-scattered inside a replica as usual. Each rank exchanges its shard between
    replicas, compressed: ``4 n / shards`` bytes of residual per rank, and ``1 / shards`` of the
    bytes that DDP with this codec sends. Parameters and buffers are first made those of the first
    replica.

    Args:
        settings: each an argument of this function. ``"none"`` gives the bits of ``fully_shard``
            over both dimensions with a reduction in float32.
        mesh: replicas and shards; the same on each of its ranks. With ``parameters`` all ranks.
        grad_scaler: the GradScaler in use, so that residuals are kept unscaled.

    Returns:
        Handle of the gradient exchange, :class:`ShardedGradients`: ``no_sync()``, ``comm_stats()``,
        ``state_dict()``, ``load_state_dict()``, ``close()``; with ``parameters``
        :class:`CompressedShards`, without ``no_sync()``.

    Raises:
        ValueError: a model that ``fully_shard`` did not shard over one dimension of ``mesh``, or in
            a way in which gradients cannot be exchanged afterwards, or that is compressed already;
            ranks whose settings differ.
    """
    environment = Environment(grad_scaler=grad_scaler, mesh=mesh)
    return kind_of(settings).attach(model, settings, environment)


def kind_of(settings: ShardedSettings) -> type[ShardedGradients | CompressedShards]:
    """Class of what ``settings`` ask for: between replicas, or with ``parameters`` all ranks."""
    return ShardedGradients if settings.parameters is None else CompressedShards


class ShardedGradients(Sync):
    """Averages the gradient shards of a model between replicas with ``reducer``.

    FSDP's all-reduce hook hands over the flat shard of a parameter group once it is reduced inside
    the replica; all have their mean before ``backward`` returns, or a pipeline's step.

    Args:
        groups: of the parameters that are trained.
        mesh: with the dimensions replicas and shards.
    """

    entry: ClassVar[str] = "compress_fsdp"
    reducer: Reducer

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        groups: Sequence[ParameterGroup],
        *,
        mesh: DeviceMesh,
    ) -> None:
        self.settings = reducer.settings
        self._model, self.reducer, self._mesh = model, reducer, mesh
        self.synchronises = True
        """Whether the next backward pass exchanges gradients between replicas."""
        self._under_way: list[Handle] = []
        self._flags = flags_of(reducer.names)
        self._use(groups)
        self.backward = BackwardEnd(model, self._finish, begin=self._renew, cut_short=self._abandon)

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self.reducer.network.device

    @property
    @override
    def model(self) -> nn.Module:
        return self._model

    @classmethod
    @override
    def attach(cls, model: nn.Module, settings: Any, environment: Environment) -> Self:
        mesh = environment.mesh
        assert mesh is not None
        attached = next((sync for sync in syncs_of(model) if sync.entry == cls.entry), None)
        check(Case(settings, model, environment=environment, attached=attached), at="model")
        groups = trained_groups(model, mesh)
        names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
        reducer = _reducer_for(model, names, groups, settings, environment)
        slices = [(group, part) for group in groups for part in slices_in(group, names)]
        if (kept := continued(model, environment.before)) is not None:
            assert kept.reducer is not None
            reducer.step = kept.reducer.step
            reducer.state.keep_only({part.name: part.whole for _, part in slices})
        gradients = [(group.parameters[0].dtype, part.numel) for group, part in slices]
        compile_kernels(reducer, gradients, says=dist.get_rank() == 0)
        watch_optimizers(reducer, model)
        sync = cls(model, reducer, groups, mesh=mesh)
        remember(model, sync)
        if dist.get_rank() == 0:
            sizes = dict(zip(mesh.mesh_dim_names or range(mesh.ndim), mesh.shape, strict=True))
            show(lambda: f"compressed FSDP2: codec {settings.inter}, mesh {sizes}")
        return sync

    @override
    def connect(self, optimizers: Sequence[Optimizer], environment: Environment) -> None:
        super().connect(optimizers, environment)
        case = Case(self.settings, None, optimizers, environment, parameters=self.names)
        check(case, at="optimizers")

    @override
    def expect_steps(self, steps: int | None, *, done: int, is_trial: bool) -> None:
        expect_compression(self, steps, done=done, is_trial=is_trial)

    @override
    def begin_step(self) -> None:
        self.backward.begin()

    @override
    def before_backward(self, loss: Tensor) -> None:
        self.backward.watch(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave out the exchange between replicas in the backward passes of this block.

        Gradients stay sharded; the first backward pass after it exchanges what has accumulated.
        """
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    @property
    def parts(self) -> Mapping[str, tuple[int, int]]:
        """``(start, elements)`` that this rank has of each trained parameter."""
        return {part.name: (part.start, part.numel) for slices in self._slices for part in slices}

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """Residuals of all replicas on rank 0, None elsewhere. Collective; between backward passes.

        As of ``Reducer.state_dict``: one row per replica, put together from its shards and its
        tensor-parallel parts, so that any mesh loads it.
        """
        assert to == 0, "shards are put together there"
        return self.tensor_parts.gathered(self.reducer.state_dict())

    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with the rows left there. Collective.

        The tensors of the state are empty memory; the spreads are the parts that this rank has.
        """
        return self.tensor_parts.spread(*self.reducer.spread_state_dict())

    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> dict[str, Any]:
        """:meth:`state_dict` with this rank's part of its replica's row, or of the mean of all.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.
        """
        return {
            key: {name: self._held(saved, name, read) for name, saved in part.items()}
            if key in ROWS
            else map_tensors(partial(read_whole, read=read), part)
            for key, part in state.items()
            if key not in ("errors", "rows")  # of shards over all ranks
        }

    def _held(self, saved: Tensor, name: str, read: Read) -> ResidualParts:
        count, whole = saved.shape
        part = self.tensor_parts.part(name, numel=whole)
        if part.whole != whole:  # of another model, which the reducer refuses
            part = TensorPart(1, whole, whole)
        start, numel = self.parts.get(name, (None, part.numel))  # all of it if it is frozen here
        places = [*part.runs(start or 0, numel)] or [(0, 0, 0)]

        def of_row(row: int) -> Tensor:
            return torch.cat([read(saved, row * whole + at, length) for at, _, length in places])

        loaded = row_or_mean(count, self.reducer.network, of_row)
        return ResidualParts(part.numel, saved.dtype, loaded=loaded, start=start)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh.

        Also from :meth:`own_state`.
        """
        require_mapping(state)
        state = of_this_kind(state, key="step", says=self.reducer.network.rank == 0)
        self.reducer.load_state_dict(self.tensor_parts.cut(state))

    load_own_state = load_state_dict

    def close(self) -> None:
        """Exchange nothing more, and end the reducer."""
        self.backward.remove()
        for group in self._groups:
            group.module.set_all_reduce_hook(lambda _: None)
        self.reducer.close()

    def _renew(self) -> None:
        """Average what is trained now, where layers were frozen or unfrozen, on all ranks alike."""
        flags = flags_of(self.reducer.names)
        if flags == self._flags or not any(flags):
            return
        self._flags = flags
        for group in self._groups:
            group.module.set_all_reduce_hook(lambda _: None)
        self._use(trained_groups(self.model, self._mesh))

    def _use(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self._slices = [slices_in(group, self.reducer.names) for group in groups]
        self._skipped: set[int] = set()  # groups whose last gradients were not exchanged
        named = {name_before_compile(name): p for name, p in self.model.named_parameters()}
        self.tensor_parts = TensorParts(named, self.parts)
        """Parts on this rank of parameters that tensor parallelism splits."""
        for index, group in enumerate(groups):
            self.reducer.reserve(self._slices[index], group.parameters[0].dtype)
            group.module.set_all_reduce_hook(partial(self._reduced, index))

    def _abandon(self) -> None:
        self._under_way.clear()
        self.reducer.abandon()

    def _reduced(self, index: int, flat: Tensor) -> None:
        """The hook: ``flat (numel,)`` is the mean of the replica, of this rank's shard."""
        group, slices = self._groups[index], self._slices[index]
        if flat.numel() != sum(group.padded):
            raise RuntimeError(
                "Every parameter of a group must get a gradient in each backward pass; one of "
                f"{', '.join(part.name for part in slices)} got none. Freeze it, or "
                f"{_ZEROS_FOR_UNUSED}"
            )
        if any(map(runs_after_accumulation, group.parameters)):
            raise ValueError(
                "register_post_accumulate_grad_hook, as for an optimizer in the backward pass, "
                "cannot take effect: replicas average gradients after it; remove it and step the "
                "optimizer after backward(), or use fully_shard over both dimensions of the mesh"
            )
        if not self.synchronises:
            self._skipped.add(index)
            return
        self._skipped.discard(index)
        self.backward.queue()
        _take_accumulated(group.parameters, slices, flat)
        self._under_way.append(self.reducer.start(flat, slices, key=index))

    def _finish(self) -> None:
        """Before backward() returns: what follows (clipping, the optimizer) sees the mean."""
        if not self._under_way:
            return
        for index in sorted(self._skipped):
            if any(parameter.grad is not None for parameter in self._groups[index].parameters):
                self._abandon()
                names = ", ".join(part.name for part in self._slices[index])
                raise RuntimeError(
                    "Gradients accumulated under no_sync() must be exchanged before they are "
                    f"applied, but {names} got none in the backward pass after it; "
                    f"{_ZEROS_FOR_UNUSED}"
                )
        self.reducer.finish()
        under_way, self._under_way = self._under_way, []
        for handle in under_way:
            handle.done.wait()


def _reducer_for(
    model: nn.Module,
    names: Mapping[Tensor, str],
    groups: Sequence[ParameterGroup],
    settings: ExchangeSettings,
    environment: Environment,
) -> Reducer:
    """A reducer of the shards of ``model``, whose replicas are made equal. Collective."""
    mesh, before = environment.mesh, continued(model, environment.before)
    assert mesh is not None
    shards = shard_dimension(groups, mesh)
    parameters = describe_parameters(model)
    network = sharded_network(mesh, shards, settings, parameters=parameters)
    require_effect(settings, names, says=dist.get_rank() == 0)
    between: Any = network.intra.inter if network.intra else network
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    replicate({n: local_of(tensor.detach()) for n, tensor in held.items()}, between.data)
    return Reducer(
        names,
        settings=settings,
        network=network,
        state=None if before is None or before.reducer is None else before.reducer.state,
        grad_scale=environment.grad_scale,
        sharded=True,
        in_order=True,  # FSDP launches collectives of its own in the backward pass
    )


def _take_accumulated(
    parameters: Sequence[nn.Parameter], slices: Sequence[ParameterSlice], flat: Tensor
) -> None:
    """Add the ``.grad`` of earlier micro-batches to ``flat``, which FSDP then makes ``.grad``."""
    for parameter, part in zip(parameters, slices, strict=True):
        if parameter.grad is None:
            continue
        accumulated = local_of(parameter.grad)
        part.of(flat).add_(accumulated.reshape(-1))
        if is_accelerator(flat.device):  # memory of FSDP's stream of reduce-scatters
            accumulated.record_stream(torch.accelerator.current_stream())
        parameter.grad = None


def slices_in(group: ParameterGroup, names: Mapping[Tensor, str]) -> list[ParameterSlice]:
    """Shards of a group in the flat gradient that its reduce-scatter leaves, one after the other,
    each padded to the largest of all ranks.
    """
    slices, offset = [], 0
    of_all = zip(group.parameters, group.shapes, group.padded, strict=True)
    for parameter, shape, padded in of_all:
        local = local_of(parameter)
        start = group.first_row(shape) * prod(shape[1:])
        rest = prod(shape) - start - local.numel()
        slices.append(
            ParameterSlice(names[parameter], offset, tuple(local.shape), start=start, rest=rest)
        )
        offset += padded
    return slices


def local_of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
