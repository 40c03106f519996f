"""Accelerate's side: ``from lightning_dist.accelerate import AsyncState``."""

from lightning_dist.integrations.accelerate.state import AsyncState as AsyncState

__all__ = ["AsyncState"]
