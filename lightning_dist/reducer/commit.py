"""Commit of state: agreement of all ranks, and steps that are not applied.

Under the immediate commit units write their state while they encode. Under the deferred one the
ranks first agree on what became of the step. If it was finite everywhere, all state is committed as
it is decoded; else none of it is.

The all-reduce in which they agree is also the vote of a training with recovery: a rank takes part
once it has all payloads, so a rank that has the answer knows that every other rank can commit the
step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.base.accelerator import placed
from lightning_dist.ranks.facts import all_facts, differences
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.plans import Handle
from lightning_dist.reducer.state import ReducerState, StateCopy
from lightning_dist.reducer.units.base import CodecGroup, decode_all


class DriftError(RuntimeError):
    """Ranks have applied different gradients, or in different ways."""


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


class Recovery(Protocol):
    """Decision on a step whose exchange fails; called on the executor's thread."""

    def pauses(self) -> bool:
        """Whether this rank wants all ranks to stop after this step. Must be quick."""

    def failed(self, error: RuntimeError) -> None:
        """The exchange has failed, for the first time in these groups. Must be quick."""

    def vote_result(self) -> bool | None:
        """Result of a vote whose all-reduce has failed on this rank: whether the step was finite.

        None: no rank has received it, and the step is given up. May wait for the other ranks.
        """


def agree(
    finite: Sequence[Tensor],
    used: Mapping[str, bool],
    sums: Sequence[Tensor],
    network: Network,
    *,
    pauses: bool = False,
    meanwhile: Callable[[], None] | None = None,
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
        meanwhile: called while the flags travel.

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
    work = network.control.all_reduce(flags, op=dist.ReduceOp.MAX)
    if meanwhile is not None:
        meanwhile()
    work.wait()
    infinite, *of_parameters, pause, least, most = flags.tolist()
    if least != -most:
        raise DriftError(
            "The ranks have applied different gradients of codec 'powersgd', and their weights "
            "have drifted apart since: matrix products and factorisations are rounded differently "
            "by unequal hardware or libraries. Resume from the last checkpoint on equal hardware, "
            "or with a codec that is the same everywhere, such as int4"
        )
    unused = {name for name, any_ in zip(used, of_parameters, strict=True) if not any_}
    return Answer(not infinite, frozenset(unused), bool(pause))


def require_equal_hyperparameters(own: Mapping[str, str], network: Network) -> None:
    """Raise DriftError if ranks step with other hyperparameters. Collective.

    Args:
        own: by name; a rank that has just joined knows of none so far.
    """
    group, limit = network.control.group, network.limit
    facts = all_facts(own, group=group, device=network.device, limit=limit)
    known = {name: value for fact in facts for name, value in fact.items()}
    if lines := differences([{**known, **fact} for fact in facts]):
        raise DriftError(
            "All ranks must step with the same hyperparameters, and they differ in\n"
            + "\n".join(lines)
            + "\nso replicas have drifted apart. Choose them on one rank and broadcast them, or "
            "seed every rank alike, and resume from a checkpoint of before"
        )


def sum_of_bits(group: CodecGroup, bucket: Tensor) -> Tensor:
    """0-d int64, of the gradients of ``group``."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[bucket.itemsize]
    return torch.stack([part.of(bucket).view(as_int).sum() for part in group.slices]).sum()


def decode(
    handle: Handle,
    state: ReducerState,
    scale: Tensor,
    *,
    unused: Collection[str],
    finite: bool,
    before: StateCopy | None = None,
) -> None:
    """Decode the means of ``handle`` and commit state, except that of ``unused`` parameters.

    The residual of an unused parameter was sent with the others but DDP will not apply it, so it
    is kept.

    Args:
        finite: False if some gradient of the step was not finite on some rank. Then no state
            changes, and every parameter that has some gets NaN, so that none is applied: a mean
            holds residuals, which would be sent again.
        before: they are decoded already, and this is the state before that.
    """
    groups, flat = handle.groups, handle.flat
    stateful = [p for g in groups for p in g.slices if g.keeps_state or p.name in g.residuals_sent]
    undone = [part.name for part in stateful if not finite or part.name in unused]
    if before is None:
        before = StateCopy(state, undone)
        before.take()
        decode_all(handle.units(), scale)
    before.restore(undone)
    sent = {name for group in groups for name in group.residuals_sent}.difference(unused)
    for part in stateful:
        if not finite:
            part.of(flat).fill_(torch.nan)
        # Waits for a GPU, in the one step that sends residuals.
        elif part.name in sent and bool(part.of(flat).isfinite().all()):
            state.drop("residual", part.name)
