"""Two ranks of one framework after the other: ``in_force_runs.py FRAMEWORK ...``."""

import faulthandler
import sys
from typing import Any

faulthandler.dump_traceback_later(100, exit=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def train(model: nn.Module, backward: Any = torch.Tensor.backward) -> None:
    backward(model(torch.ones(2, 256)).sum())


def plain() -> None:
    from lightning_dist import compress_ddp

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(256, 64))
    handle = compress_ddp(model, "int8")
    train(model)
    handle.close()


def accelerate() -> None:
    from accelerate import Accelerator

    from lightning_dist.accelerate import CompressedDDPPlugin

    accelerator = Accelerator(cpu=True)
    CompressedDDPPlugin("int8").attach(accelerator)
    model = accelerator.prepare(nn.Linear(256, 64))
    train(model, accelerator.backward)


def fabric() -> None:
    from lightning.fabric import Fabric

    import lightning_dist  # noqa: F401

    fabric = Fabric(strategy="compressed_ddp", accelerator="cpu", devices=2)
    fabric.launch()
    train(fabric.setup(nn.Linear(256, 64)), fabric.backward)


def two_models() -> None:
    """A rule for one of them, in Fabric and in Accelerate."""
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    from lightning_dist import by_name
    from lightning_dist.accelerate import CompressedDDPPlugin
    from lightning_dist.fabric import CompressedDDPStrategy

    codec = by_name("int8", {"critic": "none"})
    fabric = Fabric(strategy=CompressedDDPStrategy(codec), accelerator="cpu", devices=2)
    fabric.launch()
    accelerator = Accelerator(cpu=True)
    CompressedDDPPlugin(codec).attach(accelerator)
    for name in ("critic", "generator"):
        fabric.setup(nn.Sequential(nn.ModuleDict({name: nn.Linear(256, 64)})))
        accelerator.prepare(nn.ModuleDict({name: nn.Linear(256, 64)}))


def lightning() -> None:
    import lightning as L
    from scenarios.fitting import QUIET
    from scenarios.models import Regression

    from lightning_dist import CompressedDDPStrategy

    strategy = CompressedDDPStrategy("int8")
    L.Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=1).fit(Regression(512))


if __name__ == "__main__":
    for framework in sys.argv[1:]:
        globals()[framework]()
    dist.barrier()
    dist.destroy_process_group()
