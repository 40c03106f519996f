"""What all ranks agree on before a step's residuals are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.reducer.chunk import Lane
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.residuals import Residuals


class Verdict:
    """One small allreduce per step: is every rank finite, and which parameters nobody used.

    Issued when the last bucket is encoded, on a group of its own, so that it overtakes the
    payloads; the answer is there long before they are.

    Args:
        finite: 0-d bools of this rank.
        local: (gradient, slot) of every parameter to ask about, in an order equal on all ranks;
            empty unless DDP looks for unused parameters. DDP fills the gradient of an unused one
            with zeros.
    """

    def __init__(
        self, finite: Sequence[Tensor], local: Sequence[tuple[Tensor, Slot]], network: Network
    ) -> None:
        self._slots = [slot for _, slot in local]
        broken = torch.stack(list(finite)).logical_not().any()
        used = [gradient.any() for gradient, _ in local]
        self._flags = torch.stack([broken, *used]).to(network.device, torch.float32)
        self._work = dist.all_reduce(
            self._flags, op=dist.ReduceOp.MAX, group=network.control, async_op=True
        )
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
        if not self._slots:
            return set()
        flags = self._wait()[1:].tolist()
        return {slot.name for slot, used in zip(self._slots, flags, strict=True) if not used}


def settle_lane(
    lane: Lane,
    bucket: Tensor,
    residuals: Residuals,
    *,
    scale: Tensor,
    ok: Tensor,
    rank: int,
    unused: set[str],
) -> None:
    """Decode ``lane`` into ``bucket`` and commit its residuals, except those of ``unused``.

    What an unused parameter still owes was sent with the others but DDP will not apply it, so it
    stays owed, and the parameter's gradient stays zero as in DDP.
    """
    untouched = [slot for slot in lane.slots if lane.keeps_residual and slot.name in unused]
    owed = {slot.name: residuals[slot.name].clone() for slot in untouched}
    for chunk in lane.chunks:
        chunk.settle(scale, ok, rank)
    for slot in untouched:
        residuals[slot.name].copy_(owed[slot.name])
        bucket[slot.offset : slot.offset + slot.numel].zero_()
