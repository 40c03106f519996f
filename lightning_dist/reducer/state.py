"""State of a reducer between steps, and in checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dist.base.private import tensors_in
from lightning_dist.codecs.base import Codec
from lightning_dist.exchange.rounds import bits_digest
from lightning_dist.ranks.facts import Facts, Spread, all_facts, differences, gather
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice


@dataclass
class ResidualParts:
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
    def from_row(cls, row: Tensor) -> ResidualParts:
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
        """Parts of :meth:`of_row` as a whole row, zeros where other ranks of the row hold it."""
        parts = self.of_row(first=first)
        if len(parts) == 1 and parts[0][1].numel() == self.numel:
            return parts[0][1]
        row = torch.zeros(self.numel, dtype=self.dtype_of_row)
        for start, part in parts:
            row[start : start + len(part)] = part
        return row


_NAMED = ("residuals", "momenta", "factors", "delayed")


def require_mapping(state: object) -> None:
    """Raise ValueError unless it is what ``state_dict`` has returned."""
    if state is not None and not isinstance(state, Mapping):
        raise ValueError(
            "load_state_dict takes the dictionary that state_dict() has returned, or None, got "
            f"{state!r:.80}; read a file with torch.load(path, weights_only=True)"
        )


def require_one_state(
    state: Mapping[str, Any] | None, network: Network, *, prefix: str, sharded: bool
) -> None:
    """Raise ValueError if ranks were given different states, or some none. Collective.

    Args:
        prefix: of the keys of ``state``.
        sharded: each rank was given its part of the factors.
    """
    about = "none"
    if state is not None:
        equal = () if sharded else ("factors", "delayed")
        tensors = tensors_in([state.get(prefix + key, {}) for key in equal])
        content = [*_names(state, prefix)], [*map(bits_digest, tensors)]
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
        about = f"one of step {state.get(prefix + 'step')} ({digest})"
    group, limit = network.data.group, network.limit
    facts = all_facts({"state": about}, group=group, device=network.device, limit=limit)
    if lines := differences(facts):
        raise ValueError(
            f"load_state_dict must be given the same on all ranks, got\n{lines[0]}\n"
            "state_dict() returns it on rank 0 alone: save it there and load the file on all ranks"
        )


def require_names(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError if ``state`` has parameters that are not among ``names``."""
    foreign = sorted({name for name, _ in _names(state, "")}.difference(names))
    if foreign:
        raise ValueError(
            f"The state must be of this model, and has {', '.join(map(repr, foreign[:3]))}"
            f"{' ...' if len(foreign) > 3 else ''}, which are not among its parameters; load the "
            "state that was saved with it, or None to start without residuals"
        )


