"""Sums of what goes into a reducer and comes out of it, for laws of conservation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from feeding import SHAPES, Fed, Shapes, Tensors, backward, compressed, digest, feed, mean
from layouts import Layout
from saving import State, through_a_file
from worlds import Rank

from lightning_dist.codecs import Codec

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
        """Mean over ranks (hosts, where they reduce first)."""
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
