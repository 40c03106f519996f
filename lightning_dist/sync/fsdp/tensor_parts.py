"""State of parameters that tensor parallelism splits, as that of whole ones: any mesh loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_dist.base.log import get_logger
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.facts import Spread, gather

log = get_logger(__name__)

ROWS = ("residuals", "momenta")
"""Kinds of state with a row per replica, ``{parameter name: (replicas, elements)}``."""


def of_this_kind(
    state: Mapping[str, Any] | None, *, key: str, says: bool
) -> Mapping[str, Any] | None:
    """``state`` if it has ``key``; None, with a warning, if a model was compressed otherwise."""
    if state is None or key in state:
        return state
    if says:
        log.warning(
            "The checkpoint is of a run that was compressed in the other way, between "
            "replicas or, with parameters=, over all ranks: residuals are dropped"
        )
    return None


@dataclass(frozen=True)
class TensorPart:
    """Elements of a parameter that one tensor-parallel rank has, before FSDP shards them.

    In the flat parameter they are ``count`` runs of ``length`` elements, ``stride`` apart, from
    ``offset`` on.
    """

    count: int
    length: int
    stride: int
    offset: int = 0
    is_copy: bool = False
    """A rank with a lower number has the same elements, and saves them."""

    @classmethod
    def of(cls, parameter: Tensor, *, rank: int, ranks: int) -> TensorPart:
        """The part of ``parameter`` that the ``rank``-th of ``ranks`` has."""
        shape = parameter.shape
        split = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2
        placement: Any = parameter.placements[1] if split else None  # type: ignore[attr-defined]
        if placement is None or not placement.is_shard():
            return cls(1, prod(shape), prod(shape), is_copy=rank > 0)
        size, inner = shape[placement.dim], prod(shape[placement.dim + 1 :])
        chunk = -(-size // ranks)
        begin, end = (min(number * chunk, size) for number in (rank, rank + 1))
        count = prod(shape[: placement.dim])
        return cls(count, (end - begin) * inner, size * inner, begin * inner)

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return self.count * self.length

    @property
    def whole(self) -> int:
        """Elements of the parameter."""
        return self.count * self.stride

    def of_rows(self, rows: Tensor) -> Tensor:
        """The view ``(R, count, length)`` of ``rows (R, whole)``."""
        cut = rows.view(len(rows), self.count, self.stride)
        return cut[:, :, self.offset : self.offset + self.length]

    def runs(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Elements ``start .. start + numel`` of the part, run by run.

        Each is an element of the parameter, where that is after ``start``, and how many follow.
        """
        done = 0
        while done < numel:
            number, within = divmod(start + done, self.length)
            count = min(self.length - within, numel - done)
            yield self.offset + number * self.stride + within, done, count
            done += count


