"""The laws of a codec, over the whole table, and naive numpy twins."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import TABLE, every_codec, gradients

from lightning_dist.codecs import (
    CODECS,
    FP8,
    BlockCodec,
    Int4,
    Int8,
    Sign,
    TopK,
    laws,
    resolve_codec,
)
from lightning_dist.codecs.laws import decoded, encoded, keys_for, some_gradient
from lightning_dist.codecs.scales import pack, unpack
from lightning_dist.codecs.topk import largest, pack_places, unpack_places


@every_codec
@given(data=st.data())
def test_every_gradient(codec: BlockCodec, data: st.DataObject) -> None:
    """One drawn gradient, encoded and decoded once, for all that holds for every one."""
    x = data.draw(gradients(codec))
    place = data.draw(st.integers(0, x.numel() - 1))
    laws.holds_for(codec, x, place, data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])))


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@every_codec
def test_law(codec: BlockCodec, law: Callable[[BlockCodec], None]) -> None:
    law(codec)


@pytest.mark.parametrize("codec", [c for c in TABLE if c.exchange == "allreduce"], ids=repr)
@given(data=st.data())
def test_payloads_that_the_network_adds_are_linear(codec: BlockCodec, data: st.DataObject) -> None:
    """decode(encode(x) + encode(y)) == x + y within two encodings and one wire addition."""
    x = data.draw(gradients(codec)).view(-1, codec.block)
    y = data.draw(st.sampled_from([x.flip(0), -x, x * 0.5]))
    keys = keys_for(codec, x)
    a, b = codec.encode(x, keys)[0], codec.encode(y, keys)[0]
    sizes = x.double().abs() + y.double().abs()
    gain = codec.block / codec.k if getattr(codec, "unbiased", False) else 1
    addition = (torch.finfo(a.dtype).eps * sizes + torch.finfo(a.dtype).tiny) * gain
    bound = codec.error_bound(x).double() + codec.error_bound(y).double() + addition
    got = codec.decode((a + b,), x.dtype, keys).double()
    promised = bound.isfinite() & (sizes < torch.finfo(a.dtype).max)
    assert ((got - x.double() - y.double()).abs() <= bound)[promised].all()


def test_the_table_is_by_name() -> None:
    assert {name: resolve_codec(name).name for name in CODECS} == {name: name for name in CODECS}


@every_codec
@given(seed=st.integers(0, 2**16), kind=st.sampled_from([0.0, 1e-45, 1e-38, 1e38, 3e38, 1e300]))
def test_nothing_crashes(codec: BlockCodec, seed: int, kind: float) -> None:
    """Zeros, denormals, huge, infinite and NaN elements, mixed, in both dtypes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, kind, -kind])
    for dtype in (torch.float32, torch.float64):
        chosen = torch.randint(0, 7, (3, codec.block), generator=generator)
        x = values.to(dtype)[chosen]
        x[1, 0] = torch.nan
        assert decoded(codec, x).shape == x.shape
        assert not codec.finite(encoded(codec, x))


@pytest.mark.parametrize("codec", [c for c in TABLE if c.stochastic], ids=repr)
def test_stochastic_codecs_insist_on_keys(codec: BlockCodec) -> None:
    """Without them every rank would round alike, or not at all: our own bug."""
    with pytest.raises(AssertionError, match="keys"):
        codec.encode(some_gradient(codec))


sizes = pytest.mark.parametrize("block_size", [16, 64, 256])


@pytest.mark.parametrize(
    ("codec", "most"), [(Int8(16), 127), (Int8(64), 127), (Int8(256), 127), (Int4(32), 7)], ids=repr
)
@given(data=st.data())
def test_codes_and_scales_equal_a_naive_twin(
    codec: BlockCodec, most: int, data: st.DataObject
) -> None:
    """Each scale is the cut amax/127 and each code an integer nearest to x / scale."""
    x = data.draw(gradients(codec)).view(-1, codec.block)
    scales, codes = codec.encode(x)
    for block, scale, row in zip(x.numpy(), scales.float().numpy(), codes.numpy(), strict=True):
        assert scale[0] == cut(np.float32(np.abs(block).max()) * np.float32(1.008 / most))
        found = row.astype(int)
        if most == 7:  # element i is half of a byte
            found = np.array([(int(row[i % 16]) >> (4 * (i // 16)) & 15) - 7 for i in range(32)])
        exact = block.astype(np.float64) / max(float(scale[0]), 2.0**-126)
        assert np.abs(found - exact).max() <= 0.5 + (1e-4 if most == 127 else 1e-5)
        assert np.abs(found).max() <= most


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
def test_sign(data: st.DataObject) -> None:
    codec = Sign(64)
    x = data.draw(gradients(codec, torch.float32)).view(-1, 64)
    scales, packed = codec.encode(x)
    for block, scale, row in zip(x.numpy(), scales.float().numpy(), packed.numpy(), strict=True):
        mean = np.float32(np.abs(block).astype(np.float64).sum() / 64)
        assert scale[0] == cut(mean)
        positive = [int(row[i % 8]) >> (i // 8) & 1 for i in range(64)]
        assert positive == [int(value >= 0) for value in block]
    huge = torch.full((1, 64), 3e38)  # the sum of these is more than float32 holds
    assert ((codec.decode(codec.encode(huge), huge.dtype) - huge).abs() / huge).max() <= 2.0**-7


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
