"""End of a step: when residuals are written, means applied, and ranks agree.

Under the immediate update units write their state while they encode. Under the deferred one the
ranks first agree on what became of the step. If it was finite everywhere, all state is written as
it is decoded; else it is a skipped step, and none of it is.

The all-reduce in which they agree is also the vote of a training with recovery: a rank takes part
once it has all payloads, so a rank that has the answer knows that every other rank can apply the
step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.base.accelerator import is_accelerator, placed
from lightning_dist.kernels.passes import compute_dtype
from lightning_dist.ranks.facts import all_facts, differences
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Handle
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState, StateCopy
from lightning_dist.reducer.units.base import CodecGroup, decode_all


class Adjustment(Protocol):
    """Changes the local gradients of ``slices`` in the flat ``bucket``, which carries ``scale``.

    While it is not ``active`` nothing is changed and nothing is compressed.
    """

    @property
    def active(self) -> bool: ...

    def __call__(self, slices: Sequence[ParameterSlice], bucket: Tensor, scale: Tensor) -> None: ...


def clip_group(group: CodecGroup, bucket: Tensor, scale: Tensor, *, world_size: int) -> None:
    """DGC's local clipping: every tensor to a norm of ``clip / sqrt(W)``.

    So that the sum of the ranks' gradients has the norm ``clip`` if they are independent. Per
    tensor, since a bucket knows nothing of the others; a norm that is not finite stays so.
    """
    clip = group.codec.local_clip
    if not clip:
        return
    for part in group.slices:
        gradient = part.of(bucket)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)  # no square overflows
        most = scale * (clip * world_size**-0.5)
        gradient.mul_((most / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0))


def add_residuals(
    group: CodecGroup,
    bucket: Tensor,
    state: ReducerState,
    network: Network,
    scale: Tensor,
    *,
    sharded: bool,
) -> None:
    """Add residuals that the codec of ``group`` does not keep to the gradients, which carry
    ``scale``: they travel with this step, and are freed when it is applied.

    A gradient is averaged over ranks, a residual over rows of ranks. Momentum that the codec still
    applies multiplies what was a sum of momenta already.

    Args:
        sharded: every rank has shards of its own in ``bucket``, and the residuals of those.
    """
    group.residuals_sent = {p.name for p in group.slices if ("residual", p.name) in state.held}
    dtype, device = compute_dtype(bucket.dtype), bucket.device
    for part in [part for part in group.slices if part.name in group.residuals_sent]:
        has_momentum = ("momentum", part.name) in state.held
        momentum = group.codec.momentum_correction if has_momentum else 0.0
        weight = network.world_size / network.rows * (1 - momentum)
        for start, kept in (
            [(0, state.per_rank("residual", part, dtype=dtype, device=device))]
            if sharded
            else state.held["residual", part.name].of_row(first=network.is_first_of_row)
        ):
            gradient = part.of(bucket)[start : start + len(kept)]
            gradient.copy_(torch.add(gradient, kept.to(device) * scale, alpha=weight))


_CHUNK = 1 << 18  # elements that change places at once: a CPU allocates no second bucket for it


class DelayedMeans:
    """Memory in which gradients travel while the means of the step before are applied.

    Local gradients and the last means change places, so that one copy of the gradients is enough.
    Means are known by parameter: DDP rebuilds its buckets after the first backward pass.

    Args:
        first_step: the first one that gets means of another one; None: no step does.
    """

    def __init__(self, first_step: int | None) -> None:
        self._first_step = first_step
        self._memory: dict[int, tuple[Sequence[ParameterSlice], Tensor]] = {}
        self._means: dict[str, Tensor] = {}

    @property
    def active(self) -> bool:
        """Whether any step gets means of another one."""
        return self._first_step is not None

    def swap(self, handle: Handle, *, step: int) -> Handle:
        """Handle to start instead of ``handle``: itself where means are not delayed.

        Else ``handle`` is done with the means of the step before, zeros in the first step, and the
        new one has the local gradients. Everything that was started before must have landed.
        """
        if self._first_step is None or step < self._first_step:
            return handle
        given, slices = handle.given, tuple(handle.slices)
        known = self._memory.get(handle.key)
        if known is not None and known[0] == slices and known[1].dtype == given.dtype:
            memory = known[1]
            chunk = max(len(given), 1) if is_accelerator(given.device) else _CHUNK
            halves = torch.split(given, chunk), torch.split(memory, chunk)
            for mine, last in zip(*halves, strict=True):
                local = mine.clone()
                mine.copy_(last)
                last.copy_(local)
        else:
            memory = given.clone()
            for part in slices:
                mean = self._means.get(part.name)
                part.of(given).zero_() if mean is None else part.of(given).copy_(mean)
                self._means[part.name] = part.of(memory)
            # DDP has rebuilt its buckets: free those that parameters have left.
            moved = {part.name for part in slices}
            self._memory = {
                key: known
                for key, known in self._memory.items()
                if moved.isdisjoint(part.name for part in known[0])
            }
            self._memory[handle.key] = slices, memory
        handle.done.set_result(given)
        return Handle(handle.key, memory, handle.slices, handle.absent)

    def state(self) -> dict[str, Tensor]:
        """The means that wait to be applied, ``{parameter name: (1, numel)}`` on the CPU."""
        return {name: mean.detach().cpu().clone()[None] for name, mean in self._means.items()}

    def load(self, means: Mapping[str, Tensor], *, numel: Mapping[str, int]) -> None:
        """Take over :meth:`state`, for the parameters that ``numel`` has, with their sizes."""
        self.clear()
        for name, mean in means.items() if self.active else ():
            if numel.get(name) == mean.shape[1]:
                self._means[name] = mean[0].clone()

    def clear(self) -> None:
        """Forget all means: the next step begins with zeros."""
        self._memory, self._means = {}, {}

    def to(self, device: torch.device) -> None:
        """Move the means, for instance off an accelerator after a fit."""
        self._memory = {}
        self._means = {name: mean.to(device, copy=True) for name, mean in self._means.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for _, memory in self._memory.values())


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
    """Decode the means of ``handle`` and write state, except that of ``unused`` parameters.

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
