"""DistributedDataParallel's buckets on their way to a reducer, and the parameters it averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # its stubs lack it
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.private import (
    name_before_compile,
    names_ignored_by_ddp,
    rebuild_ddp,
    sparse_parts,
)
from lightning_dist.ranks.traffic import ring_all_gather
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real, slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import untraced


class TrainedSet:
    """Lets DDP average the parameters that require a gradient now, before each forward pass.

    DDP looks at them once, when it wraps a model: the gradient of a layer that was frozen then is
    never averaged, and one that is frozen later ends the training. All ranks freeze and unfreeze
    the same ones.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        names: Mapping[Tensor, str],
        *,
        note: Callable[[Iterable[Tensor]], None] | None = None,
    ) -> None:
        """Begin now; it ends when nothing holds this object or its :meth:`close`.

        Args:
            names: of all parameters.
            note: a method, called with those that are averaged from now on; not kept alive.
        """
        self._names, self._note = names, None if note is None else WeakMethod(note)
        self._averaged, self._flags = _trained(names), flags_of(names)
        self._hook = model.register_forward_pre_hook(untraced(self._before_forward))

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _before_forward(self, model: DistributedDataParallel, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        flags = flags_of(self._names)
        if flags == self._flags:
            return
        self._flags, trained = flags, _trained(self._names)
        added, frozen = trained - self._averaged, self._averaged - trained
        # One that is frozen for a while, as by toggle_optimizer, is an unused one to DDP.
        if trained and (added or (frozen and not finds_unused(model))):
            if model.static_graph:
                changed = next(iter(added or frozen))
                raise ValueError(
                    "static_graph=True says that the same parameters are used in all steps, and "
                    f"{self._names[changed]!r} was {'unfrozen' if added else 'frozen'}; "
                    "leave static_graph out"
                )
            self._averaged = trained
            if self._note is not None and (note := self._note()) is not None:
                note(added)
            rebuild_ddp(model, model.process_group)


def finds_unused(model: DistributedDataParallel) -> bool:
    """True if DDP looks for parameters without a gradient."""
    return model.find_unused_parameters and not model.static_graph


def sparse_tables(module: nn.Module) -> dict[str, nn.Parameter]:
    """Embeddings whose gradients are sparse and averaged by DDP, by name."""
    tables = [
        child.weight
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    ]
    return {
        name_before_compile(name): parameter
        for name, parameter in trained_by_ddp(module).items()
        if any(parameter is table for table in tables)
    }


def trained_by_ddp(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters whose gradients DDP averages, by name: trained, and not left to others."""
    ignored = names_ignored_by_ddp(module)
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in ignored}


def flags_of(parameters: Iterable[Tensor]) -> list[bool]:
    """``requires_grad`` of each, to see before every step whether one has changed."""
    return [parameter.requires_grad for parameter in parameters]


def _trained(parameters: Iterable[Tensor]) -> frozenset[Tensor]:
    return frozenset(parameter for parameter in parameters if parameter.requires_grad)


class DDPBuckets:
    """Averages DDP's gradient buckets with ``reducer``; call it from a communication hook.

    Residuals are allocated here, and not in the first backward pass at the peak of memory.

    Args:
        find_unused: whether DDP looks for parameters without a gradient; the reducer then has
            ``allow_absent``.
        group: of the model, in which sparse gradients are averaged. None: the default one.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        find_unused: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.reducer, self._group = reducer, group
        self._slices: dict[int, tuple[object, Sequence[ParameterSlice]]] = {}
        self._reached = -1  # index of the last bucket of a step that is not finished
        trained = [parameter for parameter in reducer.names if parameter.requires_grad]
        # Names of those that a backward pass has used. The bucket does not tell: DDP copies an
        # unused parameter's gradient of an earlier pass into it.
        self._used: set[str] | None = set() if find_unused else None
        self.note(trained)
        for dtype in dict.fromkeys(parameter.dtype.to_real() for parameter in trained):
            alike = [parameter for parameter in trained if parameter.dtype.to_real() == dtype]
            names = [reducer.names[parameter] for parameter in alike]
            reducer.reserve(slices_of(names, alike), dtype)

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note from now on which of ``parameters`` a backward pass uses."""
        if self._used is None:
            return
        for parameter in parameters:
            noted = partial(_note, self._used, self.reducer.names[parameter])
            hook = parameter.register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]
            self.reducer.at_close.append(hook.remove)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start averaging ``bucket.buffer() (N,)`` over all ranks, in place.

        The future is ready with that buffer once the mean is there. Collective: every rank calls it
        for the same buckets in the same order.
        """
        index, reducer = bucket.index(), self.reducer
        if index <= self._reached:  # the last backward pass was cut short by an exception
            reducer.abandon()
        is_sparse = bucket.buffer().is_sparse
        done = self._reduce_sparse(bucket.buffer()) if is_sparse else self._start(bucket)
        self._reached = index
        if bucket.is_last():
            self._reached = -1
            reducer.finish()
            if self._used is not None:
                self._used.clear()
        return done

    def _start(self, bucket: GradBucket) -> Future[Tensor]:
        slices, used = self._slices_of(bucket), self._used
        # Complete for the parameters of a bucket once DDP hands the bucket over.
        absent = () if used is None else [part.name for part in slices if part.name not in used]
        key = bucket.index()
        buffer = bucket.buffer()
        is_complex = buffer.is_complex()  # before torch 2.11; since then its pairs of real numbers
        handle = self.reducer.start(as_real(buffer).flatten(), slices, key=key, absent=absent)

        def mean(done: Future[Tensor]) -> Tensor:
            flat = done.value()
            return torch.view_as_complex(flat.view(-1, 2)) if is_complex else flat

        # A future carries an exception to DDP's C++ side only through `then`.
        return handle.done.then(mean)

    def _reduce_sparse(self, gradient: Tensor) -> Future[Tensor]:
        """Average rows of an embedding, which are alone in their bucket, as DDP itself does."""
        network = self.reducer.network
        gradient.div_(network.world_size)
        indices, values = sparse_parts(gradient)
        sent = ring_all_gather(indices.nbytes + values.nbytes, network.topology)
        self.reducer.note_uncompressed(sent, finite=values.isfinite().all())
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        averaged: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return averaged

    def _slices_of(self, bucket: GradBucket) -> Sequence[ParameterSlice]:
        """Slices of the parameters in ``bucket``, worked out once per layout."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        known = self._slices.get(bucket.index())
        if known is None or known[0] != key:
            names = [self.reducer.names[parameter] for parameter in parameters]
            known = self._slices[bucket.index()] = key, slices_of(names, parameters)
        return known[1]


def _note(used: set[str], name: str, _: Tensor) -> None:
    used.add(name)
