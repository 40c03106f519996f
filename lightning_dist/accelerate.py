"""Accelerate's side: compressed gradients, and checkpoints in the background.

``from lightning_dist.accelerate import Accelerator, AsyncState, CompressedDDPPlugin``
"""

from lightning_dist.integrations.accelerate.accelerator import Accelerator as Accelerator
from lightning_dist.integrations.accelerate.async_state.async_state import AsyncState as AsyncState
from lightning_dist.integrations.accelerate.compression import Compression as Compression
from lightning_dist.integrations.accelerate.fsdp import (
    CompressedFSDPPlugin as CompressedFSDPPlugin,
)
from lightning_dist.integrations.accelerate.plugin import (
    CompressedDDPPlugin as CompressedDDPPlugin,
)

__all__ = [
    "Accelerator",
    "AsyncState",
    "CompressedDDPPlugin",
    "CompressedFSDPPlugin",
    "Compression",
]
