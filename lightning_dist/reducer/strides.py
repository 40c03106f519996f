"""The order in which a parameter's gradient lies in a bucket, and with it the state of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dist.codecs.base import Shape


def as_real(parameter: Tensor) -> Tensor:
    """The parameter as a bucket holds its gradient: pairs of real numbers where it is complex."""
    return torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter


def strides_in_bucket(parameter: Tensor) -> Shape | None:
    """Strides of the real gradient in the bucket; None: row-major.

    DDP keeps the strides of parameters that are dense in memory, and lays out others row-major.
    """
    real = as_real(parameter)
    if real.is_contiguous():
        return None
    dense = 1
    for stride, size in sorted(zip(real.stride(), real.shape, strict=True)):
        if size > 1 and stride != dense:
            return None
        dense *= size
    return tuple(real.stride())


def as_laid_out_here(state: Mapping[str, Any], names: Mapping[Tensor, str]) -> Mapping[str, Any]:
    """``state`` with every row in the order of the parameters that ``names`` has.

    Rows are saved as they lie in memory, with the strides of those that are not row-major. A state
    without strides is of an earlier version: it is taken as it is.
    """
    recorded = state.get("strides")
    if recorded is None:
        return state
    moved = {}
    for parameter, name in names.items():
        there, here = recorded.get(name), strides_in_bucket(parameter)
        if (there and tuple(there)) != here:
            moved[name] = tuple(as_real(parameter).shape), there, here
    if not moved:
        return state
    kinds = {
        kind: {name: _moved(rows, *moved[name]) if name in moved else rows for name, rows in of}
        for kind, of in ((k, state[k].items()) for k in ("residuals", "momenta") if k in state)
    }
    return {**state, **kinds}


def _moved(
    rows: Tensor, shape: Shape, there: Sequence[int] | None, here: Sequence[int] | None
) -> Tensor:
    if rows.shape[1] != math.prod(shape):
        return rows  # of another model, which is refused where it is asked for
    moved = torch.empty_like(rows)
    _shaped(moved, shape, here).copy_(_shaped(rows, shape, there))
    return moved


def _shaped(rows: Tensor, shape: Shape, strides: Sequence[int] | None) -> Tensor:
    whole = (len(rows), *shape)
    return (
        rows.view(whole) if strides is None else rows.as_strided(whole, (rows.shape[1], *strides))
    )
