"""Compressed-gradient data parallel training for networks slower than their accelerators.

Importing this package registers ``strategy="compressed_ddp"`` with Lightning and Fabric, as soon as
Lightning is imported too, and does nothing else. Public names are imported when they are first
used, and with them torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_dist._version import __version__
from lightning_dist.base.optional import after_import, needed_by

if TYPE_CHECKING:
    from lightning_dist.codecs import (
        BF16,
        CODECS,
        DGC,
        FP8,
        FP16,
        QSGD,
        BlockCodec,
        Codec,
        Int4,
        Int8,
        NoCompression,
        Payload,
        Plane,
        PowerSGD,
        RandomK,
        Sign,
        TernGrad,
        Threshold,
        TopK,
        after_steps,
        by_name,
        by_size,
        register_codec,
        warmup,
    )
    from lightning_dist.elastic.loop.loop import ElasticLoop
    from lightning_dist.elastic.rendezvous import init_process_group
    from lightning_dist.frameworks.comm_profiler import CommProfiler
    from lightning_dist.frameworks.lightning.checkpoint.async_checkpoint import AsyncCheckpoint
    from lightning_dist.frameworks.lightning.checkpoint.io import AsyncTorchCheckpointIO
    from lightning_dist.frameworks.lightning.ddp import LocalUpdateStrategy
    from lightning_dist.frameworks.lightning.elastic.restart import ElasticRestart
    from lightning_dist.frameworks.lightning.launcher import ElasticEnvironment
    from lightning_dist.frameworks.lightning.model_parallel import (
        CompressedModelParallelStrategy,
        LocalUpdateModelParallelStrategy,
    )
    from lightning_dist.frameworks.lightning.strategy import CompressedDDPStrategy
    from lightning_dist.profiling.metrics import CompressionError, ExchangedVolume
    from lightning_dist.sync.ddp import compress_ddp
    from lightning_dist.sync.fsdp.replicas import compress_fsdp
    from lightning_dist.sync.local.updates import local_updates
    from lightning_dist.sync.onebit_adam import OneBitAdam

_HOME = {
    "AsyncCheckpoint": "frameworks.lightning.checkpoint.async_checkpoint",
    "AsyncTorchCheckpointIO": "frameworks.lightning.checkpoint.io",
    "CommProfiler": "frameworks.comm_profiler",
    "CompressedDDPStrategy": "frameworks.lightning.strategy",
    "CompressedModelParallelStrategy": "frameworks.lightning.model_parallel",
    "CompressionError": "profiling.metrics",
    "ElasticEnvironment": "frameworks.lightning.launcher",
    "ElasticLoop": "elastic.loop.loop",
    "ElasticRestart": "frameworks.lightning.elastic.restart",
    "ExchangedVolume": "profiling.metrics",
    "LocalUpdateModelParallelStrategy": "frameworks.lightning.model_parallel",
    "LocalUpdateStrategy": "frameworks.lightning.ddp",
    "OneBitAdam": "sync.onebit_adam",
    "compress_ddp": "sync.ddp",
    "compress_fsdp": "sync.fsdp.replicas",
    "init_process_group": "elastic.rendezvous",
    "local_updates": "sync.local.updates",
}
"""Modules of the public names that are not in ``codecs``."""

__all__ = [
    "BF16",
    "CODECS",
    "DGC",
    "FP8",
    "FP16",
    "QSGD",
    "AsyncCheckpoint",
    "AsyncTorchCheckpointIO",
    "BlockCodec",
    "Codec",
    "CommProfiler",
    "CompressedDDPStrategy",
    "CompressedModelParallelStrategy",
    "CompressionError",
    "ElasticEnvironment",
    "ElasticLoop",
    "ElasticRestart",
    "ExchangedVolume",
    "Int4",
    "Int8",
    "LocalUpdateModelParallelStrategy",
    "LocalUpdateStrategy",
    "NoCompression",
    "OneBitAdam",
    "Payload",
    "Plane",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
    "__version__",
    "after_steps",
    "by_name",
    "by_size",
    "compress_ddp",
    "compress_fsdp",
    "init_process_group",
    "local_updates",
    "register_codec",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name):
        module = import_module(f"{__name__}.{_HOME.get(name, 'codecs')}")
    return getattr(module, name)


def _register(lightning: object) -> None:
    from lightning_dist.frameworks.registration import register_all

    register_all()


def _refuse(package: Any) -> None:
    from lightning_dist.frameworks.registration import NAMES, SHARDED, refuse_names

    refuse_names(package.__name__, (*NAMES, SHARDED))


after_import("lightning", _register)
for _package in ("pytorch_lightning", "lightning_fabric"):  # the same classes under other names
    after_import(_package, _refuse)