def _names(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    """Parameters of which ``state`` has something, with their elements or 0."""
    for kind in _NAMED:
        for name, kept in sorted(state.get(prefix + kind, {}).items()):
            has_rows = isinstance(kept, Tensor) and kept.dim() == 2
            yield (
                name,
                kept.numel if isinstance(kept, ResidualParts) else kept.shape[1] if has_rows else 0,
            )


_KINDS = {"residual": "residuals", "momentum": "momenta"}
"""Kinds of state that differ from rank to rank, and their names in a checkpoint."""


Layout: TypeAlias = Sequence[tuple[str, str, int]]
Parts: TypeAlias = Mapping[int, Sequence[Tensor]]
"""Factors of each part of a parameter that ranks work with, by where it starts."""


class ReducerState:
    """Residuals and momenta, which differ from rank to rank, and factors, equal where they are."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], ResidualParts] = {}
        """State that differs between ranks, by kind and parameter, on this rank or another."""
        self.factors: dict[str, tuple[Tensor, ...]] = {}
        self._starts: dict[str, int] = {}  # elements of a parameter before the part with factors
        self._loaded_factors: dict[str, Parts] = {}  # not needed here so far
        self.is_mean = False
        """It is that of :meth:`average`, whole on every rank: no step has been applied since."""
        self._adopted: list[ResidualParts] = []  # since then

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Part of every residual on this rank, by parameter name."""
        return self._of_kind("residual")

    @property
    def momenta(self) -> dict[str, Tensor]:
        return self._of_kind("momentum")

    def _of_kind(self, kind: str) -> dict[str, Tensor]:
        return {name: self.held[kind, name].flat() for name in self.names(kind)}

    def names(self, kind: str) -> list[str]:
        """Parameters that have state of ``kind``, here or on another rank."""
        return [name for of_kind, name in self.held if of_kind == kind]

    def per_rank(
        self, kind: str, part: ParameterSlice, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The flat tensor of ``kind`` for ``part``, zeros the first time."""
        held = self.know(kind, part, dtype=dtype)
        tensor = held.parts.get(part.start)
        if tensor is None and held.loaded is not None:
            start = part.start - (held.start or 0)
            tensor = held.loaded[start : start + part.numel].clone()
        if tensor is None:
            tensor = torch.zeros(part.numel, dtype=dtype, device=device)
        assert tensor.numel() == part.numel, "a parameter is cut in one way only"
        held.parts[part.start] = tensor.to(device=device, dtype=dtype)
        return held.parts[part.start]

    def know(self, kind: str, part: ParameterSlice, *, dtype: torch.dtype) -> ResidualParts:
        """There is state of ``kind`` for the parameter of ``part``, here or on another rank.

        Raises:
            ValueError: what was loaded has another number of elements.
        """
        held = self.held.setdefault((kind, part.name), ResidualParts(part.whole, dtype))
        if held.loaded is not None and held.numel != part.whole:
            raise ValueError(
                f"The stored residual of {part.name!r} has {held.numel} elements, the parameter "
                f"{part.whole}; this state belongs to another model"
            )
        held.numel, held.dtype = part.whole, dtype
        return held

    def adopted(self, kind: str, name: str) -> None:
        """This rank has all parts of ``kind`` for ``name`` that it works with."""
        if self.is_mean:  # should a rank be lost in this step, others may not have come so far
            self._adopted.append(self.held[kind, name])
        else:
            self.held[kind, name].loaded = None

    def end_step(self) -> None:
        """A step is applied, on all ranks."""
        adopted, self._adopted, self.is_mean = self._adopted, [], False
        for held in adopted:
            held.loaded = None

    def drop(self, kind: str, name: str) -> None:
        """Drop the state of ``kind`` for ``name`` on this rank; all ranks do it at once."""
        self.held.pop((kind, name), None)

    def tensors(self, name: str) -> list[Tensor]:
        """All state of a parameter that this rank works with."""
        held = [self.held[kind, name] for kind in _KINDS if (kind, name) in self.held]
        return [*(part for of in held for _, part in of.in_order()), *self.factors.get(name, ())]

    def keep_for(self, codec: Codec, kinds: Collection[str], name: str) -> None:
        """Free state that ``codec``, with memory of ``kinds``, does not use; residuals are sent."""
        if "momentum" not in kinds:
            self.drop("momentum", name)
        if not codec.keeps_factors:
            self.factors.pop(name, None)
            self._loaded_factors.pop(name, None)

    def adopt_factors(
        self, part: ParameterSlice, first: tuple[Tensor, ...], *, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Factors of ``part``, kept or loaded; ``first`` if there are none of that shape.

        Matrices are put on ``device``; what is 0-d stays on the CPU, so that it can be read.
        """
        loaded = self._loaded_factors.pop(part.name, {})
        factors = self.factors.get(part.name, loaded.get(part.start, loaded.get(0)))
        shapes = [factor.shape for factor in first]
        if factors is None or [factor.shape for factor in factors] != shapes:
            factors = first
        # The rounding of a matrix product depends on the layout, which a checkpoint does not keep.
        self.factors[part.name] = tuple(
            factor.to(device=device if factor.dim() else "cpu", dtype=like.dtype).contiguous()
            for factor, like in zip(factors, first, strict=True)
        )
        self._starts[part.name] = part.start
        return self.factors[part.name]

    @property
    def nbytes(self) -> int:
        parts = [part for held in self.held.values() for part in held.parts.values()]
        return sum(
            tensor.nbytes for tensor in [*parts, *(f for p in self.factors.values() for f in p)]
        )

    def keep_only(self, numel: Mapping[str, int]) -> None:
        """Drop the state of parameters that are not in ``numel`` or have another size."""
        self.held = {k: held for k, held in self.held.items() if numel.get(k[1]) == held.numel}
        self.factors = {name: pair for name, pair in self.factors.items() if name in numel}
        loaded = self._loaded_factors
        self._loaded_factors = {name: pair for name, pair in loaded.items() if name in numel}

    def to(self, device: torch.device) -> None:
        """Move everything, for instance off an accelerator after a fit."""
        for held in self.held.values():
            held.parts = {start: part.to(device) for start, part in held.parts.items()}
        self.factors = {n: tuple(f.to(device) for f in of) for n, of in self.factors.items()}

    def gather(self, network: Network, *, to: int = 0) -> dict[str, Any] | None:
        """The state of all ranks on the CPU of rank ``to``; None elsewhere. Collective.

        Residuals and momenta are ``{name: (rows, numel)}``, some MB or one parameter at a time over
        the network's device. Call it between backward passes.
        """
        is_here = network.state.group.rank() == to
        device = "cpu" if is_here else "meta"  # where nobody reads it
        state, spreads = self.spread(network, on_all=to != 0, device=device)
        gather(spreads, network.state, device=network.device, to=to)
        return state if is_here else None

    def spread(
        self, network: Network, *, on_all: bool = False, device: str = "cpu"
    ) -> tuple[dict[str, Any], list[Spread]]:
        """As :meth:`gather`, on every rank, with residuals and momenta left where they are.

        Only factors are communicated. The spreads say what the tensors of the state stand for.
        """
        spreads = []
        wholes: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
        for kind, name, held in self._in_order():
            shape = network.rows, held.numel
            whole = wholes[kind][name] = torch.empty(shape, dtype=held.dtype_of_row, device=device)
            begin, parts = network.row * held.numel, held.of_row(first=network.is_first_of_row)
            spreads.append(Spread(whole, tuple((begin + start, part) for start, part in parts)))
        return _gathered(wholes, self._factors_of_all(network, on_all=on_all)), spreads

    def know_all(self, network: Network) -> None:
        """Add the names that other ranks have, of which this one has no element. Collective."""
        held = [(*key, h.numel, h.dtype == torch.float64) for key, h in self.held.items()]
        for of_rank in _of_all_ranks({"held": held}, network):
            for kind, name, numel, double in of_rank["held"]:
                dtype = torch.float64 if double else torch.float32
                self.held.setdefault((kind, name), ResidualParts(numel, dtype))

    def load(self, gathered: Mapping[str, Any], network: Network) -> None:
        """Take over what :meth:`gather` returned, in place of everything held now.

        With the same number of rows each gets its own back. Otherwise each gets the mean: what is
        still missing in the model is the mean over rows, and the mean of equal rows is that. A rank
        that has read its part of that by itself gives it as :class:`.ResidualParts`.
        """
        self.held = {
            (kind, name): kept
            if isinstance(kept, ResidualParts)
            else ResidualParts.from_row(
                (kept[network.row] if len(kept) == network.rows else kept.mean(0)).clone()
            )
            for kind, plural in _KINDS.items()
            for name, kept in gathered.get(plural, {}).items()
        }
        self._adopted, self.is_mean = [], False
        self.load_factors(gathered.get("factors", {}))

    def load_factors(self, factors: Mapping[str, Parts | Sequence[Tensor]]) -> None:
        """Take over factors in place of those that are held; a pair is of the part at 0."""
        parts = {n: of if isinstance(of, Mapping) else {0: of} for n, of in factors.items()}
        self.factors = {}
        self._loaded_factors = {
            name: {start: [factor.clone() for factor in pair] for start, pair in of.items()}
            for name, of in parts.items()
        }

    def average(self, network: Network, *, row: str | None) -> None:
        """Go on from the mean over the rows that the ranks of ``network`` hold. Collective.

        Args:
            row: that this rank has a part of, maybe with ranks that are gone; None: of none.

        Raises:
            RuntimeError: a rank is lost, and this state is as it was.
        """
        channel, rank = network.state, network.data.group.rank()
        self.know_all(network)
        facts = _of_all_ranks({"row": row, "mean": self.is_mean}, network)
        rows = [fact["row"] for fact in facts]
        if any(fact["mean"] for fact in facts):  # the others have lost a rank before they had it
            rows = ["mean" if fact["mean"] else None for fact in facts]
        row = rows[rank]
        first, count = rows.index(row) == rank, len({*rows} - {None})
        means: dict[tuple[str, str], ResidualParts] = {}
        for kind, name, held in self._in_order():
            mine = held.row(first=first).to(network.device, copy=True).mul_(row is not None)
            channel.all_reduce(mine).wait()
            means[kind, name] = ResidualParts.from_row(mine.div_(max(count, 1)).cpu())
        factors = self._factors_of_all(network, on_all=True)
        self.held, self._adopted, self.is_mean = means, [], True
        self.load_factors(factors)

    @property
    def all_factors(self) -> dict[str, Parts]:
        """Factors that this rank works with, and others that it has."""
        used = {name: {self._starts[name]: pair} for name, pair in self.factors.items()}
        return self._loaded_factors | used

    @property
    def layout(self) -> Layout:
        """Kind, parameter and elements of all that differs from rank to rank, as :meth:`packed`."""
        return [(kind, name, held.numel) for kind, name, held in self._in_order()]

    def packed(self) -> Tensor:
        """Copy of all that differs from rank to rank, flat, on the CPU."""
        rows = [held.row(first=True).cpu() for *_, held in self._in_order()]
        return torch.cat(rows) if rows else torch.empty(0)

    def add(self, packed: Tensor, layout: Layout) -> None:
        """Add what :meth:`packed` of another rank has returned, which had ``layout``."""
        begin = 0
        for kind, name, numel in layout:
            row, begin = packed[begin : begin + numel], begin + numel
            held = self.held.get((kind, name))
            if held is None:
                self.held[kind, name] = ResidualParts.from_row(row.clone())
                continue
            for start, part in held.of_row(first=True):
                part.add_(row[start : start + part.numel()].to(part.device))

    def scale(self, factor: float) -> None:
        """Multiply all that differs from rank to rank."""
        for *_, held in self._in_order():
            for _, part in held.of_row(first=True):
                part.mul_(factor)

    def _in_order(self) -> Iterator[tuple[str, str, ResidualParts]]:
        """All of it, in an order that is equal on all ranks."""
        for kind in _KINDS:
            for name in sorted(self.names(kind)):
                yield kind, name, self.held[kind, name]

    def _factors_of_all(self, network: Network, *, on_all: bool = False) -> dict[str, Any]:
        """Factors of every matrix, on rank 0 or on all ranks: a list, or :data:`Parts` of shards.

        On a node with several ranks only the owner of a matrix works with them.
        """
        channel, device = network.state, network.device
        held = {(n, at): mine for n, of in self.all_factors.items() for at, mine in of.items()}
        layouts = [
            [*key, [_layout_of(factor) for factor in mine], key[0] in self.factors]
            for key, mine in held.items()
        ]
        facts = _of_all_ranks({"factors": layouts}, network)
        of_ranks = [{(n, at): about for n, at, *about in fact["factors"]} for fact in facts]
        whole: dict[str, dict[int, list[Tensor]]] = {}
        for key in sorted({key for of_rank in of_ranks for key in of_rank}):
            holders = [rank for rank, of_rank in enumerate(of_ranks) if key in of_rank]
            holder = next((r for r in holders if of_ranks[r][key][-1]), holders[0])
            layout, _ = of_ranks[holder][key]
            factors = [
                torch.empty(size, dtype=getattr(torch, dtype), device=device)
                for dtype, *size in layout
            ]
            if channel.group.rank() == holder:
                for factor, mine in zip(factors, held[key], strict=True):
                    factor.copy_(mine)
            for factor in factors if holder or on_all else ():
                channel.broadcast(factor, owner=holder).wait()
            name, start = key
            whole.setdefault(name, {})[start] = [factor.cpu() for factor in factors]
        return {name: of[0] if of.keys() == {0} else of for name, of in whole.items()}


class StateCopy:
    """State of the parameters ``names`` on this rank, as it was at the last :meth:`take`.

    Its memory is used again by the next copy.
    """

    is_current = False
    """It was taken after the last step, and the next one has not begun."""

    def __init__(self, state: ReducerState, names: Sequence[str]) -> None:
        self._state, self._names = state, names
        self._held: Mapping[tuple[str, str], ResidualParts] = {}
        self._copies: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def take(self) -> None:
        """Copy the state."""
        held = [*self._state.held.items()]  # another thread may add some
        self._held = {key: of for key, of in held if key[1] in self._names}
        for name in self._names:
            memory = [copy for _, copy in self._copies.get(name, ())]
            tensors = self._state.tensors(name)
            if [tensor.shape for tensor in memory] != [tensor.shape for tensor in tensors]:
                memory = [torch.empty_like(tensor) for tensor in tensors]
            self._copies[name] = list(zip(tensors, memory, strict=True))
            for tensor, copy in self._copies[name]:
                copy.copy_(tensor)

    def restore(self, names: Collection[str] | None = None) -> None:
        """Restore the state of ``names``, of all by default; also what was dropped since."""
        wanted = [name for name in self._names if names is None or name in names]
        self._state.held.update({key: of for key, of in self._held.items() if key[1] in wanted})
        for tensor, copy in (pair for name in wanted for pair in self._copies[name]):
            tensor.copy_(copy)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for pairs in self._copies.values() for _, copy in pairs)


def row_or_mean(count: int, network: Network, read: Callable[[int], Tensor]) -> Tensor:
    """Row of this rank among ``count`` that were saved; the mean of all for another number of rows.

    Args:
        read: gives a row, by its number.
    """
    rows = [read(row) for row in ([network.row] if count == network.rows else range(count))]
    return sum(rows[1:], rows[0]) / len(rows)


def _of_all_ranks(own: Facts, network: Network) -> list[Facts]:
    group, limit = network.data.group, network.limit
    return all_facts(own, group=group, device=network.device, limit=limit)


def _gathered(of_kinds: Mapping[str, Any], factors: Any) -> dict[str, Any]:
    state = {_KINDS[kind]: of_kind for kind, of_kind in of_kinds.items()} | {"factors": factors}
    return {key: value for key, value in state.items() if value or key == "residuals"}


def _layout_of(tensor: Tensor) -> list[str | int]:
    """Dtype and shape, for JSON."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
