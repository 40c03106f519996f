"""The table of codecs and the gradients that the laws are tried on."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_dist.codecs import (
    CODECS,
    DGC,
    FP8,
    QSGD,
    BlockCodec,
    Int4,
    Int8,
    RandomK,
    Sign,
    TernGrad,
    TopK,
    Uncompressed,
)

_MADE = [make() for make in CODECS.values()]

TABLE: list[BlockCodec] = [
    *(codec for codec in _MADE if isinstance(codec, BlockCodec)),
    Uncompressed(),
    Int8(block_size=64),
    Int4(hadamard=True),
    FP8(block_size=32),
    Sign(block_size=64),
    QSGD(bits=2, block_size=64),
    QSGD(bits=8, block_size=64, norm="l2"),
    TernGrad(block_size=64, clip_sigma=2.5),
    TopK(ratio=0.1, block_size=256, values="fp32"),
    TopK(ratio=1.0, block_size=64),
    TopK(values="int8"),
    TopK(ratio=0.05, block_size=1024, values="int2", decay=0.9),
    DGC(ratio=0.02, block_size=1024, warmup_steps=8),
    RandomK(ratio=0.1, block_size=256),
    RandomK(ratio=0.1, block_size=256, unbiased=True),
]

every_codec = pytest.mark.parametrize("codec", TABLE, ids=repr)

_DTYPES = (torch.float32, torch.float64)
_ELEMENTS = 256  # of one row, or one block where a block is larger


@st.composite
def gradients(draw: st.DrawFn, codec: BlockCodec, *dtypes: torch.dtype) -> Tensor:
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
