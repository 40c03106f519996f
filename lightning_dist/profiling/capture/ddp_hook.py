"""Hooks on a DistributedDataParallel: its passes, its optimizers' steps, and its own allreduce."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes
# themselves and refuses strings.

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # its stubs lack it
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightning_dist.base.features import DDP
from lightning_dist.base.private import (
    at_end_of_backward,
    communication_hooks,
    sparse_parts,
    steps_in_backward,
    tensors_in,
)
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import StepTimer
from lightning_dist.reducer.stats import untraced

_HELD_BYTES = 4 << 20
"""DDP copies a mean into its gradients while the next ones travel; those that are held until the
last has arrived are copied after that, which takes less than a millisecond."""

_Reduced: TypeAlias = "Future[list[Tensor]]"


class Watching:
    """Tells a timer of the passes of ``model`` and of the steps of its optimizers."""

    def __init__(self, model: DistributedDataParallel, timer: StepTimer) -> None:
        DDP.require()  # not first in a compiled backward pass, where modules look different
        self._model, self._timer = model, timer
        self._synchronises = True
        self._in_backward = False
        self._mine = {id(parameter) for parameter in model.parameters()}
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(untraced(self._before_forward)),
            model.register_forward_hook(untraced(self._after_forward)),
            register_optimizer_step_pre_hook(untraced(self._before_step)),
            register_optimizer_step_post_hook(untraced(self._after_step)),
        ]

    def stop(self) -> None:
        """Tell nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _trains(self) -> bool:
        # Lightning leaves DDP's own flag as a validation has set it.
        return self._model.module.training and torch.is_grad_enabled()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._trains:
            self._in_backward = False
            self._timer.forward()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not self._trains:
            self._timer.exclude_interval()
            return
        self._timer.forward_ended()
        self._synchronises = self._model.require_backward_grad_sync
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._in_backward:  # a second output
            return
        self._in_backward = True
        self._timer.backward()
        # After DDP's own, which waits for the means: it is queued while the pass runs.
        at_end_of_backward(lambda: at_end_of_backward(self._backward_ends))

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._timer.backward_ended(synchronised=self._synchronises)

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._is_mine(optimizer):
            self._timer.stepping()

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if self._is_mine(optimizer):
            self._timer.stepped()

    def _is_mine(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(parameter) in self._mine for parameter in parameters)


