"""Sums of what goes into a reducer and comes out of it, for laws of conservation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from feeding import SHAPES, Fed, Shapes, Tensors, backward, compressed, digest, feed, mean
from layouts import Layout
from worlds import Rank

from lightning_dist.codecs import Codec

DOUBLE = torch.float64


@dataclass
class Totals:
    """Inputs and outputs of one rank summed over the steps, and what is owed after them."""

    inputs: Tensors
    outputs: Tensors
    owed: Tensors  # mean over ranks (hosts, where they reduce first), in the state of rank 0
    norms: list[float] = field(default_factory=list)  # of this rank's residual after every step
    digests: list[str] = field(default_factory=list)  # of the outputs of every step


def totals(
    rank: Rank,
    codec: str | Codec,
    steps: int,
    *,
    shapes: Shapes = SHAPES,
    bias: float = 0.0,
    layout: Layout | None = None,
    **settings: Any,
) -> Totals:
    """Totals of so many steps; ``bias`` is how far the gradients of the ranks lie apart."""
    zeros = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in shapes.items()}
    found = Totals(zeros, zeros, {})
    settings |= {} if layout is None else layout.form
    with compressed(rank, Fed(shapes, DOUBLE), codec, **settings) as (model, reducer):
        for step in range(steps):
            given = {
                name: value + bias * rank.rank
                for name, value in feed(rank.rank, step, shapes, DOUBLE).items()
            }
            got = backward(model, given)
            found.inputs, found.outputs = plus(found.inputs, given), plus(found.outputs, got)
            found.digests.append(digest([got[name] for name in shapes]))
            kept = [reducer.residuals[name] for name in reducer.residuals]
            found.norms.append(float(torch.cat(kept).norm()) if kept else 0.0)
        state = reducer.state_dict()
    rows = {} if state is None else state["residuals"]
    found.owed = {name: of.mean(0).view(shapes[name]) for name, of in rows.items()}
    return found


def plus(total: Tensors, more: Tensors) -> Tensors:
    return {name: value + more[name] for name, value in total.items()}


def lost(ranks: Sequence[Totals]) -> float:
    """Largest relative difference between what went in and what came out or is still owed."""
    went_in, (first, *_) = mean([each.inputs for each in ranks]), ranks
    return max(
        float((first.outputs[n] + first.owed.get(n, 0.0) - value).abs().max() / value.abs().max())
        for n, value in went_in.items()
        if value.numel()
    )
