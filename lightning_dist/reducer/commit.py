"""When state changes: agreement of all ranks, and steps that are not applied.

Under the immediate commit units write their state while they encode. Under the deferred one the
ranks first agree on what became of the step. If it was finite everywhere, all state is committed as
it is decoded. If it was not, the state of a parameter is committed when an optimizer applies its
gradient, and dropped otherwise.

The all-reduce in which they agree is also the vote of a training that goes on where ranks are lost
(``failures.py``): a rank takes part once it has all payloads, so whoever has the answer knows
that every other rank can commit the step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lightning_dist.accelerator import placed
from lightning_dist.reducer.adjust import free_owed
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import CodecGroup, decode_all


class DriftError(RuntimeError):
    """Ranks have applied different gradients."""


class Answer(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        finite: every gradient of every rank is.
        unused: names of parameters that no rank has used.
        pauses: some rank wants all to stop after this step.
    """

    finite: bool = True
    unused: frozenset[str] = frozenset()
    pauses: bool = False


def agree(
    finite: Sequence[Tensor],
    used: Mapping[str, bool],
    sums: Sequence[Tensor],
    network: Network,
    *,
    pauses: bool = False,
) -> Answer:
    """What became of a step.

    One allreduce of a few flags, on a group of its own so that it overtakes the payloads. Waits
    for a GPU, once.

    Args:
        finite: 0-d bools of this rank.
        used: whether this rank used a parameter, by name, in an order equal on all ranks; empty
            unless DDP looks for unused parameters.
        sums: of bits that all ranks should have in common, 0-d int64; see :func:`sum_of_bits`.
        pauses: whether this rank wants all to stop after this step.

    Raises:
        DriftError: ranks have other sums.
    """
    answers = torch.tensor([False, *used.values(), pauses, 0, 0], dtype=torch.float32, device="cpu")
    flags = placed(answers, network.device)
    if finite:
        flags[0] = torch.stack(list(finite)).logical_not().any()
    if sums:
        # Numbers that float32 holds; if the largest is the smallest, all are equal.
        flags[-1] = torch.stack(list(sums)).sum() % (1 << 24)
        flags[-2] = -flags[-1]
    network.control.all_reduce(flags, op=dist.ReduceOp.MAX).wait()
    infinite, *of_parameters, pause, least, most = flags.tolist()
    if least != -most:
        raise DriftError(
            "the ranks have applied different gradients of codec 'powersgd', and their weights "
            "have drifted apart since: matrix products and factorisations are rounded "
            "differently by unequal hardware or libraries. Go on from the last checkpoint on "
            "equal hardware, or with a codec that is the same everywhere, such as int4"
        )
    unused = {name for name, any_ in zip(used, of_parameters, strict=True) if not any_}
    return Answer(not infinite, frozenset(unused), bool(pause))


def sum_of_bits(group: CodecGroup, bucket: Tensor) -> Tensor:
    """0-d int64, of the gradients of ``group``."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[bucket.itemsize]
    return torch.stack([part.of(bucket).view(as_int).sum() for part in group.slices]).sum()


Kept: TypeAlias = Mapping[str, Sequence[tuple[Tensor, Tensor]]]
"""By parameter: what this rank keeps of it between steps, and a copy of that."""


def kept_of(
    groups: Sequence[CodecGroup], state: ReducerState, *, of: Collection[str] | None = None
) -> Kept:
    """Copies of the state of the parameters ``of`` these names in ``groups``; None: of all."""
    names = [p.name for group in groups for p in group.slices if of is None or p.name in of]
    return {name: [(held, held.clone()) for held in state.tensors(name)] for name in names}


def put_back(kept: Kept) -> None:
    """Let state be as it was when it was copied."""
    for tensor, value in (pair for pairs in kept.values() for pair in pairs):
        tensor.copy_(value)


def decode_groups(
    groups: Sequence[CodecGroup],
    bucket: Tensor,
    state: ReducerState,
    *,
    scale: Tensor,
    unused: Collection[str],
    pending: PendingCommit | None,
    before: Kept | None = None,
) -> None:
    """Decode ``groups`` into their ``bucket`` and commit state, except that of ``unused`` ones.

    What an unused parameter still owes was sent with the others but DDP will not apply it, so it
    stays owed. Where some gradient of the step was not finite on some rank, no state changes here,
    and ``pending`` is given the new one of all parameters whose mean is finite. The mean of the
    others becomes NaN in every element: what is not finite must not be applied in part, since its
    state stays as if the step had never been. All ranks have the same mean, so they agree.

    Args:
        pending: None where every gradient of every rank was finite, and where units have committed
            their state when they encoded.
        before: they are decoded already, and this is the state of before.
    """
    stateful = [group for group in groups if group.keeps_state or group.owed]
    uncommitted = [] if pending is None else [part for g in stateful for part in g.slices]
    undone = {part.name for part in uncommitted}.union(unused)
    if before is None:
        before = kept_of(groups, state, of=undone)
        decode_all([unit for group in groups for unit in group.units], scale)
    for group in groups if pending is None else ():
        for part in group.slices if group.owed else ():
            # Waits for a GPU, in the one step in which something is owed.
            if part.name not in unused and bool(part.of(bucket).isfinite().all()):
                free_owed(group, state, part.name)
    for group in stateful if pending is not None else ():
        assert pending is not None
        for part in group.slices:
            mean = part.of(bucket)
            if not bool(mean.isfinite().all()):
                mean.fill_(torch.nan)
            elif part.name not in unused:
                paid = partial(free_owed, group, state, part.name)
                pending.add(part.name, state.tensors(part.name), then=paid)
    put_back({name: kept for name, kept in before.items() if name in undone})


class PendingCommit:
    """New state of the finite parameters of a step that was not finite.

    A GradScaler skips the optimizers that have found an inf, a training loop may leave out the
    whole step, or replace what is not finite (``nan_to_num``) and go on. Who does what is known
    when optimizers step. What none has applied by the next synchronised pass is dropped.

    Args:
        names: name of every parameter.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._new: dict[str, list[Callable[[], object]]] = {}
        self._unhook: finalize[Any, Any] | None = None

    def add(self, name: str, held: Sequence[Tensor], *, then: Callable[[], None]) -> None:
        """What ``held`` holds now is the new state of ``name``; the caller then puts back the old.

        On the host: an accelerator may have no memory for another copy of all residuals. ``then``
        is called where that state is committed.
        """
        if self._unhook is None:
            handle = register_optimizer_step_post_hook(untraced(self._stepped))
            self._unhook = finalize(self, handle.remove)
        copies = [partial(tensor.copy_, tensor.to("cpu", copy=True)) for tensor in held]
        self._new[name] = [*copies, then]

    def drop(self) -> None:
        """Commit nothing of what was added so far."""
        self._new.clear()

    def close(self) -> None:
        """Drop everything, and watch optimizers no more."""
        self.drop()
        if self._unhook is not None:
            self._unhook()

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        # A fused optimizer is called in any case, and told by the GradScaler to leave the step out.
        found_inf = getattr(optimizer, "found_inf", None) if self._new else None
        if found_inf is not None and bool(found_inf):
            return
        for group in optimizer.param_groups if self._new else ():
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._names:
                    for commit in self._new.pop(self._names[parameter], ()):
                        commit()


def untraced(hook: Callable[..., None]) -> Any:
    """A method as a hook that torch.compile keeps out of its graphs, as long as its object lives.

    A time that is looked at in a graph is none.
    """
    weak = WeakMethod(hook)  # torch keeps a hook for the life of the process

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return torch.compiler.disable(call)  # type: ignore[no-untyped-call]
