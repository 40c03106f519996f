"""Laws of a block codec, on which exchanges, error feedback and GradScalers rely.

:func:`check_codec` checks a codec of your own. The tests of this package check the same laws for
every codec of the table, with gradients from hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Payload
from lightning_dist.codecs.noise import block_keys

_DTYPES = (torch.float32, torch.float64)


def check_codec(codec: BlockCodec) -> None:
    """Check all laws on some gradients: zeros, sizes from 1e-44 to 1e30, spikes, NaN and inf.

    Raises:
        AssertionError: a law does not hold; the message has its name and the gradient.
    """
    for law in LAWS:
        _within(law.__name__, lambda: law(codec))  # noqa: B023  (called at once)
    for case, x in _gradients(codec):
        for place, bad in ((0, math.nan), (x.numel() - 1, math.inf), (x.numel() // 2, -math.inf)):
            _within(f"holds_for, {case}", lambda: holds_for(codec, x, place, bad))  # noqa: B023


def holds_for(codec: BlockCodec, x: Tensor, place: int, bad: float) -> None:
    """Laws of any gradient ``x (..., B, block)`` of finite values up to 1e30.

    Args:
        place, bad: an element of ``x``, and a value that is not finite to replace it with.
    """
    before, keys = x.clone(), keys_for(codec, x)
    payload = codec.encode(x, keys)
    got = codec.decode(payload, x.dtype, keys)
    assert torch.equal(x, before), "encoding must not change its input"
    first = [plane.clone() for plane in all_bytes(payload)]
    again = all_bytes(codec.encode(before, keys))
    assert all(map(torch.equal, first, again)), "the same input must give the same bytes"
    assert (got.shape, got.dtype) == (x.shape, x.dtype), "decoding must keep shape and dtype"
    bound = codec.error_bound(x).double().expand_as(x)
    error = (got.double() - x.double()).abs()
    assert (error <= bound)[bound.isfinite()].all(), "|decode(encode(x)) - x| <= error_bound(x)"
    assert not codec.lossless or torch.equal(got, x), "lossless: decode(encode(x)) == x"
    planes = codec.planes(x.dtype)
    shapes = [(*x.shape[:-1], plane.per_block) for plane in planes]
    assert [plane.dtype for plane in payload] == [plane.dtype for plane in planes], "planes: dtypes"
    assert [plane.shape for plane in payload] == shapes, "planes: shapes"
    nbytes = codec.wire_bytes(x.numel(), x.dtype)
    assert sum(plane.nbytes for plane in payload) == nbytes, "wire_bytes"
    _decodes_alike(codec, x.float())
    _sees_bad_values(codec, x if fits(codec, x) else x / x.abs().amax(), place, bad)


def _decodes_alike(codec: BlockCodec, x: Tensor) -> None:
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
        assert torch.equal(single, double), "float32 and float64 must decode to the same numbers"


def _sees_bad_values(codec: BlockCodec, x: Tensor, place: int, bad: float) -> None:
    """Representable values decode to finite ones and are reported as finite.

    With one NaN or inf anywhere its decoded block is not finite, and finite() says so.
    """
    assert fits(codec, x), "error_bound must be finite for moderate values"
    keys = keys_for(codec, x)
    payload = codec.encode(x, keys)
    assert codec.finite(payload), "finite() must be true for finite values"
    assert codec.decode(payload, x.dtype, keys).isfinite().all(), "finite values must stay finite"
    x = x.clone()
    x.view(-1)[place] = bad
    payload = codec.encode(x, keys)
    blocks = codec.decode(payload, x.dtype, keys).view(-1, codec.block)
    seen = not blocks[place // codec.block].isfinite().all()
    assert seen, "a block with a value that is not finite must not decode to finite values"
    assert not codec.finite(payload), "finite() must see a value that is not finite"


def bad_values_that_cancel_are_seen(codec: BlockCodec) -> None:
    """``finite`` must not add what may cancel."""
    x = some_gradient(codec)
    x[0, 0], x[1, 0] = torch.inf, -torch.inf
    assert not codec.finite(encoded(codec, x))


def finite_speaks_of_values_not_of_their_sum(codec: BlockCodec) -> None:
    """The sum of large finite values may overflow; that must not stop residuals."""
    size = 3e38 if fits(codec, torch.full((1, codec.block), 3e38)) else 6e4
    assert codec.finite(encoded(codec, torch.full((64, codec.block), size)))


def no_promise_beyond_the_range(codec: BlockCodec) -> None:
    """Where a value does not fit the wire, the bound is not finite either."""
    for dtype in _DTYPES:
        x = some_gradient(codec, dtype)
        x[1] = torch.finfo(dtype).max / 2
        error = (decoded(codec, x) - x).abs()
        assert (error <= codec.error_bound(x)).all() or not fits(codec, x), dtype


def zero_stays_zero(codec: BlockCodec) -> None:
    """Otherwise unused parameters would drift."""
    for dtype in _DTYPES:
        assert not decoded(codec, torch.zeros(5, codec.block, dtype=dtype)).any(), dtype


def the_last_block_counts_whole(codec: BlockCodec) -> None:
    """``wire_bytes`` is of whole blocks."""
    assert codec.wire_bytes(0) == 0
    assert codec.wire_bytes(1) == codec.wire_bytes(codec.block) > 0
    assert codec.wire_bytes(codec.block + 1) == 2 * codec.wire_bytes(codec.block)


def a_codec_is_a_value(codec: BlockCodec) -> None:
    """Equal hyperparameters are one key of a dictionary, and nothing can change them."""
    assert {codec: 1} == {type(codec)(**vars(codec)): 1}
    try:
        codec.name = "other"  # type: ignore[misc]
    except AttributeError:
        return
    raise AssertionError("a codec must be a frozen dataclass")


def adding_a_payload_is_adding_what_it_decodes_to(codec: BlockCodec) -> None:
    """Bit for bit, whichever way a codec adds; += so that -0.0 counts as 0.0."""
    x, total = some_gradient(codec), some_gradient(codec, seed=1)
    keys = keys_for(codec, x)
    payload = codec.encode(x, keys)
    for weight in (1.0, 0.25, 1 / 3):
        expected = BlockCodec.add(codec, total, payload, weight=weight, keys=keys)
        got = codec.add(total.clone(), payload, weight=weight, keys=keys)
        assert torch.equal(got, expected), weight


def blocks_are_coded_alone(codec: BlockCodec) -> None:
    """In whatever tiles a tensor is encoded, rows and strides included, the bytes are the same."""
    for dtype in _DTYPES:
        x = torch.cat([some_gradient(codec, dtype, seed=seed) for seed in range(2)])
        keys = keys_for(codec, x)
        whole = all_bytes(codec.encode(x, keys))
        wide = torch.stack([x, x], dim=0)[:, 1:4]
        wide_keys = None if keys is None else torch.stack([keys, keys])[:, 1:4]
        for plane, tile in zip(whole, all_bytes(codec.encode(wide, wide_keys)), strict=True):
            assert torch.equal(tile[0], plane[1:4]), dtype
            assert torch.equal(tile[1], plane[1:4]), dtype


LAWS: tuple[Callable[[BlockCodec], None], ...] = (
    bad_values_that_cancel_are_seen,
    finite_speaks_of_values_not_of_their_sum,
    no_promise_beyond_the_range,
    zero_stays_zero,
    the_last_block_counts_whole,
    a_codec_is_a_value,
    adding_a_payload_is_adding_what_it_decodes_to,
    blocks_are_coded_alone,
)
"""Laws with gradients of their own; :func:`holds_for` takes any."""


def some_gradient(
    codec: BlockCodec, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> Tensor:
    """``(3, block)`` normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, codec.block, generator=generator, dtype=dtype)


