"""What int8 promises beyond the common laws: exact products and a naive twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import gradients

from lightning_dist.codecs import Int8

sizes = pytest.mark.parametrize("block_size", [16, 64, 256])


@sizes
@given(data=st.data())
def test_codes_and_scales_equal_a_naive_twin(block_size: int, data: st.DataObject) -> None:
    """Each scale is the cut amax/127 and each code an integer nearest to x / scale."""
    codec = Int8(block_size)
    x = data.draw(gradients(codec)).view(-1, block_size)
    scales, codes = codec.encode(x)
    planes = (x.numpy(), scales.float().numpy(), codes.numpy())
    for block, scale, of_block in zip(*planes, strict=True):
        expected = naive_scale(block)
        assert scale[0] == expected
        exact = block.astype(np.float64) / max(float(expected), 2.0**-126)
        assert np.abs(of_block - exact).max() <= 0.5 + 1e-4
        assert np.abs(of_block.astype(int)).max() <= 127


@sizes
@given(data=st.data())
def test_code_times_scale_is_exact_in_float32(block_size: int, data: st.DataObject) -> None:
    """15 bits of product: no kernel, fused multiply-add or not, can round it differently."""
    codec = Int8(block_size)
    payload = codec.encode(data.draw(gradients(codec, torch.float32)))
    single, double = codec.decode(payload, torch.float32), codec.decode(payload, torch.float64)
    assert torch.equal(single.double(), double)


@given(st.integers(-126 - 23, 120), st.floats(1, 2, exclude_max=True, width=32))
def test_the_largest_element_reaches_but_does_not_pass_127(exponent: int, mantissa: float) -> None:
    """The scale is cut toward zero: without its head start codes of 128 would wrap to -128."""
    amax = mantissa * 2.0**exponent
    x = torch.zeros(1, 16)
    x[0, 3], x[0, 4] = amax, -amax
    _, codes = Int8(16).encode(x)
    assert codes[0, 3] == -codes[0, 4]
    assert 0 <= codes[0, 3] <= 127
    if exponent > -119:
        assert codes[0, 3] >= 125, "a scale much too large wastes codes"


@given(data=st.data())
def test_blocks_do_not_touch_each_other(data: st.DataObject) -> None:
    """A spike costs precision in its own block only."""
    codec = Int8(64)
    x = data.draw(gradients(codec, torch.float32)).view(-1, 64)
    spiked = x.clone()
    spiked[0, 0] = 1e30
    for alone, beside in zip(codec.encode(x), codec.encode(spiked), strict=True):
        assert torch.equal(alone[1:], beside[1:])


def naive_scale(block: np.ndarray) -> np.float32:
    """1.008 * amax / 127 in float32 with the lower 16 bits of the number cleared."""
    scale = np.float32(np.abs(block).max()) * np.float32(1.008 / 127)
    return (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
