"""DDP's own allreduce, watched: for models whose gradients nobody compresses."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves and refuses strings.

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, which its stubs lack
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.profiling.capture.events import BucketTimes
from lightning_dist.profiling.capture.promises import Promises
from lightning_dist.profiling.capture.recorder import Recorder


@dataclass
class WatchedAllReduce:
    """What the hook knows.

    Args:
        recorder: takes the times; that of the newest profile of this model.
        group: of the model.
        crosses: whether the next rank of the ring is on another host.
    """

    recorder: Recorder
    group: dist.ProcessGroup
    crosses: bool
    _promises: Promises = field(default_factory=Promises, init=False)

    def __post_init__(self) -> None:
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = True

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin the mean of ``bucket`` over all ranks."""
        recorder, world, index = self.recorder, self.group.size(), bucket.index()
        entered = time.monotonic_ns()
        recorder.ready(index)
        gradients = bucket.buffer()
        sent = _sent(gradients, world)
        # DDP multiplies as it fills the bucket; here that is a pass of its own.
        gradients.mul_(1.0 / world)
        recorder.is_for(index)
        intra, inter = (0, sent) if self.crosses else (sent, 0)
        times = BucketTimes(index, 0, 0, sent, intra, inter, "ddp")
        see = recorder.launches("all_reduce", group="flat", sent=sent, mean=times)
        launched = time.monotonic_ns()
        # As dist.all_reduce does, without making options and looking at arguments every time.
        work = self.group.allreduce([gradients], self._options)
        returned = time.monotonic_ns()
        mean = self._promises.make(
            gradients, work.get_future(), is_first=index == 0, is_last=bucket.is_last()
        )
        recorder.spent += launched - entered + time.monotonic_ns() - returned
        if see is not None:
            see(work)
        return mean


def why_not_watched(model: DistributedDataParallel) -> str:
    """Why gradients of ``model`` cannot be seen: another hook reduces them; empty if they can."""
    for hook, state in model._comm_hooks:
        if not isinstance(state, WatchedAllReduce):
            return (
                f"the model has a communication hook already ({hook.__qualname__}), and DDP takes "
                "only one; use strategy='compressed_ddp', or leave that hook out"
            )
    if any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()):
        return (
            "optimizers step in the backward pass, for which DDP takes a communication hook of its "
            "own, and it takes only one; let the optimizer step after it"
        )
    return ""


def is_watched(model: DistributedDataParallel) -> bool:
    """Whether somebody sees its gradients now."""
    states = [state for _, state in model._comm_hooks if isinstance(state, WatchedAllReduce)]
    return any(not state.recorder.is_closed for state in states)


def watch_allreduce(model: DistributedDataParallel, watched: WatchedAllReduce) -> None:
    """Let ``model`` reduce its gradients where they can be seen.

    The means are DDP's own, to the bit; where gradients are views of buckets and kept from step to
    step, only with a power of two of ranks, since DDP divides there. The hook stays, and with a
    recorder that is off it costs what a hook costs: a call and a pass over every bucket.
    """

    def watched_allreduce_hook(
        state: WatchedAllReduce, bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        return state.reduce(bucket)

    for _, state in model._comm_hooks:
        if isinstance(state, WatchedAllReduce):
            state.recorder = watched.recorder
            return
    model.register_comm_hook(watched, watched_allreduce_hook)


def _sent(gradients: Tensor, world: int) -> int:
    """Bytes that a rank sends: around a ring, twice; sparse ones are gathered."""
    if gradients.is_sparse:
        return (world - 1) * (gradients._indices().nbytes + gradients._values().nbytes)
    return 2 * (world - 1) * gradients.nbytes // world
