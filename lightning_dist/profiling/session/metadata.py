"""Metadata of a profile: the first line of every rank, and ``meta.json`` beside them."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.accelerator import has_streams
from lightning_dist.base.versions import versions
from lightning_dist.elastic.recovery.protocol import Worker
from lightning_dist.profiling.capture.ddp_hook import why_not_watched
from lightning_dist.profiling.capture.events import RankRecord
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.profiling.report.files import to_json
from lightning_dist.profiling.session.models import LocalModel, ShardedModel
from lightning_dist.ranks.launch import Launch
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.report import Reports

_OF_RANK_0 = (
    *("schema", "started", "script"),
    *("world_size", "groups", "codec", "backend", "device", "cores"),
)


def rank_metadata(
    model: DistributedDataParallel,
    reducer: Reducer | None,
    *,
    node: str,
    worker: Worker | None = None,
) -> RankRecord:
    """The first line of the file of this rank; ``reducer``: of ``model``, if it is compressed.

    Args:
        worker: this process, where ranks change; the file is of its place.
    """
    compression = _compression_of(model, reducer)
    if reducer is None:
        groups = {"flat": dist.get_process_group_ranks(model.process_group)}
    else:
        channels = reducer.network.channels
        groups = {each.name: dist.get_process_group_ranks(each.group) for each in channels}
    return RankRecord(
        rank=dist.get_rank() if worker is None else place_of(worker),
        world_size=(
            dist.get_world_size()
            if worker is None
            else max(Launch.from_env().world_size, place_of(worker) + 1)
        ),
        node=node,
        groups=groups,
        clock=time.monotonic_ns(),
        unix=time.time(),
        codec="ddp" if compression is None else compression.comm_config()["codec"],
        backend=dist.get_backend(model.process_group),
        device=model.device.type,
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        unseen="" if compression is not None else why_not_watched(model),
        versions=versions(),
        script=sys.argv[0],
        commit="" if reducer is None else reducer.comm_config()["commit"],
        worker="" if worker is None else str(worker),
        fsdp=model.kind if isinstance(model, ShardedModel) else "",
        sync_every=model.updates.settings.sync_every if isinstance(model, LocalModel) else 0,
    )


def _compression_of(model: DistributedDataParallel, reducer: Reducer | None) -> Reports | None:
    return model.exchange if isinstance(model, ShardedModel) else reducer


def place_of(worker: Worker) -> int:
    """The rank that a worker has while nobody is lost, where all nodes have equally many."""
    return worker.node * (Launch.from_env().local_world_size or 1) + worker.local_rank


def run_metadata(
    model: DistributedDataParallel,
    reducer: Reducer | None,
    of_rank: RankRecord,
    *,
    nodes: Sequence[str],
    settings: SessionSettings,
) -> bytes:
    """Content of ``meta.json``, which rank 0 writes when a profile begins."""
    compression = _compression_of(model, reducer)
    gradients = [each for each in model.parameters() if each.requires_grad]
    content: dict[str, Any] = {
        **{name: getattr(of_rank, name) for name in _OF_RANK_0},
        "nodes": list(nodes),
        "compression": None if compression is None else compression.comm_config(),
        "gradients": {
            "parameters": sum(each.numel() for each in gradients),
            "bytes": sum(each.nbytes for each in gradients),
            "bucket_bytes_cap": model.bucket_bytes_cap,
        },
        "profiler": asdict(settings),
        "versions": {"python": platform.python_version(), **of_rank.versions},
    }
    return to_json(content).encode() + b"\n"


def why_not_in_detail(model: DistributedDataParallel, reducer: Reducer | None = None) -> str:
    """Reason why events within a step cannot be timed; empty if they can."""
    if isinstance(model, LocalModel):
        return model.why_not_in_detail()
    if reducer is not None and reducer.settings.delay:
        return "with delay=1 an exchange ends in the step after its own"
    kind = model.device.type
    if kind == "cpu":
        return ""
    if not has_streams(model.device):
        return f"the times of work on {kind} are not measured, because it has no streams"
    if model.is_multi_device_module:
        return "the model is on several GPUs of one process, and only one is timed"
    backends = dist.get_backend_config(model.process_group)
    if dict(pair.split(":") for pair in backends.split(",")).get(kind) in (None, "gloo", "mpi"):
        return f"work on a GPU is timed where NCCL exchanges the gradients, here it is {backends}"
    return ""
