"""Fabric's side: ``from lightning_dist.fabric import CompressedDDPStrategy``."""

from lightning_dist.integrations.fabric import CompressedDDPStrategy as CompressedDDPStrategy

__all__ = ["CompressedDDPStrategy"]
