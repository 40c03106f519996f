"""What a profile says of its rank: where it runs, with whom, and on what."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.profiling.capture.ddp_hook import why_not_watched
from lightning_dist.profiling.capture.events import RankRecord
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.versions import versions


def about(
    model: DistributedDataParallel, reducer: Reducer | None, *, host: str, budget: float
) -> RankRecord:
    """The first line of the file of this rank; ``reducer``: of ``model``, if it is compressed."""
    if reducer is None:
        groups = {"flat": dist.get_process_group_ranks(model.process_group)}
    else:
        channels = reducer.network.channels
        groups = {each.name: dist.get_process_group_ranks(each.group) for each in channels}
    return RankRecord(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        host=host,
        groups=groups,
        clock=time.monotonic_ns(),
        unix=time.time(),
        codec="ddp" if reducer is None else repr(reducer.settings.codec),
        backend=dist.get_backend(model.process_group),
        device=model.device.type,
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        budget=budget,
        unseen="" if reducer is not None else why_not_watched(model),
        versions=versions(),
        script=sys.argv[0],
    )


def why_not_in_detail(model: DistributedDataParallel) -> str:
    """Why what happens within a step cannot be timed; empty if it can."""
    kind = model.device.type
    if kind == "cpu":
        return ""
    if kind != "cuda":
        return f"the times of work on {kind} are not taken yet"
    if model.is_multi_device_module:
        return "the model is on several GPUs of one process, and the times of one are taken"
    backends = dist.get_backend_config(model.process_group)
    if "cuda:nccl" not in backends.split(","):
        return f"work on a GPU is timed where NCCL exchanges the gradients, here it is {backends}"
    return ""
