"""Naive numpy twins: the same bytes by the plainest way, one block at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import gradients

from lightning_dist.codecs import FP8, Int4, Sign, TopK
from lightning_dist.codecs.scales import pack, unpack
from lightning_dist.codecs.topk import largest, pack_places, unpack_places


@given(data=st.data())
def test_sign(data: st.DataObject) -> None:
    codec = Sign(64)
    x = data.draw(gradients(codec, torch.float32)).view(-1, 64)
    scales, packed = codec.encode(x)
    for block, scale, row in zip(x.numpy(), scales.float().numpy(), packed.numpy(), strict=True):
        mean = np.float32(np.abs(block).astype(np.float64).sum() / 64)
        assert scale[0] == cut(mean)
        positive = [int(row[i % 8]) >> (i // 8) & 1 for i in range(64)]
        assert positive == [int(value >= 0) for value in block]


def test_the_mean_size_of_huge_values_does_not_overflow() -> None:
    x = torch.full((1, 256), 3e38)
    assert codec_error(Sign(), x) <= 2.0**-7


@given(data=st.data())
def test_int4(data: st.DataObject) -> None:
    codec = Int4(32)
    x = data.draw(gradients(codec, torch.float32)).view(-1, 32)
    scales, packed = codec.encode(x)
    for block, scale, row in zip(x.numpy(), scales.float().numpy(), packed.numpy(), strict=True):
        assert scale[0] == cut(np.float32(np.abs(block).max()) * np.float32(1.008 / 7))
        codes = np.array([(int(row[i % 16]) >> (4 * (i // 16)) & 15) - 7 for i in range(32)])
        exact = block.astype(np.float64) / max(float(scale[0]), 2.0**-126)
        assert np.abs(codes - exact).max() <= 0.5 + 1e-5
        assert np.abs(codes).max() <= 7


@given(data=st.data())
def test_fp8(data: st.DataObject) -> None:
    """Each byte is the nearest of the 253 finite e4m3 numbers, listed here from their bits."""
    codec = FP8(32)
    x = data.draw(gradients(codec, torch.float32)).view(-1, 32)
    scales, packed = codec.encode(x)
    table = np.array([e4m3(byte) for byte in range(256)])
    finite = table[np.isfinite(table)]
    assert np.nanmax(table) == 448
    for block, scale, row in zip(x.numpy(), scales.float().numpy(), packed.numpy(), strict=True):
        assert scale[0] == cut(np.float32(np.abs(block).max()) * np.float32(1.008 / 448))
        exact = block.astype(np.float64) / max(float(scale[0]), 2.0**-126)
        nearest = np.abs(finite[None] - exact[:, None]).min(-1)
        assert (np.abs(table[row] - exact) <= nearest + np.abs(exact) * 1e-6).all()
        decoded = codec.decode((scales, packed), torch.float64)
        assert np.array_equal(decoded.numpy(), table[packed.numpy()] * scales.double().numpy())


@given(data=st.data())
def test_topk(data: st.DataObject) -> None:
    """The sent magnitudes are the k largest ones, each from the place that is sent with it."""
    ratio = data.draw(st.sampled_from([1e-9, 0.01, 0.1, 0.5, 1.0]))
    size = data.draw(st.sampled_from([64, 512, 4096]))
    codec = TopK(ratio, size, "fp32")
    x = data.draw(gradients(codec, torch.float32)).view(-1, size)
    packed, values = codec.encode(x)
    for block, row, sent in zip(x.numpy(), packed.numpy(), values.numpy(), strict=True):
        half = codec.k // 2
        bytes_ = row.astype(int).reshape(3, half)
        first = bytes_[0] + 256 * (bytes_[1] % 16)
        second = bytes_[2] + 256 * (bytes_[1] // 16)
        places = np.concatenate([first, second])
        assert len(set(places)) == codec.k
        assert np.array_equal(block[places], sent)
        assert np.array_equal(np.sort(np.abs(sent)), np.sort(np.abs(block))[-codec.k :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [64, 4096])
@given(k=st.sampled_from([2, 4, 42, 64]), few=st.booleans(), seed=st.integers(0, 2**16))
def test_of_equal_magnitudes_the_first_are_taken(
    dtype: torch.dtype, size: int, k: int, few: bool, seed: int
) -> None:
    """In ascending order, in blocks with and without equal ones, of a few numbers or mostly 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, size, generator=generator, dtype=dtype)
    x[0] = torch.where(x[0].abs() > 2.5, x[0], 0.0) if few else x[0].round()
    order = np.argsort(-x.abs().numpy(), axis=-1, kind="stable")
    assert np.array_equal(largest(x, k).numpy(), np.sort(order[..., :k], axis=-1))


def test_topk_takes_nan_and_inf_first() -> None:
    for size, ratio in ((64, 0.01), (4096, 0.001), (4096, 0.01), (4096, 0.2)):
        x = torch.full((2, size), 3e38)
        x[0, size // 3], x[1, size - 1] = torch.nan, -torch.inf
        decoded = TopK(ratio, size).decode(TopK(ratio, size).encode(x), torch.float32)
        assert decoded[0, size // 3].isnan()
        assert decoded[1, size - 1] == -torch.inf


@given(data=st.data())
def test_packing_is_bijective(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([1, 2, 4, 8]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    codes = torch.randint(0, 2**bits, (2, 3, 64), generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits=bits)
    assert packed.shape == (2, 3, 8 * bits)
    assert torch.equal(unpack(packed, bits=bits), codes)
    anything = torch.randint(0, 256, (2, 3, 16), generator=generator, dtype=torch.uint8)
    assert torch.equal(pack(unpack(anything, bits=bits), bits=bits), anything)


@given(st.integers(0, 2**16), st.integers(1, 64))
def test_packing_of_places_is_bijective(seed: int, pairs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, 4096, (3, 2 * pairs), generator=generator)
    assert torch.equal(unpack_places(pack_places(places)), places)
    anything = torch.randint(0, 256, (3, 3 * pairs), generator=generator, dtype=torch.uint8)
    assert torch.equal(pack_places(unpack_places(anything)), anything)


def codec_error(codec: Sign, x: torch.Tensor) -> float:
    decoded = codec.decode(codec.encode(x), x.dtype)
    return float(((decoded - x).abs() / x.abs()).max())


def cut(number: np.float32) -> np.float32:
    """The lower 16 bits of the float32 cleared."""
    return (np.float32(number).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
