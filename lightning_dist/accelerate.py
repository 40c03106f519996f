"""Accelerate's side: compressed gradients, and checkpoints in the background.

``from lightning_dist.accelerate import Accelerator, AsyncStateCheckpointer, CompressedDDPPlugin``
"""

from lightning_dist.frameworks.accelerate.accelerator import Accelerator as Accelerator
from lightning_dist.frameworks.accelerate.async_state.checkpointer import (
    AsyncStateCheckpointer as AsyncStateCheckpointer,
)
from lightning_dist.frameworks.accelerate.compression import Compression as Compression
from lightning_dist.frameworks.accelerate.local_updates import (
    LocalUpdatesPlugin as LocalUpdatesPlugin,
)
from lightning_dist.frameworks.accelerate.local_updates import local_updates as local_updates
from lightning_dist.frameworks.accelerate.plugins import (
    CompressedDDPPlugin as CompressedDDPPlugin,
)
from lightning_dist.frameworks.accelerate.plugins import (
    CompressedFSDPPlugin as CompressedFSDPPlugin,
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
