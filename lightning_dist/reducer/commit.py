"""Commit of state: agreement of all ranks, and steps that are not applied.

Under the immediate commit units write their state while they encode. Under the deferred one the
ranks first agree on what became of the step. If it was finite everywhere, all state is committed as
it is decoded; else none of it is.

The all-reduce in which they agree is also the vote of a training that goes on where ranks are lost
(``failures.py``): a rank takes part once it has all payloads, so whoever has the answer knows
that every other rank can commit the step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.accelerator import placed
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units.base import CodecGroup, decode_all


class DriftError(RuntimeError):
    """Ranks have applied different gradients."""


class Answer(NamedTuple):
    """Agreement of the ranks on a step.

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
    """Result of a step.

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
            "The ranks have applied different gradients of codec 'powersgd', and their weights "
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
    finite: bool,
    before: Kept | None = None,
) -> None:
    """Decode ``groups`` into their ``bucket`` and commit state, except that of ``unused`` ones.

    What an unused parameter still owes was sent with the others but DDP will not apply it, so it
    stays owed.

    Args:
        finite: False if some gradient of the step was not finite on some rank. Then no state
            changes, and every parameter that has some gets NaN, so that none is applied: a mean
            holds what was owed, which would be sent again.
        before: they are decoded already, and this is the state of before.
    """
    stateful = [p for g in groups for p in g.slices if g.keeps_state or p.name in g.owed]
    undone = {part.name for part in stateful if not finite or part.name in unused}
    if before is None:
        before = kept_of(groups, state, of=undone)
        decode_all([unit for group in groups for unit in group.units], scale)
    put_back({name: kept for name, kept in before.items() if name in undone})
    for part in () if finite else stateful:
        part.of(bucket).fill_(torch.nan)
    for group in groups if finite else ():
        for part in group.slices if group.owed else ():
            # Waits for a GPU, in the one step in which something is owed.
            sent = part.name in group.owed.difference(unused)
            if sent and bool(part.of(bucket).isfinite().all()):
                state.drop("residual", part.name)


def untraced(hook: Callable[..., None]) -> Any:
    """A method as a hook that torch.compile keeps out of its graphs, as long as its object lives.

    A time that is looked at in a graph is none.
    """
    weak = WeakMethod(hook)  # torch keeps a hook for the life of the process

    def call(*arguments: Any) -> None:
        if (method := weak()) is not None:
            method(*arguments)

    return torch.compiler.disable(call)  # type: ignore[no-untyped-call]
