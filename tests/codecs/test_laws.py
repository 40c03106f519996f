"""The laws of a codec, over the whole table: a new codec is a new row, not a new test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import TABLE, all_bytes, every_codec, fits, gradients, some_gradient

from lightning_dist.codecs import CODECS, Codec, resolve_codec

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@every_codec
@given(data=st.data())
def test_decoded_gradient_is_within_the_promised_error(codec: Codec, data: st.DataObject) -> None:
    """Shape and dtype stay, and |decode(encode(x)) - x| <= error_bound(x)."""
    x = data.draw(gradients(codec))
    decoded = codec.decode(codec.encode(x), x.dtype)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    bound = codec.error_bound(x).double().expand_as(x)
    error = (decoded.double() - x.double()).abs()
    assert (error <= bound)[bound.isfinite()].all()


@every_codec
@given(data=st.data())
def test_payload_is_laid_out_as_announced(codec: Codec, data: st.DataObject) -> None:
    """Shapes, dtypes and bytes of the payload equal planes() and wire_bytes()."""
    x = data.draw(gradients(codec))
    payload, planes = codec.encode(x), codec.planes(x.dtype)
    assert [plane.dtype for plane in payload] == [plane.dtype for plane in planes]
    assert [plane.shape for plane in payload] == [(*x.shape[:-1], p.per_block) for p in planes]
    assert sum(plane.nbytes for plane in payload) == codec.wire_bytes(x.numel(), x.dtype)


@every_codec
@given(data=st.data())
def test_encoding_is_pure(codec: Codec, data: st.DataObject) -> None:
    """The input is not changed and the same input gives the same bytes."""
    x = data.draw(gradients(codec))
    before = x.clone()
    first = [plane.clone() for plane in all_bytes(codec.encode(x))]
    assert torch.equal(x, before)
    assert all(map(torch.equal, first, all_bytes(codec.encode(before))))


@every_codec
@given(data=st.data())
def test_finite_values_are_finite(codec: Codec, data: st.DataObject) -> None:
    """What the codec can represent decodes to finite values and is reported as finite."""
    x = data.draw(gradients(codec).filter(lambda x: fits(codec, x)))
    payload = codec.encode(x)
    assert codec.finite(payload)
    assert codec.decode(payload, x.dtype).isfinite().all()


@every_codec
@given(data=st.data())
def test_one_bad_value_is_seen(codec: Codec, data: st.DataObject) -> None:
    """One NaN or inf anywhere: its decoded block is not finite, and finite() says so."""
    x = data.draw(gradients(codec).filter(lambda x: fits(codec, x)))
    place = data.draw(st.integers(0, x.numel() - 1))
    x.view(-1)[place] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    payload = codec.encode(x)
    blocks = codec.decode(payload, x.dtype).view(-1, codec.block)
    assert not blocks[place // codec.block].isfinite().all()
    assert not codec.finite(payload)


@every_codec
def test_bad_values_that_cancel_are_seen(codec: Codec) -> None:
    x = some_gradient(codec)
    x[0, 0], x[1, 0] = torch.inf, -torch.inf
    assert not codec.finite(codec.encode(x))


@every_codec
def test_finite_speaks_of_values_not_of_their_sum(codec: Codec) -> None:
    """The sum of large finite values may overflow; that must not stop residuals."""
    size = 3e38 if fits(codec, torch.full((1, codec.block), 3e38)) else 6e4
    assert codec.finite(codec.encode(torch.full((64, codec.block), size)))


@every_codec
@both_dtypes
def test_no_promise_beyond_the_range(codec: Codec, dtype: torch.dtype) -> None:
    """Where a value does not fit the wire, the bound is not finite either."""
    x = some_gradient(codec, dtype)
    x[1] = torch.finfo(dtype).max / 2
    error = (codec.decode(codec.encode(x), dtype) - x).abs()
    assert (error <= codec.error_bound(x)).all() or not fits(codec, x)


@every_codec
@both_dtypes
def test_zero_stays_zero(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.zeros(5, codec.block, dtype=dtype)
    assert not codec.decode(codec.encode(x), dtype).any()


@pytest.mark.parametrize("codec", [c for c in TABLE if c.exchange == "allreduce"], ids=repr)
@given(data=st.data())
def test_payloads_that_the_network_adds_are_linear(codec: Codec, data: st.DataObject) -> None:
    """decode(encode(x) + encode(y)) == x + y within two encodings and one wire addition."""
    x = data.draw(gradients(codec)).view(-1, codec.block)
    y = data.draw(st.sampled_from([x.flip(0), -x, x * 0.5]))
    a, b = codec.encode(x)[0], codec.encode(y)[0]
    sizes = x.double().abs() + y.double().abs()
    addition = torch.finfo(a.dtype).eps * sizes + torch.finfo(a.dtype).tiny
    bound = codec.error_bound(x).double() + codec.error_bound(y).double() + addition
    got = codec.decode((a + b,), x.dtype).double()
    promised = bound.isfinite() & (sizes < torch.finfo(a.dtype).max)
    assert ((got - x.double() - y.double()).abs() <= bound)[promised].all()


@pytest.mark.parametrize("codec", [c for c in TABLE if c.lossless], ids=repr)
@given(data=st.data())
def test_lossless_is_exact(codec: Codec, data: st.DataObject) -> None:
    x = data.draw(gradients(codec))
    assert torch.equal(codec.decode(codec.encode(x), x.dtype), x)


@every_codec
def test_the_last_block_counts_whole(codec: Codec) -> None:
    assert codec.wire_bytes(0) == 0
    assert codec.wire_bytes(1) == codec.wire_bytes(codec.block) > 0
    assert codec.wire_bytes(codec.block + 1) == 2 * codec.wire_bytes(codec.block)


@every_codec
def test_a_codec_is_a_value(codec: Codec) -> None:
    """Equal hyperparameters are one key of a dictionary, and nothing can change them."""
    assert {codec: 1} == {type(codec)(**vars(codec)): 1}
    with pytest.raises(AttributeError):
        codec.name = "other"  # type: ignore[misc]


def test_the_table_is_by_name() -> None:
    assert {name: resolve_codec(name).name for name in CODECS} == {name: name for name in CODECS}
