"""How far a loop has come, and where its random generators go on."""

from __future__ import annotations

from typing import Any

import torch

from lightning_dist.elastic import rng
from lightning_dist.elastic.plan import Position
from lightning_dist.elastic.seeds import derive_seed
from lightning_dist.elastic.state import ElasticState


class Progress:
    """Counts steps and samples.

    Args:
        resumed: what the checkpoint said; None for a fresh start.
        rank: this one.
        world_size: ranks.
        device: of the model, whose generator is kept too.
    """

    def __init__(
        self,
        resumed: ElasticState | None,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.resumed = resumed
        self.device = device
        self.position = Position() if resumed is None else resumed.position
        self.samples = 0 if resumed is None else resumed.total_samples
        self.steps = 0 if resumed is None else resumed.total_steps
        self._before_epoch = self.samples - self.position.samples
        self._rng: dict[str, Any] | None = None
        if resumed is not None:
            seed = derive_seed(resumed.seed, "rng", resumed.total_steps, rank)
            same = len(resumed.rng) == world_size
            self._rng = resumed.rng[rank] if same else {"seed": seed}

    def step(self, position: Position) -> None:
        """The optimizer has stepped, and ``position`` is reached."""
        self.position = position
        self.samples = self._before_epoch + position.samples
        self.steps += 1

    def end_epoch(self, epoch: int) -> None:
        """``epoch`` is over, with what the user does after its batches."""
        self.position, self._before_epoch = Position(epoch + 1), self.samples

    def capture_rng(self) -> dict[str, Any]:
        """The generators of this rank."""
        return rng.capture(self.device)

    def restore_rng(self) -> None:
        """Once, where the generators were saved: before anything draws from them."""
        state, self._rng = self._rng, None
        if state is not None and "seed" in state:
            rng.seed_all(state["seed"], self.device)
        elif state is not None:
            rng.restore(state, self.device)