class Promises:
    """Futures of means that DDP waits for, completed by the thread of the backward pass.

    A callback runs in a thread of gloo, which first has to become one of the interpreter's. So the
    hook of a later bucket completes what has arrived before it, and one callback, with the last
    bucket, what is left. With 40 buckets a callback for each takes 2 to 3 ms more of a core a step.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[_Reduced, Future[Tensor], Tensor]] = deque()
        self._bytes = 0

    def make(
        self, gradients: Tensor, reduced: _Reduced, *, is_first: bool, is_last: bool
    ) -> Future[Tensor]:
        """The promise of the mean of a bucket: ``gradients``, when ``reduced`` is done."""
        if is_first:
            self._held.clear()
            self._bytes = 0
        self._complete()
        if is_last:
            return self._complete_with(gradients, reduced)
        if not gradients.is_cpu or gradients.is_sparse:
            return _after(reduced, gradients)
        size = self._bytes + gradients.nbytes
        if size > _HELD_BYTES:
            return _after(reduced, gradients)
        self._bytes = size
        promise: Future[Tensor] = Future()
        self._held.append((reduced, promise, gradients))
        return promise

    def _complete(self) -> None:
        """Those whose means have arrived, in order."""
        while self._held and self._held[0][0].done():
            reduced, promise, gradients = self._held[0]
            try:
                reduced.value()
            except RuntimeError:
                return  # the last one will tell
            promise.set_result(gradients)
            self._bytes -= gradients.nbytes
            self._held.popleft()

    def _complete_with(self, gradients: Tensor, reduced: _Reduced) -> Future[Tensor]:
        """The last promise. It completes the others too, when all are there or one has failed."""
        held, self._held = self._held, deque()
        if not held:
            return _after(reduced, gradients)

        def arrived(all_of_them: Future[list[_Reduced]]) -> Tensor:
            for _, promise, mean in held:
                promise.set_result(mean)  # also where it has failed: DDP would wait for ever
            all_of_them.value()
            return gradients

        last: Future[Tensor]
        last = collect_all([*(reduced for reduced, _, _ in held), reduced]).then(arrived)
        return last


def _after(reduced: _Reduced, gradients: Tensor) -> Future[Tensor]:
    def arrived(done: _Reduced) -> Tensor:
        done.value()  # raises where it has failed
        return gradients

    promise: Future[Tensor] = reduced.then(arrived)
    return promise


@dataclass
class WatchedAllReduce:
    """State of the hook that stands in for DDP's own allreduce.

    Args:
        recorder: that of the newest profile of this model.
        crosses: the next rank of the ring is on another node.
    """

    recorder: Recorder
    group: dist.ProcessGroup
    crosses: bool
    _promises: Promises = field(default_factory=Promises, init=False)

    def __post_init__(self) -> None:
        self._options = dist.AllreduceOptions()
        if hasattr(self._options, "asyncOp"):  # torch 2.7 knows no other
            self._options.asyncOp = True

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
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
        mean_of = sent, intra, inter, "ddp"
        watch = recorder.launches("all_reduce", group="flat", sent=sent, mean=mean_of)
        launched = time.monotonic_ns()
        # As dist.all_reduce does, without making options and looking at arguments every time.
        work = self.group.allreduce([gradients], self._options)
        returned = time.monotonic_ns()
        mean = self._promises.make(
            gradients, work.get_future(), is_first=index == 0, is_last=bucket.is_last()
        )
        recorder.spent += launched - entered + time.monotonic_ns() - returned
        if watch is not None:
            watch(work)
        return mean


def why_not_watched(model: DistributedDataParallel) -> str:
    """Reason why gradients of ``model`` cannot be seen; empty if they can."""
    for hook, state in communication_hooks(model):
        if not isinstance(state, WatchedAllReduce):
            return (
                f"the model has a communication hook already ({hook.__qualname__}), and DDP takes "
                "only one; use strategy='compressed_ddp', or leave that hook out"
            )
    if any(map(steps_in_backward, model.parameters())):
        return (
            "optimizers step in the backward pass, for which DDP takes a communication hook of its "
            "own, and it takes only one; let the optimizer step after it"
        )
    return ""


def is_watched(model: DistributedDataParallel) -> bool:
    """True while a profile sees the gradients of ``model``."""
    return any(
        isinstance(state, WatchedAllReduce) and not state.recorder.is_closed
        for _, state in communication_hooks(model)
    )


def watch_allreduce(model: DistributedDataParallel, recorder: Recorder, *, crosses: bool) -> None:
    """Let ``model`` reduce its gradients where ``recorder`` sees them.

    The means are DDP's own, to the bit; where gradients are views of buckets and kept from step to
    step, only with a power of two of ranks, since DDP divides there. The hook stays after the
    profile, and costs a call and a pass over every bucket.

    Args:
        crosses: the next rank of the ring is on another node.
    """

    for _, state in communication_hooks(model):
        if isinstance(state, WatchedAllReduce):
            state.recorder = recorder
            return
    watched = WatchedAllReduce(recorder, model.process_group, crosses)
    model.register_comm_hook(watched, WatchedAllReduce.reduce)


def _sent(gradients: Tensor, world: int) -> int:
    """Bytes that a rank sends: around a ring, twice; sparse ones are gathered."""
    if gradients.is_sparse:
        return (world - 1) * sum(part.nbytes for part in sparse_parts(gradients))
    return 2 * (world - 1) * gradients.nbytes // world