def keys_for(codec: BlockCodec, x: Tensor, *, salt: int = 0) -> Tensor | None:
    """One key for every block of ``x (..., B, block)`` where the codec draws random numbers."""
    if not codec.stochastic:
        return None
    blocks = torch.arange(x.numel() // codec.block, dtype=torch.int32)
    return block_keys(blocks, salt).view(*x.shape[:-1], 1)


def encoded(codec: BlockCodec, x: Tensor) -> Payload:
    """The payload of ``x``."""
    return codec.encode(x, keys_for(codec, x))


def decoded(codec: BlockCodec, x: Tensor, *, salt: int = 0) -> Tensor:
    """``decode(encode(x))`` in the dtype of ``x``."""
    keys = keys_for(codec, x, salt=salt)
    return codec.decode(codec.encode(x, keys), x.dtype, keys)


def fits(codec: BlockCodec, x: Tensor) -> bool:
    """Whether every value is in the range of the codec."""
    return bool(codec.error_bound(x).isfinite().all())


def all_bytes(payload: Payload) -> list[Tensor]:
    """Every plane as uint8."""
    return [plane.contiguous().view(torch.uint8) for plane in payload]


def _gradients(codec: BlockCodec) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        for size in (0.0, 1e-44, 1e-38, 1e-20, 1.0, 1e30):
            for rows in ((), (3,)):
                shape = (*rows, 3, codec.block)
                x = torch.randn(shape, generator=generator, dtype=dtype) * size
                yield f"normal numbers times {size} in {dtype}", x.clamp(-1e30, 1e30)
                spiked = x.clone()
                spiked.view(-1)[x.numel() // 3] = 1e30
                yield f"the same with a spike of 1e30 in {dtype}", spiked.clamp(-1e30, 1e30)
                yield f"one value, {size}, in {dtype}", torch.full(shape, size, dtype=dtype)


def _within(law: str, call: Callable[[], None]) -> None:
    try:
        call()
    except AssertionError as error:
        raise AssertionError(f"{law}: {error}") from None
