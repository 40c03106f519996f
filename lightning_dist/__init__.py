"""Compressed-gradient data parallel training for networks slower than their accelerators.

Importing this package registers ``strategy="compressed_ddp"`` with Lightning and Fabric, and does
nothing else. Public names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_dist._version import __version__
from lightning_dist.integrations.registration import register_all

if TYPE_CHECKING:
    from lightning_dist.codecs import BF16, CODECS, FP16, Codec, Int8, NoCompression
    from lightning_dist.integrations.ddp import compress_ddp
    from lightning_dist.integrations.lightning import CompressedDDPStrategy

_HOME = {
    "BF16": "codecs",
    "CODECS": "codecs",
    "FP16": "codecs",
    "Codec": "codecs",
    "CompressedDDPStrategy": "integrations.lightning",
    "Int8": "codecs",
    "NoCompression": "codecs",
    "compress_ddp": "integrations.ddp",
    "OneBitAdam": "onebit_adam",
}

__all__ = [
    "BF16",
    "CODECS",
    "FP16",
    "Codec",
    "CompressedDDPStrategy",
    "Int8",
    "NoCompression",
    "__version__",
    "compress_ddp",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


register_all()
