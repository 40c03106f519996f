"""Accelerate's side: compressed gradients, and checkpoints in the background.

``from lightning_dist.accelerate import Accelerator, AsyncStateCheckpointer, CompressedDDPPlugin``
"""

from lightning_dist.integrations.accelerate.accelerator import Accelerator as Accelerator
from lightning_dist.integrations.accelerate.async_state.checkpointer import (
    AsyncStateCheckpointer as AsyncStateCheckpointer,
)
from lightning_dist.integrations.accelerate.compression import Compression as Compression
from lightning_dist.integrations.accelerate.fsdp import (
    CompressedFSDPPlugin as CompressedFSDPPlugin,
)
from lightning_dist.integrations.accelerate.local_updates import (
    LocalUpdatesPlugin as LocalUpdatesPlugin,
)
from lightning_dist.integrations.accelerate.local_updates import local_updates as local_updates
from lightning_dist.integrations.accelerate.plugin import (
    CompressedDDPPlugin as CompressedDDPPlugin,
)

__all__ = [
    "Accelerator",
    "AsyncStateCheckpointer",
    "CompressedDDPPlugin",
    "CompressedFSDPPlugin",
    "Compression",
    "LocalUpdatesPlugin",
    "local_updates",
]
