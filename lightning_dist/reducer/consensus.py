"""What all ranks agree on before a step's residuals are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.reducer.commit import PendingCommit
from lightning_dist.reducer.flush import free_owed
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.placing import placed
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.unit import CodecGroup, decode_all


class FiniteConsensus:
    """One small allreduce per step: is every rank finite, and which parameters nobody used.

    Issued when the last bucket is encoded, on a group of its own, so that it overtakes the
    payloads; the answer is there long before they are.

    Args:
        finite: 0-d bools of this rank.
        used: whether this rank used a parameter, by name, in an order equal on all ranks; empty
            unless DDP looks for unused parameters.
        sums: of bits that all ranks should have in common, 0-d int64; see :func:`sum_of_bits`.
    """

    def __init__(
        self,
        finite: Sequence[Tensor],
        used: Mapping[str, bool],
        sums: Sequence[Tensor],
        network: Network,
    ) -> None:
        self._names, self._compares = list(used), bool(sums)
        answers = torch.tensor([False, *used.values(), 0, 0], dtype=torch.float32, device="cpu")
        self._flags = placed(answers, network.device)
        if finite:
            self._flags[0] = torch.stack(list(finite)).logical_not().any()
        if sums:
            # Numbers that float32 holds; if the largest is the smallest, all are equal.
            self._flags[-1] = torch.stack(list(sums)).sum() % (1 << 24)
            self._flags[-2] = -self._flags[-1]
        self._work = network.control.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        self._known: list[float] = []

    def _wait(self) -> list[float]:
        """All flags, on the host: a GPU is waited for, once."""
        if not self._known:
            self._work.wait()
            self._known = self._flags.tolist()
        return self._known

    def ok(self) -> bool:
        """Whether every gradient of every rank is finite. Waits for a GPU."""
        return self._wait()[0] == 0

    def require_equal(self) -> None:
        """Raise RuntimeError where ranks have given other sums."""
        if not self._compares:
            return
        least, most = self._wait()[-2:]
        if least != -most:
            raise RuntimeError(
                "the ranks have applied different gradients of codec 'powersgd', and their weights "
                "have drifted apart since: matrix products and factorisations are rounded "
                "differently by unequal hardware or libraries. Go on from the last checkpoint on "
                "equal hardware, or with a codec that is the same everywhere, such as int4"
            )

    def unused(self) -> set[str]:
        """Names of parameters without a gradient on any rank."""
        if not self._names:
            return set()
        flags = self._wait()[1:-2]
        return {name for name, used in zip(self._names, flags, strict=True) if not used}


def sum_of_bits(group: CodecGroup, bucket: Tensor) -> Tensor:
    """0-d int64, of the gradients of ``group``."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[bucket.itemsize]
    return torch.stack([part.of(bucket).view(as_int).sum() for part in group.slices]).sum()


def decode_group(
    group: CodecGroup,
    bucket: Tensor,
    state: ReducerState,
    *,
    scale: Tensor,
    unused: set[str],
    pending: PendingCommit | None,
) -> None:
    """Decode ``group`` into its ``bucket`` and commit its state, except that of ``unused`` ones.

    What an unused parameter still owes was sent with the others but DDP will not apply it, so it
    stays owed. Where some gradient of the step was not finite on some rank, no state changes here,
    and ``pending`` is given the new one of all parameters whose mean is finite. The mean of the
    others becomes NaN in every element: what is not finite must not be applied in part, since its
    state stays as if the step had never been. All ranks have the same mean, so they agree.

    Args:
        pending: None where every gradient of every rank was finite.
    """
    stateful = group.keeps_state or bool(group.owed)
    undone = [s for s in group.slices if s.name in unused or (pending and stateful)]
    before = [(t, t.clone()) for part in undone for t in state.tensors(part.name)]
    decode_all(group.units, scale)
    if pending is None:
        for name in [name for name in group.owed if name not in unused]:
            free_owed(group, state, name)
    for part in group.slices if pending is not None and stateful else ():
        assert pending is not None
        mean = part.of(bucket)
        if not bool(mean.isfinite().all()):
            mean.fill_(torch.nan)
        elif part.name not in unused:
            paid = partial(free_owed, group, state, part.name)
            pending.add(part.name, state.tensors(part.name), then=paid)
    for tensor, value in before:
        tensor.copy_(value)
