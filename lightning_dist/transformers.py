"""transformers' side: ``from lightning_dist.transformers import CompressedDDPMixin``."""

from lightning_dist.frameworks.accelerate.transformers import (
    CompressedDDPMixin as CompressedDDPMixin,
)

__all__ = ["CompressedDDPMixin"]
