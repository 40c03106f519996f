"""What all ranks agree on before a step's residuals are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.reducer.chunk import Lane, settle_all
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.placing import placed
from lightning_dist.reducer.state import ReducerState


class Verdict:
    """One small allreduce per step: is every rank finite, and which parameters nobody used.

    Issued when the last bucket is encoded, on a group of its own, so that it overtakes the
    payloads; the answer is there long before they are.

    Args:
        finite: 0-d bools of this rank.
        used: whether this rank used a parameter, by name, in an order equal on all ranks; empty
            unless DDP looks for unused parameters.
    """

    def __init__(
        self, finite: Sequence[Tensor], used: Mapping[str, bool], network: Network
    ) -> None:
        self._names = list(used)
        answers = torch.tensor([False, *used.values()], dtype=torch.float32, device="cpu")
        self._flags = placed(answers, network.device)
        if finite:
            self._flags[0] = torch.stack(list(finite)).logical_not().any()
        self._work = network.control.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        self._known = False

    def _wait(self) -> Tensor:
        if not self._known:
            self._work.wait()
            self._known = True
        return self._flags

    def ok(self) -> Tensor:
        """0-d bool on the device: every gradient of every rank is finite."""
        return self._wait()[0] == 0

    def unused(self) -> set[str]:
        """Names of parameters without a gradient on any rank."""
        if not self._names:
            return set()
        flags = self._wait()[1:].tolist()
        return {name for name, used in zip(self._names, flags, strict=True) if not used}


def settle_lane(
    lane: Lane, state: ReducerState, *, scale: Tensor, ok: Tensor, unused: set[str]
) -> None:
    """Decode ``lane`` into its bucket and commit its state, except that of ``unused`` parameters.

    What an unused parameter still owes was sent with the others but DDP will not apply it, so it
    stays owed.
    """
    names = [slot.name for slot in lane.slots if slot.name in unused]
    kept = [part for store in state.stores() for name in names for part in store.parts(name)]
    before = [tensor.clone() for tensor in kept]
    settle_all(lane.chunks, scale, ok)
    for tensor, value in zip(kept, before, strict=True):
        tensor.copy_(value)
