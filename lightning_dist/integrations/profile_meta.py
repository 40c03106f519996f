"""``meta.json``: what a profile is of, for whoever finds its folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_dist.profiling.capture.events import RankRecord
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.profiling.report.summary_file import to_json
from lightning_dist.reducer.reducer import Reducer

SCHEMA = 1


def meta_of(
    model: DistributedDataParallel,
    reducer: Reducer | None,
    about: RankRecord,
    *,
    hosts: Sequence[str],
    settings: SessionSettings,
) -> bytes:
    """What rank 0 writes when a profile begins.

    Args:
        reducer: of ``model``, if it is compressed.
        about: of rank 0.
        hosts: of every rank.
    """
    gradients = [each for each in model.parameters() if each.requires_grad]
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "started": about.started,
        "script": about.script,
        "world_size": about.world_size,
        "hosts": list(hosts),
        "groups": about.groups,
        "codec": about.codec,
        "compression": None if reducer is None else reducer.comm_config(),
        "backend": about.backend,
        "device": about.device,
        "cores": about.cores,
        "gradients": {
            "parameters": sum(each.numel() for each in gradients),
            "bytes": sum(each.nbytes for each in gradients),
            "bucket_bytes_cap": model.bucket_bytes_cap,
        },
        "profiler": asdict(settings),
        "versions": {"python": platform.python_version(), **about.versions},
    }
    return to_json(content).encode() + b"\n"
