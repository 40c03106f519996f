"""Training that is interrupted: the state it leaves and what a later training does with it."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
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
    residuals,
    step_digest,
)
from threads import of_all
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

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
