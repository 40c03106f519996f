"""Models that ranks of tests shard with ``fully_shard``, and their training."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from replicas import of_all
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_dist.kernels.passes import Kernels
from lightning_dist.sync.fsdp.replicas import ShardedGradients, compress_fsdp

WIDTH = 33
STEPS = 3


class Net(nn.Module):
    """Odd sizes, so that shards are padded; the head's weight is that of the first layer."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, inner: int = 35) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH))
            for _ in range(3)
        )
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)  # one row: some ranks have none of it
        self.register_buffer("offset", torch.zeros(WIDTH))
        if tied:
            self.head.weight = self.first.weight
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.offset.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.head(x)) + x


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)


def sharded(
    mesh: DeviceMesh,
    *,
    checkpoints: bool = False,
    compiled: str | None = None,
    tensor: DeviceMesh | None = None,
    **given: Any,
) -> Net:
    """The net, sharded over ``mesh``; ``compiled``: its blocks, with this backend."""
    net_keys = {key: given.pop(key) for key in ("tied", "frozen", "inner") if key in given}
    torch.manual_seed(dist.get_rank() if given.pop("unequal", False) else 0)
    net = Net(**net_keys).to(given.pop("dtype", torch.float32))
    for i, block in enumerate(net.blocks):
        if tensor is not None:
            parallelize_module(block, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        net.blocks[i] = block = checkpoint_wrapper(block) if checkpoints else block
        if compiled is not None:
            net.blocks[i] = block = torch.compile(block, backend=compiled)
        fully_shard(block, mesh=mesh, **given)
    return fully_shard(net, mesh=mesh, **given)


@contextmanager
def compressed(
    mesh: DeviceMesh, codec: Any, *, net: Any = None, **settings: Any
) -> Iterator[tuple[Any, Any]]:
    """A net, and what compresses its exchanges; if none is given, with replicas of shards."""
    net = sharded(mesh["shard"]) if net is None else net
    ours = compress_fsdp(net, codec, mesh=mesh, **{"min_compress_numel": 0, **settings})
    try:
        yield net, ours
    finally:
        ours.close()


def load_weights(net: nn.Module, weights: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, held in zip(net.parameters(), weights, strict=True):
            local(parameter).copy_(local(held))


def batches(steps: int = STEPS, *, parts: int = 1) -> Iterator[list[Tensor]]:
    """Batches of this rank, the same for each ``parts`` of ranks."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank() // parts)
    for _ in range(steps):
        yield [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def weights(net: nn.Module) -> list[Tensor]:
    return [local(p.detach()).clone() for p in net.parameters()]


def train(
    net: Any,
    *,
    ours: ShardedGradients | None,
    accumulate: bool = False,
    parts: int = 1,
    clip: bool = False,
    scale: float = 1.0,
    after_step: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """Weights after `STEPS` steps; in every other one gradients accumulate, if asked for."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step, (first, second) in enumerate(batches(parts=parts)):
        optimizer.zero_grad()
        if accumulate and step % 2:
            if ours is None:
                net.set_requires_all_reduce(False)
                (net(first).square().mean() * scale).backward()
                net.set_requires_all_reduce(True)
            else:
                with ours.no_sync():
                    (net(first).square().mean() * scale).backward()
        (net(second).square().mean() * scale).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        after_step()
    return weights(net)


def train_in_phases(net: Any, *, ours: Any) -> list[list[Tensor]]:
    """Weights after each of eight steps, in four of which a layer and a block are frozen."""
    found = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, (x, _) in enumerate(batches(8)):
        for module in (net.first, net.blocks[1]):
            module.requires_grad_(step in (2, 3, 6, 7))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        found.append(weights(net))
        if ours is not None and step == 4:
            ours.load_state_dict(of_all(ours.state_dict())[0])
    return found


@contextmanager
def counted_passes(eager: Counter[str], compiled: Counter[str]) -> Iterator[None]:
    """Calls of the passes of int8 by name."""
    use, call = Kernels.use, Kernels._call

    def counting(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def counted(*tensors: Any) -> None:
            compiled[name] += 1
            function(*tensors)

        return counted

    def used(kernels: Kernels, fused: Mapping[str, Callable[..., None]]) -> None:
        use(kernels, {name: counting(name, function) for name, function in fused.items()})

    def called(kernels: Kernels, name: str, *tensors: Any) -> None:
        before = compiled.total()
        call(kernels, name, *tensors)
        eager[name] += compiled.total() == before and not kernels.codec.lossless

    with patch.object(Kernels, "use", used), patch.object(Kernels, "_call", called):
        yield


def bytes_held() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def replicas_are_equal(net: nn.Module, mesh: DeviceMesh) -> bool:
    return same_in_replicas(weights(net), mesh)


def same_in_replicas(tensors: Iterable[Tensor], mesh: DeviceMesh) -> bool:
    group = mesh["replicate"].get_group()
    for held in tensors:
        first = held.clone()
        dist.broadcast(first, group_src=0, group=group)
        if not torch.equal(first, held):
            return False
    return True


def require_same_debt(weight: Tensor, before: list[Tensor], after: list[Tensor]) -> None:
    """Errors of ``weight`` on different ranks have one mean, to the rounding to 8 bits."""
    means = []
    for scales, codes in (before, after):
        errors = codes.double() * scales.double()
        numel = -(-len(weight) // codes.shape[1]) * weight[0].numel()  # of a rank, padded
        means.append(errors.mean(0).flatten(1)[:, :numel].flatten()[: weight.numel()])
    assert means[0].any()
    assert ((means[0] - means[1]).abs() <= 0.0041 * errors.abs().max()).all()
