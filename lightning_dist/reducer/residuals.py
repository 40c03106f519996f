"""What the codecs lost so far, per parameter: kept across buckets, checkpoints and world sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STATE_VERSION = 1


class Residuals:
    """Residual of every compressed parameter, keyed by parameter name; flat, unscaled.

    The residual of a rank is what its own payloads did not say: ``sum of inputs - sum of its own
    decoded payloads``. It is bounded, unlike ``input - mean of all``, which walks randomly.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._flat)

    def names(self) -> list[str]:
        return list(self._flat)

    def __contains__(self, name: object) -> bool:
        return name in self._flat

    def __getitem__(self, name: str) -> Tensor:
        return self._flat[name]

    def get(self, name: str, *, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The residual of ``name``, zeros ``(numel,)`` the first time."""
        found = self._flat.get(name)
        if found is None:
            found = torch.zeros(numel, dtype=dtype, device=device)
        elif found.numel() != numel:
            raise ValueError(
                f"the stored residual of {name!r} has {found.numel()} elements, the parameter "
                f"{numel}; this state belongs to another model"
            )
        self._flat[name] = found.to(device=device, dtype=dtype)
        return self._flat[name]

    @property
    def nbytes(self) -> int:
        return sum(residual.nbytes for residual in self._flat.values())

    def keep_only(self, numel: Mapping[str, int]) -> None:
        """Forget the residuals of parameters that are not in ``numel`` or have another size."""
        self._flat = {n: r for n, r in self._flat.items() if numel.get(n) == r.numel()}

    def to(self, device: torch.device) -> None:
        """Move all residuals, for instance off an accelerator after a fit."""
        self._flat = {name: residual.to(device) for name, residual in self._flat.items()}

    def gather(self, group: dist.ProcessGroup, *, device: torch.device) -> dict[str, Tensor] | None:
        """All ranks' residuals ``{name: (W, numel)}`` on the CPU of rank 0 of ``group``; else None.

        Collective, one parameter at a time over ``device``. Call it between backward passes.
        """
        first = group.rank() == 0
        gathered = {}
        for name in sorted(self._flat):
            mine = self._flat[name].to(device)
            rows = [torch.empty_like(mine) for _ in range(group.size())] if first else None
            dist.gather(mine, rows, group=group, group_dst=0)
            if rows is not None:
                gathered[name] = torch.stack([row.cpu() for row in rows])
        return gathered if first else None

    def load(self, gathered: Mapping[str, Tensor], *, rank: int, world_size: int) -> None:
        """Take over what :meth:`gather` returned, in place of everything held now.

        With the same world size every rank gets its own back. Otherwise every rank gets the mean:
        what is still owed to the model is the mean over ranks, and the mean of equal rows is that.
        """
        self._flat = {
            name: (rows[rank] if len(rows) == world_size else rows.mean(0)).clone()
            for name, rows in gathered.items()
        }


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state`` is a state this version can read."""
    version = state.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"the compression state must be of version {STATE_VERSION}, got {version!r}; it was "
            "written by another version of lightning_dist: resume with that one, or start without"
        )
