"""One training through Lightning, Fabric, Accelerate and plain DDP ends with the same bits: same
seeds, data, codec.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from replicas import of_all, require_equal
from scenarios.fitting import compressed, make_trainer, parameters
from scenarios.models import Regression, loader
from scenarios.world import rank, world_size
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from lightning_dist import compress_ddp
from lightning_dist.fabric import CompressedDDPStrategy

accelerate = pytest.importorskip("accelerate")

from scenarios.accelerating import forget_accelerators  # noqa: E402

from lightning_dist.accelerate import CompressedDDPPlugin  # noqa: E402

STEPS = 20


def net() -> nn.Module:
    return Regression(optimizer="momentum").net


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> DataLoader[Any]:
    """Of this rank: frameworks deal batches in different ways."""
    everything = loader(STEPS).dataset
    own = list(range(rank(), len(everything), world_size()))
    return DataLoader(Subset(everything, own), batch_size=8)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]
) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


class Own(Regression):
    def train_dataloader(self) -> DataLoader[Any]:
        return batches()


def by_lightning(codec: str) -> nn.Module:
    model = Own(optimizer="momentum")
    trainer = make_trainer(compressed(codec), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model)
    assert trainer.global_step == STEPS
    return model.net


def by_fabric(codec: str) -> nn.Module:
    strategy = CompressedDDPStrategy(codec, min_compress_numel=0)
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    module = net()
    loop(*fabric.setup(module, optimizer_of(module)), fabric.backward)
    for reducer in strategy.reducers:
        reducer.close()
    return module


def by_accelerate(codec: str) -> nn.Module:
    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    compression = CompressedDDPPlugin(codec, min_compress_numel=0).attach(accelerator)
    module = net()
    loop(*accelerator.prepare(module, optimizer_of(module)), accelerator.backward)
    compression.close()
    forget_accelerators()
    return module


@cache
def by_plain_ddp(codec: str) -> dict[str, Tensor]:
    module = net()
    model = DistributedDataParallel(module)
    reducer = compress_ddp(model, codec, min_compress_numel=0)
    loop(model, optimizer_of(module), Tensor.backward)
    assert reducer.comm_stats()["steps"] == STEPS
    reducer.close()
    return parameters(module)


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1"])
@pytest.mark.parametrize("way", [by_accelerate, by_fabric, by_lightning])
def test_the_parameters_after_20_steps_are_the_same_bits(
    codec: str, way: Callable[[str], nn.Module]
) -> None:
    expected, start, uncompressed = by_plain_ddp(codec), parameters(net()), by_plain_ddp("none")
    require_equal(parameters(way(codec)), of_all(expected)[0])
    for name, value in expected.items():
        assert not torch.equal(value, start[name]), "it has trained"
    different = [not torch.equal(value, uncompressed[name]) for name, value in expected.items()]
    assert any(different), "and the codec took part"
