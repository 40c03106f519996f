"""transformers' side: ``from lightning_dist.transformers import CompressedDDPMixin``."""

from lightning_dist.integrations.accelerate.trainer import CompressedDDPMixin as CompressedDDPMixin

__all__ = ["CompressedDDPMixin"]
