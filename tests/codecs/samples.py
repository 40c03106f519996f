"""The table of codecs and the gradients that the laws are tried on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dist.codecs import CODECS, Codec, Int8, Payload, Uncompressed

TABLE: list[Codec] = [*(make() for make in CODECS.values()), Uncompressed(), Int8(block_size=64)]

every_codec = pytest.mark.parametrize("codec", TABLE, ids=repr)

_DTYPES = (torch.float32, torch.float64)
_ELEMENTS = 256  # of one row, or one block where a block is larger


@st.composite
def gradients(draw: st.DrawFn, codec: Codec, *dtypes: torch.dtype) -> Tensor:
    """``(..., B, block)``: zeros, one value, normal of any size or denormals, and a few spikes."""
    dtype = draw(st.sampled_from(dtypes or _DTYPES))
    rows = draw(st.sampled_from([(), (1,), (3,)]))
    shape = (*rows, draw(st.integers(1, 3)) * max(1, _ELEMENTS // codec.block), codec.block)
    size = 10.0 ** draw(st.integers(-44, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    kinds = {
        "zeros": lambda: torch.zeros(shape, dtype=dtype),
        "repeated": lambda: torch.full(shape, size, dtype=dtype),
        "normal": lambda: torch.randn(shape, generator=generator, dtype=dtype) * size,
        "denormal": lambda: torch.randn(shape, generator=generator, dtype=dtype) * 2.0**-130,
    }
    x = kinds[draw(st.sampled_from(sorted(kinds)))]()
    for place, value in draw(st.lists(_spikes, max_size=4)):
        x.view(-1)[place % x.numel()] = value
    return x.clamp(-1e30, 1e30)


_spikes = st.tuples(st.integers(0, 2**16), st.floats(-1e30, 1e30))


def some_gradient(codec: Codec, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """``(3, block)`` normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, codec.block, generator=generator, dtype=dtype)


def fits(codec: Codec, x: Tensor) -> bool:
    """Whether every value is in the range of the codec."""
    return bool(codec.error_bound(x).isfinite().all())


def all_bytes(payload: Payload) -> list[Tensor]:
    return [plane.contiguous().view(torch.uint8) for plane in payload]
