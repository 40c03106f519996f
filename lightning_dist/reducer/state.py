"""All that a reducer keeps between steps, by parameter name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.codecs.powersgd import PowerSGD, matrix_shape
from lightning_dist.exchange.handshake import all_facts
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.store import Rows, Store, Stripes


class ReducerState:
    """Residuals and momenta, which differ from rank to rank, and factors, equal where they are."""

    def __init__(self) -> None:
        self.residuals, self.momenta = Store(), Store()
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._loaded: dict[str, tuple[Tensor, Tensor]] = {}  # on ranks that may never need them

    def per_rank(
        self, kind: str, part: ParameterSlice, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The flat tensor of ``kind`` for ``part``, zeros the first time."""
        self.know(kind, part, dtype=dtype)
        store = self._store(kind)
        return store.get(part.name, start=part.start, numel=part.numel, dtype=dtype, device=device)

    def know(self, kind: str, part: ParameterSlice, *, dtype: torch.dtype) -> None:
        """There is state of ``kind`` for the parameter of ``part``, here or on another rank."""
        self._store(kind).know(part.name, numel=part.whole, dtype=dtype)

    def adopted(self, kind: str, name: str) -> None:
        """All of ``kind`` that this rank needs for ``name`` was asked for."""
        self._store(kind).adopted(name)

    def tensors(self, name: str) -> list[Tensor]:
        """All that this rank keeps for a parameter, as it works with it."""
        parts = [part for store in (self.residuals, self.momenta) for part in store.parts(name)]
        return [*parts, *self.factors.get(name, ())]

    def keep_for(self, codec: Codec, kinds: Collection[str], name: str) -> None:
        """Free what ``codec``, with memory of ``kinds``, has no use for and what is owed to nobody.

        That is all but the residual, which must be sent first.
        """
        if "momentum" not in kinds:
            self.momenta.drop(name)
        if not codec.keeps_factors:
            self.factors.pop(name, None)
            self._loaded.pop(name, None)

    def _store(self, kind: str) -> Store:
        return {"residual": self.residuals, "momentum": self.momenta}[kind]

    def low_rank(
        self, codec: PowerSGD, part: ParameterSlice, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Left ``(n, r)`` and right ``(m, r)`` factor; new ones where the rank has changed."""
        found = self.factors.get(part.name, self._loaded.pop(part.name, None))
        wanted = [(rows, codec.rank) for rows in matrix_shape(part.shape)]
        if found is None or [tuple(factor.shape) for factor in found] != wanted:
            found = codec.first_factors(part.name, part.shape, dtype)
        # The rounding of a matrix product depends on the layout, which a checkpoint does not keep.
        left, right = (factor.to(device=device, dtype=dtype).contiguous() for factor in found)
        self.factors[part.name] = left, right
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
        self._loaded = {name: pair for name, pair in self._loaded.items() if name in numel}

    def to(self, device: torch.device) -> None:
        """Move everything, for instance off an accelerator after a fit."""
        self.residuals.to(device)
        self.momenta.to(device)
        self.factors = {
            name: (left.to(device), right.to(device))
            for name, (left, right) in self.factors.items()
        }

    def gather(
        self, group: dist.ProcessGroup, rows: Rows, *, device: torch.device
    ) -> dict[str, Any] | None:
        """The state of all ranks on the CPU of rank 0 of ``group``; None elsewhere. Collective."""
        residuals = self.residuals.gather(group, rows, device=device)
        momenta = self.momenta.gather(group, rows, device=device)
        factors = self._factors_of_all(group, device=device)
        return None if residuals is None else _state(residuals, momenta, factors)

    def know_all(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        """Know the names of all ranks: some have no element of a parameter. Collective."""
        for store in (self.residuals, self.momenta):
            of_ranks = all_facts(store.sizes(), group=group, device=device)
            for sizes in of_ranks:
                for name, (numel, double) in sizes.items():
                    if name not in store:
                        dtype = torch.float64 if double else torch.float32
                        store.know(name, numel=numel, dtype=dtype)

    def striped(
        self, group: dist.ProcessGroup, rows: Rows, *, device: torch.device
    ) -> tuple[dict[str, Any], list[Stripes]]:
        """As :meth:`gather`, on every rank, with residuals and momenta left where they are.

        Only factors are communicated. The stripes say what the tensors of the state stand for.
        """
        residuals, momenta = self.residuals.striped(rows), self.momenta.striped(rows)
        factors = self._factors_of_all(group, device=device)
        state = _state(
            {name: stripes.whole for name, stripes in residuals.items()},
            {name: stripes.whole for name, stripes in momenta.items()},
            factors,
        )
        return state, [*residuals.values(), *momenta.values()]

    def load(self, gathered: Mapping[str, Any], rows: Rows) -> None:
        """Take over what :meth:`gather` returned, in place of everything held now."""
        self.residuals.load(gathered.get("residuals", {}), rows)
        self.momenta.load(gathered.get("momenta", {}), rows)
        self.factors = {}
        self._loaded = {
            name: (left.clone(), right.clone())
            for name, (left, right) in gathered.get("factors", {}).items()
        }

    def average(self, group: dist.ProcessGroup, rows: Rows, *, device: torch.device) -> None:
        """Go on from the mean over the rows that the ranks of ``group`` hold. Collective.

        Args:
            rows: of before, in which ranks that are gone may have had a part.
        """
        of_ranks = [
            facts["row"] for facts in all_facts({"row": rows.own}, group=group, device=device)
        ]
        first = of_ranks.index(rows.own) == group.rank()
        for store in (self.residuals, self.momenta):
            store.average(group, count=len(set(of_ranks)), first=first, device=device)
        factors = self._factors_of_all(group, device=device, on_all=True)
        self.factors, self._loaded = (
            {},
            {name: (pair[0], pair[1]) for name, pair in factors.items()},
        )

    def _factors_of_all(
        self, group: dist.ProcessGroup, *, device: torch.device, on_all: bool = False
    ) -> dict[str, list[Tensor]]:
        """Factors of every matrix, on rank 0 or on all ranks.

        On a host with several ranks only the owner of a matrix works with them.
        """
        held = self._loaded | self.factors
        own = {
            name: [[*left.shape], [*right.shape], left.dtype == torch.float64, name in self.factors]
            for name, (left, right) in held.items()
        }
        of_ranks = all_facts(own, group=group, device=device)
        found = {}
        for name in sorted({name for of_rank in of_ranks for name in of_rank}):
            holders = [rank for rank, of_rank in enumerate(of_ranks) if name in of_rank]
            holder = next((r for r in holders if of_ranks[r][name][-1]), holders[0])
            *sizes, double, _ = of_ranks[holder][name]
            dtype = torch.float64 if double else torch.float32
            pair = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
            if group.rank() == holder:
                for factor, mine in zip(pair, held[name], strict=True):
                    factor.copy_(mine)
            for factor in pair if holder or on_all else ():
                dist.broadcast(factor, group_src=holder, group=group)
            found[name] = [factor.cpu() for factor in pair]
        return found


def _state(residuals: Any, momenta: Any, factors: Any) -> dict[str, Any]:
    optional = {"momenta": momenta, "factors": factors}
    return {"residuals": residuals, **{key: value for key, value in optional.items() if value}}
