"""Fabric's side: ``from lightning_dist.fabric import CompressedDDPStrategy``, and the others."""

from lightning_dist.frameworks.fabric.ddp import CompressedDDPStrategy as CompressedDDPStrategy
from lightning_dist.frameworks.fabric.ddp import LocalUpdateStrategy as LocalUpdateStrategy
from lightning_dist.frameworks.fabric.model_parallel import (
    CompressedModelParallelStrategy as CompressedModelParallelStrategy,
)
from lightning_dist.frameworks.fabric.model_parallel import (
    LocalUpdateModelParallelStrategy as LocalUpdateModelParallelStrategy,
)

__all__ = [
    "CompressedDDPStrategy",
    "CompressedModelParallelStrategy",
    "LocalUpdateModelParallelStrategy",
    "LocalUpdateStrategy",
]
