"""Fabric's side: ``from lightning_dist.fabric import CompressedDDPStrategy``, and that of FSDP2."""

from lightning_dist.integrations.fabric import CompressedDDPStrategy as CompressedDDPStrategy
from lightning_dist.integrations.fabric_model_parallel import (
    CompressedModelParallelStrategy as CompressedModelParallelStrategy,
)

__all__ = ["CompressedDDPStrategy", "CompressedModelParallelStrategy"]
