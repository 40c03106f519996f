"""Training that is interrupted: the state it leaves and what a later training does with it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from feeding import Fed, Tensors, backward, compressed, feed, residuals, step_digest
from worlds import Rank, run_threads

State = Mapping[str, Any]

SETTINGS: Mapping[str, Any] = {"min_compress_numel": 256, "ddp": {"bucket_cap_mb": 0.004}}


@dataclass
class Trained:
    """What a world of ranks leaves behind."""

    digests: list[list[str]]  # of gradients and residuals; [rank][step]
    residuals: list[Tensors]  # [rank]
    state: State


def train(
    size: int,
    steps: range,
    state: State | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    before: range = range(0),
    **more: Any,
) -> Trained:
    """Train the ``steps`` from ``state``, on reducers that have trained ``before`` already."""

    def body(rank: Rank) -> tuple[list[str], Tensors, State | None]:
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

    digests, held, states = zip(*run_threads(body, size), strict=True)
    assert states[1:] == (None,) * (size - 1), "rank 0 alone has the state"
    return Trained(list(digests), list(held), through_a_file(states[0]))


def through_a_file(state: State) -> State:
    """Loaded as strictly as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
