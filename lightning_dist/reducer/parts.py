"""State of one kind for one parameter, of which ranks may hold parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Held:
    """State of one kind for a parameter, flat and unscaled.

    A rank holds all of it, or the ``parts`` that it is responsible for on its node, by where they
    start. What was ``loaded`` waits until it is asked for part by part: all of it, the same on the
    ranks of a node, or if there is a ``start`` what this rank alone is responsible for.
    """

    numel: int  # of the parameter
    dtype: torch.dtype
    parts: dict[int, Tensor] = field(default_factory=dict)
    loaded: Tensor | None = None
    start: int | None = None

    @classmethod
    def from_row(cls, row: Tensor) -> Held:
        return cls(row.numel(), row.dtype, loaded=row)

    @property
    def dtype_of_row(self) -> torch.dtype:
        return self.dtype if self.loaded is None else self.loaded.dtype

    def in_order(self) -> list[tuple[int, Tensor]]:
        """Parts that this rank works with, in the order of the parameter."""
        return sorted(self.parts.items())

    def flat(self) -> Tensor:
        """All that this rank holds: itself if it is one part, else a copy."""
        parts = [part for _, part in self.in_order()]
        if not parts:
            return torch.empty(0) if self.loaded is None else self.loaded
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of_row(self, *, first: bool) -> list[tuple[int, Tensor]]:
        """``(start, part)`` of what this rank contributes to its row; ranks do not overlap.

        Args:
            first: whether it is the first of its row: what was loaded is the same on all of them.
        """
        if self.loaded is None:
            return self.in_order()
        if self.start is not None:
            return [(self.start, self.loaded)] if self.loaded.numel() else []
        return [(0, self.loaded)] if first else []

    def row(self, *, first: bool) -> Tensor:
        """The same as a whole row, zeros where other ranks of the row hold it."""
        parts = self.of_row(first=first)
        if len(parts) == 1 and parts[0][1].numel() == self.numel:
            return parts[0][1]
        row = torch.zeros(self.numel, dtype=self.dtype_of_row)
        for start, part in parts:
            row[start : start + len(part)] = part
        return row
