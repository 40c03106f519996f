"""All that a reducer keeps between steps, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.codecs.powersgd import PowerSGD, matrix_shape
from lightning_dist.reducer.policy import Slot
from lightning_dist.reducer.residuals import Residuals


class ReducerState:
    """Residuals and momenta, which differ from rank to rank, and factors, equal on all of them."""

    def __init__(self) -> None:
        self.residuals, self.momenta = Residuals(), Residuals()
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}

    def per_rank(
        self, kind: str, slot: Slot, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The flat tensor of ``kind`` ("residual" or "momentum"), zeros the first time."""
        store = {"residual": self.residuals, "momentum": self.momenta}[kind]
        return store.get(slot.name, numel=slot.numel, dtype=dtype, device=device)

    def low_rank(
        self, codec: PowerSGD, slot: Slot, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Left ``(n, r)`` and right ``(m, r)`` factor; new ones where the rank has changed."""
        found = self.factors.get(slot.name)
        wanted = [(rows, codec.rank) for rows in matrix_shape(slot.shape)]
        if found is None or [tuple(factor.shape) for factor in found] != wanted:
            found = codec.first_factors(slot.name, slot.shape, dtype)
        left, right = (factor.to(device=device, dtype=dtype) for factor in found)
        self.factors[slot.name] = left, right
        return left, right

    @property
    def nbytes(self) -> int:
        factors = sum(left.nbytes + right.nbytes for left, right in self.factors.values())
        return self.residuals.nbytes + self.momenta.nbytes + factors

    def keep_only(self, numel: Mapping[str, int]) -> None:
        """Forget the state of parameters that are not in ``numel`` or have another size."""
        self.residuals.keep_only(numel)
        self.momenta.keep_only(numel)
        self.factors = {name: pair for name, pair in self.factors.items() if name in numel}

    def to(self, device: torch.device) -> None:
        """Move everything, for instance off an accelerator after a fit."""
        self.residuals.to(device)
        self.momenta.to(device)
        self.factors = {
            name: (left.to(device), right.to(device))
            for name, (left, right) in self.factors.items()
        }

    def gather(self, group: dist.ProcessGroup, *, device: torch.device) -> dict[str, Any] | None:
        """The state of all ranks on the CPU of rank 0 of ``group``; None elsewhere. Collective."""
        residuals = self.residuals.gather(group, device=device)
        momenta = self.momenta.gather(group, device=device)
        if residuals is None:
            return None
        factors = {
            name: [factor.cpu().clone() for factor in pair] for name, pair in self.factors.items()
        }
        optional = {"momenta": momenta, "factors": factors}
        return {"residuals": residuals, **{key: value for key, value in optional.items() if value}}

    def load(self, gathered: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Take over what :meth:`gather` returned, in place of everything held now."""
        self.residuals.load(gathered.get("residuals", {}), rank=rank, world_size=world_size)
        self.momenta.load(gathered.get("momenta", {}), rank=rank, world_size=world_size)
        self.factors = {
            name: (left.clone(), right.clone())
            for name, (left, right) in gathered.get("factors", {}).items()
        }
