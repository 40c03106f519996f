"""The laws of a codec, over the whole table: a new codec is a new row, not a new test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import TABLE, every_codec, gradients

from lightning_dist.codecs import CODECS, BlockCodec, laws, resolve_codec
from lightning_dist.codecs.laws import decoded, encoded, keys_for, some_gradient


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
