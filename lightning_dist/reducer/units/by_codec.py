"""Communication units by the type of the codec.

A codec may bring communication units of its own, with the decorator ``@units_of.register(MyCodec)``
on a function of the same arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial, singledispatch

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec
from lightning_dist.reducer.codec_sample import samples_of
from lightning_dist.reducer.plan.flat import FlatPlanner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.units.base import CommUnit


def flat_units(
    codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
) -> Sequence[CommUnit]:
    """:func:`units_of`, with what a sample of the compression error is drawn from.

    Raises:
        ValueError: a codec of the user's has given none.
    """
    units = units_of(codec, slices, bucket, planner)
    if not units:
        names = ", ".join(part.name for part in slices)
        raise ValueError(
            f"units_of must give the units that exchange {names} under codec {codec.name!r}, got "
            "an empty list; return at least one"
        )
    if not codec.lossless:
        memory = planner.memory_of(codec)
        units[0].samples = partial(samples_of, codec, slices, bucket, planner.state, memory)
    return units


@singledispatch
def units_of(
    codec: Codec, slices: Sequence[ParameterSlice], bucket: Tensor, planner: FlatPlanner
) -> Sequence[CommUnit]:
    """The exchanges of ``slices`` of the flat ``bucket (N,)`` among the ranks of a flat network.

    The slices have shapes: those of the tensors, if the codec takes ``whole_tensors``.

    Args:
        planner: has the ``network``, the ``state`` and what is kept of errors, ``memory_of``.
    """
    require_units(codec)
    raise AssertionError(f"{codec} has units, and they were not asked for")


def require_units(codec: Codec) -> None:
    """Raise ValueError where nothing says how the payloads of ``codec`` travel."""
    if units_of.dispatch(type(codec)) is not units_of.dispatch(object):
        return
    raise ValueError(
        "A codec must be a lightning_dist.BlockCodec or have communication units of its own, got "
        f"{codec}; derive it from BlockCodec, or register units with "
        "lightning_dist.reducer.units.by_codec.units_of"
    )


@singledispatch
def compile_passes(
    codec: Codec, dtypes: Iterable[torch.dtype], planner: FlatPlanner, sizes: Collection[int]
) -> None:
    """Compile what the units of ``codec`` do with gradients of ``dtypes``, where that helps."""