class TensorParts:
    """The parts of a model's parameters on the ranks of a tensor-parallel group.

    State of whole parameters has factors by the element that their matrix starts at.

    Args:
        parameters: by name.
        own: elements ``(start, numel)`` of the part that this rank works with.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], own: Mapping[str, tuple[int, int]]
    ) -> None:
        self._parameters, self._own = parameters, own
        meshes = [
            parameter.device_mesh
            for parameter in parameters.values()
            if isinstance(parameter, DTensor)
        ]
        mesh: DeviceMesh | None = next((mesh for mesh in meshes if mesh.ndim == 2), None)
        self._group = None if mesh is None or mesh.size(1) == 1 else mesh.get_group(1)

    def part(self, name: str, *, numel: int = 0, rank: int | None = None) -> TensorPart:
        """Part of the parameter ``name``, or of one of ``numel`` elements that the model has not.

        Args:
            rank: whose; None: that of this rank.
        """
        number, ranks = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        rank = number if rank is None else rank
        if name not in self._parameters:
            return TensorPart(1, numel, numel, is_copy=rank > 0)
        return TensorPart.of(self._parameters[name], rank=rank, ranks=ranks)

    def gathered(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """State of whole parameters on the first rank of all, from that of parts. Collective."""
        if self._group is None or state is None:
            return state
        rows = [rows for _, _, rows in _rows_of(state)]
        parts = [
            Spread(tensor, ((0, tensor.view(-1)),) if tensor.numel() else ()) for tensor in rows
        ]
        whole, spreads = self.spread(state, parts, place="meta" if self._group.rank() else "cpu")
        device = next(iter(self._parameters.values())).device
        gather(spreads, Channel(self._group), device=device)
        return whole if self._group.rank() == 0 else None

    def spread(
        self, state: dict[str, Any], spreads: Sequence[Spread], *, place: str = "cpu"
    ) -> tuple[dict[str, Any], list[Spread]]:
        """As :meth:`gathered`, on every rank, with rows left where they are. Collective."""
        if self._group is None:
            return state, [*spreads]
        held = {(kind, name): rows for kind, name, rows in _rows_of(state)}
        parts_of = {id(spread.whole): spread.own for spread in spreads}
        wholes = {
            key: (len(rows), self.part(key[1], numel=rows.shape[1]).whole, rows.dtype)
            for key, rows in held.items()
        }
        of_all: list[Any] = [None] * self._group.size()
        dist.all_gather_object(of_all, wholes, group=self._group)
        wholes |= {key: about for of_rank in of_all for key, about in of_rank.items()}
        states: list[Any] | None = [None] * self._group.size() if self._group.rank() == 0 else None
        own_factors = {"factors": state.get("factors", {})}
        dist.gather_object(own_factors, states, group=self._group, group_dst=0)
        whole_state = {**state, **({} if states is None else self._factors_of(states))}
        whole_state |= {kind: {} for kind in ROWS if kind in state}
        whole_spreads = []
        for (kind, name), (count, numel, dtype) in sorted(wholes.items()):
            whole = torch.empty(count, numel, dtype=dtype, device=place)
            whole_state.setdefault(kind, {})[name] = whole
            part, rows = self.part(name, numel=numel), held.get((kind, name))
            runs: list[tuple[int, Tensor]] = []
            for begin, flat in () if rows is None or part.is_copy else parts_of[id(rows)]:
                row, start = divmod(begin, part.numel)
                runs += (
                    (row * numel + to, flat[at : at + length])
                    for to, at, length in part.runs(start, flat.numel())
                )
            whole_spreads.append(Spread(whole, tuple(runs)))
        return whole_state, whole_spreads

    def cut(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """State of this rank's parts, from that of whole parameters; what it has is cut."""
        if self._group is None or state is None:
            return state
        cut_state = {
            **state,
            **{kind: {**state[kind]} for kind in ROWS if kind in state},
            "factors": {},
        }
        for kind, name, rows in _rows_of(state):
            part = self.part(name, numel=rows.shape[1])
            if part.whole == rows.shape[1]:  # or else it is of another model, which is refused
                cut_state[kind][name] = part.of_rows(rows).reshape(len(rows), part.numel)
        for name, of in state.get("factors", {}).items():
            start, numel = self._own.get(name, (0, 0))
            pairs = of if isinstance(of, Mapping) else {0: of}
            place = next(self.part(name).runs(start, min(numel, 1)), (-1,))[0]
            if place in pairs:
                cut_state["factors"][name] = {start: pairs[place]}
        return cut_state

    def _factors_of(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        whole: dict[str, dict[int, Any]] = {}
        for rank, state in enumerate(states):
            for name, of in state.get("factors", {}).items():
                part = self.part(name, rank=rank)
                pairs = of if isinstance(of, Mapping) else {0: of}
                if not part.is_copy and part.length:
                    whole.setdefault(name, {}).update(
                        {next(part.runs(start, 1))[0]: pair for start, pair in pairs.items()}
                    )
        return {"factors": whole} if whole else {}


def _rows_of(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and rows of each tensor that differs between replicas."""
    for kind in ROWS:
        for name, rows in state.get(kind, {}).items():
            if isinstance(rows, Tensor):
                yield kind, name, rows
