"""What a rank keeps per parameter: across buckets, checkpoints, world sizes and host layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STATE_VERSION = 1


@dataclass(frozen=True)
class Rows:
    """Who holds a row of the gathered state: a rank, or the ranks of a host together.

    The mean over the rows is what is owed to the model, whatever they are.
    """

    row_of: tuple[int, ...]  # of every rank
    rank: int

    @property
    def count(self) -> int:
        return max(self.row_of) + 1

    @property
    def own(self) -> int:
        return self.row_of[self.rank]

    @property
    def first(self) -> bool:
        """Whether this rank is the first of its row."""
        return self.row_of.index(self.own) == self.rank


@dataclass(frozen=True)
class Stripes:
    """A tensor of the gathered state whose parts are still on their ranks.

    ``whole``, of shape (rows, numel), is memory that nobody has filled. ``own`` are this rank's
    parts, with the element of ``whole`` at which each starts; what no rank has is zero.
    """

    whole: Tensor
    own: tuple[tuple[int, Tensor], ...]


class Store:
    """One kind of state (residuals, momenta) by parameter name: flat, unscaled.

    A rank holds all of a parameter, or the parts of it that it is responsible for on its host, by
    where they start. What was loaded waits as a whole until it is asked for part by part.
    """

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._whole: dict[str, tuple[int, torch.dtype]] = {}  # elements and dtype of the parameter
        self._loaded: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        return [*self._parts, *(name for name in self._loaded if name not in self._parts)]

    def sizes(self) -> dict[str, tuple[int, bool]]:
        """Elements of every parameter that has state, and whether they are float64."""
        known = {name: (tensor.numel(), tensor.dtype) for name, tensor in self._loaded.items()}
        return {
            n: (numel, dtype == torch.float64)
            for n, (numel, dtype) in (known | self._whole).items()
        }

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._loaded

    def __getitem__(self, name: str) -> Tensor:
        """What this rank holds of ``name``, flat: itself if it is one part, else a copy."""
        parts = self.parts(name)
        if not parts:
            return self._loaded.get(name, torch.empty(0))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self, name: str) -> list[Tensor]:
        """What this rank works with, in the order of the parameter."""
        return [part for _, part in sorted(self._parts.get(name, {}).items())]

    def know(self, name: str, *, numel: int, dtype: torch.dtype) -> None:
        """There is state of ``name``, a parameter of ``numel`` elements, if not on this rank.

        Raises:
            ValueError: what was loaded has another number of elements.
        """
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.numel() != numel:
            raise ValueError(
                f"the stored residual of {name!r} has {loaded.numel()} elements, the parameter "
                f"{numel}; this state belongs to another model"
            )
        self._whole[name] = numel, dtype
        self._parts.setdefault(name, {})

    def get(
        self, name: str, *, start: int, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Elements ``start`` to ``start + numel`` of a known parameter; zeros the first time."""
        parts = self._parts[name]
        found = parts.get(start)
        if found is None and name in self._loaded:
            found = self._loaded[name][start : start + numel].clone()
        if found is None:
            found = torch.zeros(numel, dtype=dtype, device=device)
        assert found.numel() == numel, "a parameter is cut in one way only"
        parts[start] = found.to(device=device, dtype=dtype)
        return parts[start]

    def adopted(self, name: str) -> None:
        """All that this rank needs of ``name`` was asked for."""
        self._loaded.pop(name, None)

    def drop(self, name: str) -> None:
        """Forget ``name``, here; for all ranks at once."""
        for held in (self._parts, self._whole, self._loaded):
            held.pop(name, None)

    def of_row(self, name: str, rows: Rows) -> list[tuple[int, Tensor]]:
        """``(start, part)`` of what this rank contributes to its row; ranks do not overlap."""
        loaded = self._loaded.get(name)
        if loaded is None:
            return sorted(self._parts[name].items())
        return [(0, loaded)] if rows.first else []

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._parts.values() for part in parts.values())

    def keep_only(self, numel: Mapping[str, int]) -> None:
        """Forget the state of parameters that are not in ``numel`` or have another size."""
        self._whole = {n: whole for n, whole in self._whole.items() if numel.get(n) == whole[0]}
        self._parts = {name: self._parts[name] for name in self._whole}
        self._loaded = {n: r for n, r in self._loaded.items() if numel.get(n) == r.numel()}

    def to(self, device: torch.device) -> None:
        """Move everything, for instance off an accelerator after a fit."""
        for parts in self._parts.values():
            for start, part in parts.items():
                parts[start] = part.to(device)

    def gather(
        self, group: dist.ProcessGroup, rows: Rows, *, device: torch.device
    ) -> dict[str, Tensor] | None:
        """``{name: (rows, numel)}`` on the CPU of rank 0 of ``group``; None elsewhere.

        Collective, one parameter at a time over ``device``. Call it between backward passes.
        """
        first = group.rank() == 0
        gathered = {}
        for name in sorted(self.names()):
            mine = self._whole_row(name, first=rows.first).to(device)
            of_ranks = [torch.empty_like(mine) for _ in range(group.size())] if first else None
            dist.gather(mine, of_ranks, group=group, group_dst=0)
            if of_ranks is not None:
                gathered[name] = _added([part.cpu() for part in of_ranks], rows)
        return gathered if first else None

    def average(
        self, group: dist.ProcessGroup, *, count: int, first: bool, device: torch.device
    ) -> None:
        """Go on from the mean of ``count`` rows, of which this rank has a part. Collective.

        Args:
            first: whether it is the first of its row: what was loaded is the same on all of them.
        """
        loaded = {}
        for name in sorted(self.names()):
            mine = self._whole_row(name, first=first).to(device, copy=True)
            dist.all_reduce(mine, group=group)
            loaded[name] = mine.div_(count).cpu()
        self._parts, self._whole, self._loaded = {}, {}, loaded

    def striped(self, rows: Rows) -> dict[str, Stripes]:
        """What :meth:`gather` returns, left where it is. On every rank, without communication."""
        return {name: self._stripes(name, rows) for name in sorted(self.names())}

    def _stripes(self, name: str, rows: Rows) -> Stripes:
        loaded = self._loaded.get(name)
        numel, dtype = self._whole[name] if loaded is None else (loaded.numel(), loaded.dtype)
        begin = rows.own * numel
        own = tuple((begin + start, part) for start, part in self.of_row(name, rows))
        return Stripes(torch.empty(rows.count, numel, dtype=dtype), own)

    def load(self, gathered: Mapping[str, Tensor], rows: Rows) -> None:
        """Take over what :meth:`gather` returned, in place of everything held now.

        With the same number of rows each gets its own back. Otherwise each gets the mean: what is
        still owed to the model is the mean over rows, and the mean of equal rows is that.
        """
        self._parts, self._whole = {}, {}
        self._loaded = {
            name: (found[rows.own] if len(found) == rows.count else found.mean(0)).clone()
            for name, found in gathered.items()
        }

    def _whole_row(self, name: str, *, first: bool) -> Tensor:
        """This rank's part of its row, zeros where others of the row hold it."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded if first else torch.zeros_like(loaded)
        numel, dtype = self._whole[name]
        parts = self._parts[name]
        if len(parts.get(0, ())) == numel:
            return parts[0]
        row = torch.zeros(numel, dtype=dtype)
        for start, part in parts.items():
            row[start : start + len(part)] = part
        return row


def _added(of_ranks: Sequence[Tensor], rows: Rows) -> Tensor:
    """Parts of the same row do not overlap, so nothing is rounded."""
    if rows.count == len(of_ranks):
        return torch.stack(list(of_ranks))
    whole = torch.zeros(rows.count, *of_ranks[0].shape, dtype=of_ranks[0].dtype)
    for row, part in zip(rows.row_of, of_ranks, strict=True):
        whole[row] += part
    return whole


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``state`` is a state this version can read."""
    version = state.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"the compression state must be of version {STATE_VERSION}, got {version!r}; it was "
            "written by another version of lightning_dist: resume with that one, or start without"
        )
