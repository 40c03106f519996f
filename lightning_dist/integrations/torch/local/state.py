"""State of a training in local steps as one object: what the workers share, and each one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.integrations.torch.local.outer_steps import LocalUpdates

NOT_SHARDED = (
    "format='sharded' lets every rank write a part of what all have in common, and the optimizers "
    "of workers in local steps have nothing in common; use format='single'"
)


class WorkerStates:
    """State of all workers, for what saves one object for all ranks.

    A checkpoint of rank 0 alone would have the weights and moments of one worker. 12 bytes per
    parameter and worker with Adam, put together by rank 0.

    Args:
        updates: their outer steps.
        optimizers: of this worker, always in the same order.
    """

    def __init__(self, updates: LocalUpdates, optimizers: Sequence[Optimizer]) -> None:
        self._updates, self._optimizers = updates, optimizers

    def state_dict(self) -> dict[str, Any] | None:
        """State of all workers on rank 0; None elsewhere. Collective, between optimizer steps."""
        network = self._updates.reducer.network
        shared = self._updates.state_dict()
        own = {
            "parameters": _on_cpu(self._updates.worker_weights()),
            "buffers": _on_cpu(self._updates.buffers()),
            "optimizer_states": [each.state_dict() for each in self._optimizers],
        }
        workers = [None] * network.world_size if network.rank == 0 else None
        dist.gather_object(own, workers, group=network.data.group, group_dst=0)
        return None if shared is None else {"shared": shared, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank. Collective.

        With another number of workers those that were there go on where they were, whatever ranks
        they are now; those who join take the anchor, and moments of a worker of before. Those who
        leave take with them what they have not sent. All have the mean residual.

        Raises:
            ValueError: see :meth:`LocalUpdates.load_state_dict`.
        """
        network, workers = self._updates.reducer.network, state["workers"]
        own = workers[network.rank % len(workers)]
        for optimizer, saved in zip(self._optimizers, own["optimizer_states"], strict=True):
            optimizer.load_state_dict(saved)
        self._updates.load_state_dict(state["shared"])
        if network.rank < len(workers):
            self._updates.load_worker(own["parameters"], own["buffers"])
        else:
            self._updates.start_from_anchor()


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().cpu() for name, each in tensors.items()}
