"""Communication units by the type of a codec: open tables, to which a codec may add its own.

With the decorator ``@units_of.register(MyCodec)`` on a function of the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.reducer.slices import ParameterSlice
from lightning_dist.reducer.unit import CommUnit

if TYPE_CHECKING:
    from lightning_dist.reducer.plan import Planner


@singledispatch
def units_of(
    codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: Planner
) -> Sequence[CommUnit]:
    """The exchanges of ``slices`` of the flat ``bucket (N,)`` among the ranks of a flat network.

    The slices have shapes: those of the tensors, if the codec takes ``whole_tensors``.

    Args:
        planner: has the ``network``, the ``state`` and the user's wish for ``error_feedback``.
    """
    require_units(codec)
    raise AssertionError(f"{codec} has units, and they were not asked for")


def require_units(codec: Codec) -> None:
    """Raise ValueError where nothing says how the payloads of ``codec`` travel."""
    if units_of.dispatch(type(codec)) is not units_of.dispatch(object):
        return
    raise ValueError(
        f"a codec must be a lightning_dist.BlockCodec or have communication units of its own, got "
        f"{codec}; derive it from BlockCodec, or register units with "
        "lightning_dist.reducer.units.units_of"
    )


@singledispatch
def compile_passes(codec: Codec, dtypes: Iterable[torch.dtype], planner: Planner) -> None:
    """Compile what the units of ``codec`` do with gradients of ``dtypes``, where that helps."""
