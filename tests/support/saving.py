"""Training that is interrupted, the state it leaves, and sums for laws of conservation."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from feeding import (
    SHAPES,
    Fed,
    Shapes,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    mean,
    residuals,
    step_digest,
)
from layouts import Layout
from threads import of_all
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import Codec
from lightning_dist.reducer.reducer import Reducer

State = Mapping[str, Any]

SETTINGS: Mapping[str, Any] = {"min_compress_numel": 256, "ddp": {"bucket_cap_mb": 0.004}}


@dataclass
class Trained:
    """What a world of ranks leaves behind."""

    digests: list[list[str]]  # of gradients and residuals; [rank][step]
    residuals: list[Tensors]  # [rank]
    state: State


def train(size: int, steps: range, state: State | None = None, **settings: Any) -> Trained:
    """A world of its own for :func:`train_here`."""
    ranks = run_threads(lambda rank: train_here(rank, steps, state, **settings), size)
    digests, held, states = zip(*ranks, strict=True)
    assert states[1:] == (None,) * (size - 1), "rank 0 alone has the state"
    return Trained(list(digests), list(held), through_a_file(states[0]))


def train_here(
    rank: Rank,
    steps: range,
    state: State | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    before: range = range(0),
    **more: Any,
) -> tuple[list[str], Tensors, State | None]:
    """Train the ``steps`` from ``state``, on a reducer that has trained ``before`` already."""
    with compressed(rank, Fed(dtype=dtype), **{**SETTINGS, **more}) as (model, reducer):
        for step in before:
            backward(model, feed(rank.rank, step, dtype=dtype))
        if before or state is not None:
            reducer.load_state_dict(state)
        digests = []
        for step in steps:
            gradients = backward(model, feed(rank.rank, step, dtype=dtype))
            digests.append(step_digest(gradients, reducer))
        return digests, residuals(reducer), reducer.state_dict()


class Resumed:
    """A run that is saved after ``stop`` steps and goes on, and one resumed from what was saved."""

    def __init__(
        self, rank: Rank, *, stop: int, steps: int, shapes: Shapes = SHAPES, **settings: Any
    ) -> None:
        settings, left = {**SETTINGS, **settings}, range(stop, steps)
        with compressed(rank, Fed(shapes), **settings) as (model, reducer):
            for step in range(stop):
                backward(model, feed(rank.rank, step, shapes))
            self.state, self.residuals = reducer.state_dict(), residuals(reducer)
            self.whole = later(rank, model, reducer, shapes, left)
        saved = of_all(rank, self.state)[0]
        with compressed(rank, Fed(shapes), **settings) as (model, reducer):
            reducer.load_state_dict(through_a_file(saved))
            self.again = reducer.state_dict()
            self.resumed = later(rank, model, reducer, shapes, left)


def later(
    rank: Rank, model: DistributedDataParallel, reducer: Reducer, shapes: Shapes, steps: range
) -> tuple[list[str], dict[str, list[str]]]:
    """Digests of all that the steps leave on this rank, and of the state of all ranks."""
    digests = [step_digest(backward(model, feed(rank.rank, s, shapes)), reducer) for s in steps]
    return digests, tensors(reducer.state_dict() or {})


def tensors(state: State) -> dict[str, list[str]]:
    """Digest of every tensor in a state, by kind and name."""

    def digests(of: Any) -> list[str]:
        return [digest([part]) for part in ([of] if isinstance(of, Tensor) else of)]

    kinds = [kind for kind, value in state.items() if isinstance(value, Mapping)]
    return {f"{kind} {name}": digests(of) for kind in kinds for name, of in state[kind].items()}


def through_a_file(state: State) -> State:
    """Loaded as strictly as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


DOUBLE = torch.float64


@dataclass
class Totals:
    """Inputs and outputs of one rank summed over the finite steps, and what is owed after them."""

    inputs: Tensors
    outputs: Tensors
    norms: list[float] = field(default_factory=list)  # of this rank's residual after every step
    digests: list[str] = field(default_factory=list)  # of the outputs of every step
    names: set[str] = field(default_factory=set)  # of the residuals that this rank has at the end
    memory: int = 0  # bytes of state at the end
    state: State | None = None  # on rank 0

    @property
    def owed(self) -> Tensors:
        """Mean over ranks (nodes, where they reduce first)."""
        rows = {} if self.state is None else self.state["residuals"]
        return {name: of.mean(0).view(self.inputs[name].shape) for name, of in rows.items()}


def totals(
    rank: Rank,
    codec: str | Codec,
    steps: int | range,
    *,
    shapes: Shapes = SHAPES,
    bias: float = 0.0,
    given: Callable[[int, int], Tensors] | None = None,
    load: State | None = None,
    layout: Layout | None = None,
    **settings: Any,
) -> Totals:
    """Totals of so many steps, from the state ``load`` on.

    ``bias`` is how far the random gradients of the ranks lie apart; ``given(rank, step)``: others.
    """
    zeros = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    found = Totals(zeros, zeros)
    settings |= {} if layout is None else layout.form
    with compressed(rank, Fed(shapes, DOUBLE), codec, **settings) as (model, reducer):
        if load is not None:
            reducer.load_state_dict(load)
        for step in range(steps) if isinstance(steps, int) else steps:
            fed = given(rank.rank, step) if given else feed(rank.rank, step, shapes, DOUBLE)
            fed = {name: value + bias * rank.rank for name, value in fed.items()}
            got = backward(model, fed)
            if all(value.isfinite().all() for value in got.values()):
                found.inputs, found.outputs = plus(found.inputs, fed), plus(found.outputs, got)
            found.digests.append(digest([got[name] for name in shapes]))
            kept = [reducer.residuals[name] for name in reducer.residuals]
            found.norms.append(float(torch.cat(kept).norm()) if kept else 0.0)
        found.names, found.memory = {*reducer.residuals}, reducer.memory()["residual_bytes"]
        state = reducer.state_dict()
    found.state = state and through_a_file(state)
    return found


def plus(total: Tensors, more: Tensors) -> Tensors:
    return {name: value + more[name] for name, value in total.items()}


def lost(ranks: Sequence[Totals]) -> float:
    """Largest relative difference between what went in and what came out or is still owed."""
    went_in, (first, *_) = mean([each.inputs for each in ranks]), ranks
    owed = first.owed
    return max(
        float((first.outputs[n] + owed.get(n, 0.0) - value).abs().max() / value.abs().max())
        for n, value in went_in.items()
        if value.numel()
    )
