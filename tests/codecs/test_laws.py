"""The laws of a codec, over the whole table: a new codec is a new row, not a new test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    TABLE,
    all_bytes,
    decoded,
    encoded,
    every_codec,
    fits,
    gradients,
    keys_for,
    some_gradient,
)
from torch import Tensor

from lightning_dist.codecs import CODECS, BlockCodec, resolve_codec

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@every_codec
@given(data=st.data())
def test_every_gradient(codec: BlockCodec, data: st.DataObject) -> None:
    """One drawn gradient, encoded and decoded once, for all that holds for every one."""
    x = data.draw(gradients(codec))
    before, keys = x.clone(), keys_for(codec, x)
    payload = codec.encode(x, keys)
    got = codec.decode(payload, x.dtype, keys)
    # Encoding is pure: the input is not changed, and the same input gives the same bytes.
    assert torch.equal(x, before)
    first = [plane.clone() for plane in all_bytes(payload)]
    assert all(map(torch.equal, first, all_bytes(encoded(codec, before))))
    # Shape and dtype stay, and |decode(encode(x)) - x| <= error_bound(x).
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    bound = codec.error_bound(x).double().expand_as(x)
    error = (got.double() - x.double()).abs()
    assert (error <= bound)[bound.isfinite()].all()
    assert not codec.lossless or torch.equal(got, x)
    # Shapes, dtypes and bytes of the payload equal planes() and wire_bytes().
    planes = codec.planes(x.dtype)
    assert [plane.dtype for plane in payload] == [plane.dtype for plane in planes]
    assert [plane.shape for plane in payload] == [(*x.shape[:-1], p.per_block) for p in planes]
    assert sum(plane.nbytes for plane in payload) == codec.wire_bytes(x.numel(), x.dtype)
    decodes_alike(codec, x.float())
    sees_bad_values(codec, x if fits(codec, x) else x / x.abs().amax(), data)


def decodes_alike(codec: BlockCodec, x: Tensor) -> None:
    """float32 and float64 decode the same bytes to the same numbers: no kernel can differ.

    But for the gain of an unbiased choice, one product that float32 rounds.
    """
    keys = keys_for(codec, x)
    payload = codec.encode(x, keys)
    single = codec.decode(payload, torch.float32, keys).double()
    double = codec.decode(payload, torch.float64, keys)
    if getattr(codec, "unbiased", False):
        torch.testing.assert_close(single, double, rtol=2.0**-22, atol=2.0**-126)
    else:
        assert torch.equal(single, double)


def sees_bad_values(codec: BlockCodec, x: Tensor, data: st.DataObject) -> None:
    """What the codec can represent decodes to finite values and is reported as finite.

    With one NaN or inf anywhere its decoded block is not finite, and finite() says so.
    """
    assert fits(codec, x)
    keys = keys_for(codec, x)
    payload = codec.encode(x, keys)
    assert codec.finite(payload)
    assert codec.decode(payload, x.dtype, keys).isfinite().all()
    place = data.draw(st.integers(0, x.numel() - 1))
    x.view(-1)[place] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    payload = codec.encode(x, keys)
    blocks = codec.decode(payload, x.dtype, keys).view(-1, codec.block)
    assert not blocks[place // codec.block].isfinite().all()
    assert not codec.finite(payload)


@every_codec
def test_bad_values_that_cancel_are_seen(codec: BlockCodec) -> None:
    x = some_gradient(codec)
    x[0, 0], x[1, 0] = torch.inf, -torch.inf
    assert not codec.finite(encoded(codec, x))


@every_codec
def test_finite_speaks_of_values_not_of_their_sum(codec: BlockCodec) -> None:
    """The sum of large finite values may overflow; that must not stop residuals."""
    size = 3e38 if fits(codec, torch.full((1, codec.block), 3e38)) else 6e4
    assert codec.finite(encoded(codec, torch.full((64, codec.block), size)))


@every_codec
@both_dtypes
def test_no_promise_beyond_the_range(codec: BlockCodec, dtype: torch.dtype) -> None:
    """Where a value does not fit the wire, the bound is not finite either."""
    x = some_gradient(codec, dtype)
    x[1] = torch.finfo(dtype).max / 2
    error = (decoded(codec, x) - x).abs()
    assert (error <= codec.error_bound(x)).all() or not fits(codec, x)


@every_codec
@both_dtypes
def test_zero_stays_zero(codec: BlockCodec, dtype: torch.dtype) -> None:
    x = torch.zeros(5, codec.block, dtype=dtype)
    assert not decoded(codec, x).any()


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


@every_codec
def test_the_last_block_counts_whole(codec: BlockCodec) -> None:
    assert codec.wire_bytes(0) == 0
    assert codec.wire_bytes(1) == codec.wire_bytes(codec.block) > 0
    assert codec.wire_bytes(codec.block + 1) == 2 * codec.wire_bytes(codec.block)


@every_codec
def test_a_codec_is_a_value(codec: BlockCodec) -> None:
    """Equal hyperparameters are one key of a dictionary, and nothing can change them."""
    assert {codec: 1} == {type(codec)(**vars(codec)): 1}
    with pytest.raises(AttributeError):
        codec.name = "other"


def test_the_table_is_by_name() -> None:
    assert {name: resolve_codec(name).name for name in CODECS} == {name: name for name in CODECS}


@every_codec
def test_adding_a_payload_is_adding_what_it_decodes_to(codec: BlockCodec) -> None:
    """Bit for bit, whichever way a codec adds; += so that -0.0 counts as 0.0."""
    x, total = some_gradient(codec), some_gradient(codec, seed=1)
    keys = keys_for(codec, x)
    payload = codec.encode(x, keys)
    for weight in (1.0, 0.25, 1 / 3):
        expected = BlockCodec.add(codec, total, payload, weight=weight, keys=keys)
        assert torch.equal(codec.add(total.clone(), payload, weight=weight, keys=keys), expected)


@every_codec
@both_dtypes
def test_blocks_are_coded_alone(codec: BlockCodec, dtype: torch.dtype) -> None:
    """In whatever tiles a tensor is encoded, rows and strides included, the bytes are the same."""
    x = torch.cat([some_gradient(codec, dtype, seed=seed) for seed in range(2)])
    keys = keys_for(codec, x)
    whole = all_bytes(codec.encode(x, keys))
    wide = torch.stack([x, x], dim=0)[:, 1:4]
    wide_keys = None if keys is None else torch.stack([keys, keys])[:, 1:4]
    for plane, tile in zip(whole, all_bytes(codec.encode(wide, wide_keys)), strict=True):
        assert torch.equal(tile[0], plane[1:4])
        assert torch.equal(tile[1], plane[1:4])


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
