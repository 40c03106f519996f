"""Functions on a device that codecs share, and the three kernels for any codec.

The functions are ``codecs/scales.py`` and ``noise.py`` in Triton. The two of a codec itself are
constants of a launch. A program works on one tile of the table as ``(blocks, parts, width)``
elements; what is known when a kernel is compiled is in ``OF``, a
:class:`~lightning_dist.kernels.triton.table.TileShape`. Pointers that are None leave out what they
are for.

Tiles are ``(blocks, parts, width)``: element ``part * width + j`` of a block has its code in the
bits of ``part`` of byte ``j``, see :func:`lightning_dist.codecs.scales.pack`. What is beyond a
block or a tensor is 0.

The definition is the eager one, to the bit, so the arithmetic is written such that no compiler has
a choice: divisions are rounded (``div_rn``; ``/`` is approximate in float32), NaN and rounding to
integers go by bits and by exact additions, and bfloat16 by integers. Kernels are launched with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HEADROOM: tl.constexpr = tl.constexpr(1.008)
_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_TO_INTEGER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: the sum has no fraction
_FIELDS: tl.constexpr = tl.constexpr(10)


@triton.jit
def is_finite(x):
    """By the bits of float32."""
    return (x.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT


@triton.jit
def largest(x):
    """``max |x|`` of every block, ``(blocks, 1, 1)``; NaN where there is one.

    As integers, whose order is that of floats without a sign, with NaN above all: the maximum of
    GPUs leaves NaN out.
    """
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    highest = tl.max(tl.max(size, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return highest.to(tl.float32, bitcast=True)


@triton.jit
def total(x):
    """Sum of every block, ``(blocks, 1, 1)``."""
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def cut_to_bfloat16(scale):
    """Rounded toward zero to a bfloat16 value, still float32."""
    return (scale.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def block_scale(amax, LEVELS: tl.constexpr):
    """The smallest scale for which ``amax / scale <= LEVELS``, within 0.8 %."""
    return cut_to_bfloat16(amax * (_HEADROOM / LEVELS))


@triton.jit
def in_steps(x, scale):
    """``x / scale`` by the rounded reciprocal, finite where the scale is 0; 0 in place of NaN.

    The eager definition turns NaN into integers, of which C says nothing: a code of such a block
    may be any, its scale is not finite.
    """
    step = tl.where(scale < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)
    y = x * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return tl.where(y == y, y, 0.0)


@triton.jit
def nearest(y):
    """int32, half to even; ``|y| < 2**22``."""
    return ((y + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)


@triton.jit
def mix(x):
    """uint32 -> uint32, the hash of ``codecs/noise.py``."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def block_keys(numbers, salt):
    """One key for every block number (uint32) under ``salt`` (uint32)."""
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    return mix(mix(numbers * golden + tl.full([], 1, tl.uint32)) ^ salt)


@triton.jit
def round_at_random(y, keys, place):
    """int32, one of the two integers around ``y``, ``|y| < 127.5``; ``place``: in its block."""
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    noise = mix(keys + place.to(tl.uint32) * golden) >> 8
    return ((y * 16777216.0).to(tl.int32) + noise.to(tl.int32)) >> 24


@triton.jit(do_not_specialize_on_alignment=["salts"])
def encode_kernel(
    tiles,  # int64
    flat,  # gradients; bfloat16 as int16
    residual,  # float32, or None
    scale,  # float32, the GradScaler's
    payload,  # uint8, or None: only the residuals are wanted
    finite,  # uint8, set to 0 where a block is not finite; or None
    salts,  # int32, one for each slice; or None
    WRITES_RESIDUAL: tl.constexpr,
    ENCODE: tl.constexpr,
    LEVEL: tl.constexpr,
    OF: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(OF)
    element = block * OF.block + place
    filled = _filled(tile, element, OF)
    x = _load_gradient(flat + _start(tile, OF) + element, filled, BF16)
    if residual is not None:
        kept = residual + _start(tile + 1, OF) + element
        factor = tl.load(scale)
        old = tl.load(kept, mask=filled, other=0.0)
        x = x + old * factor
    if OF.raw is not None:
        good = is_finite(x)
        _store_raw(payload + _row_start(tile), tile, x, OF)
    else:
        step, codes = ENCODE(x, _keys(tile, salts, block), place, OF)
        codes = codes & OF.mask
        good = is_finite(step)
        if payload is not None:
            _store_payload(payload + _row_start(tile), tile, step, codes, OF)
    if finite is not None:
        tl.store(finite, 0, mask=tl.sum(tl.where(good, 0, 1)) > 0)
    if WRITES_RESIDUAL:
        error = x - LEVEL(codes, OF).to(tl.float32) * step
        new = tl.div_rn(error, tl.zeros_like(error) + factor)
        # A mask of its own for each element would make a store of each.
        tl.store(kept, tl.where(good & is_finite(new), new, old), mask=filled)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["salts"])
def reduce_kernel(
    tiles,  # of one row
    shards,  # uint8, this row of COUNT ranks
    stride,  # 8 bytes each, from one to the next
    mean,  # uint8, or None: only the second error is wanted
    residual,  # float32, or None
    scale,
    salts,
    COUNT: tl.constexpr,
    ENCODE: tl.constexpr,
    LEVEL: tl.constexpr,
    OF: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(OF)
    element = block * OF.block + place
    exact = _weighted_sum(shards, stride, tile, COUNT, 1.0 / COUNT, LEVEL, OF)
    if OF.raw is not None:
        _store_raw(mean, tile, exact, OF)
    else:
        step, codes = ENCODE(exact, _keys(tile, salts, block), place, OF)
        codes = codes & OF.mask
        if mean is not None:
            _store_payload(mean, tile, step, codes, OF)
        if residual is not None:
            filled = _filled(tile, element, OF)
            kept = residual + _start(tile + 1, OF) + element
            error = (exact - LEVEL(codes, OF).to(tl.float32) * step) * (COUNT * 1.0)
            error = tl.div_rn(error, tl.zeros_like(error) + tl.load(scale))
            old = tl.load(kept, mask=filled, other=0.0)
            new = old + error
            tl.store(kept, tl.where(is_finite(step) & is_finite(new), new, old), mask=filled)


@triton.jit(do_not_specialize=["stride"])
def decode_kernel(
    tiles,
    payloads,  # uint8, COUNT of them
    stride,  # 8 bytes each, from one to the next
    flat,  # gradients; bfloat16 as int16
    COUNT: tl.constexpr,
    WEIGHT: tl.constexpr,
    LEVEL: tl.constexpr,
    OF: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(OF)
    element = block * OF.block + place
    x = _weighted_sum(payloads + _row_start(tile), stride, tile, COUNT, WEIGHT, LEVEL, OF)
    at = flat + _start(tile, OF) + element
    _store_gradient(at, x, _filled(tile, element, OF), BF16)


@triton.jit
def _block_and_place(OF: tl.constexpr):
    """Number of a block in the tile, ``(blocks, 1, 1)``, and of an element in its block."""
    block = tl.arange(0, OF.blocks)[:, None, None]
    part = tl.arange(0, OF.parts)[None, :, None]
    return block, part * OF.real + tl.arange(0, OF.width)[None, None, :]


@triton.jit
def _start(field, OF: tl.constexpr):
    """Elements before a tile, of the gradient or of the residuals."""
    ALIGNMENT: tl.constexpr = OF.alignment
    return tl.multiple_of(tl.load(field), ALIGNMENT)


@triton.jit
def _filled(tile, element, OF: tl.constexpr):
    """Which elements exist: a slice ends within a block, and rows beyond it are empty."""
    ALIGNMENT: tl.constexpr = OF.alignment
    filled = element < tl.multiple_of(tl.load(tile + 2).to(tl.int32), ALIGNMENT)
    if OF.width != OF.real:
        filled = filled & (tl.arange(0, OF.width) < OF.real)[None, None, :]
    return filled


@triton.jit
def _row_start(tile):
    """Bytes of the payload before the tile's row; times 8, so that the compiler sees a multiple."""
    return tl.load(tile + 4) * 8


@triton.jit
def _keys(tile, salts, block):
    """``(blocks, 1, 1)`` uint32; numbers of no use where there are no salts."""
    if salts is None:
        return block  # Triton 3.6 cannot return None
    else:
        salt = tl.load(salts + tl.load(tile + 8)).to(tl.uint32, bitcast=True)
        return block_keys(tl.load(tile + 7).to(tl.uint32) + block.to(tl.uint32), salt)


@triton.jit
def _load_gradient(at, mask, BF16: tl.constexpr):
    if BF16:
        bits = tl.load(at, mask=mask, other=0).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_gradient(at, x, mask, BF16: tl.constexpr):
    """bfloat16 half to even. In integers: the interpreter cuts where a device rounds."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(at, tl.where(x == x, rounded, 0x7FC0).to(tl.int16), mask=mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _planes(payload, tile, OF: tl.constexpr):
    """Places of the scales and of the codes in a row of a payload, and which of both exist."""
    CODE_ALIGNMENT: tl.constexpr = OF.code_alignment
    block, width = tl.arange(0, OF.blocks), tl.arange(0, OF.width)
    exists = block < tl.load(tile + 3).to(tl.int32)
    scales = (payload + tl.multiple_of(tl.load(tile + 5), 2)).to(tl.pointer_type(tl.int16)) + block
    codes = payload + tl.load(tile + 6) * CODE_ALIGNMENT
    codes = codes + (block[:, None] * OF.real + width[None, :])
    with_code = exists[:, None]
    if OF.width != OF.real:
        with_code = with_code & (width < OF.real)[None, :]
    return scales, exists, codes, with_code


@triton.jit
def _store_payload(payload, tile, step, codes, OF: tl.constexpr):
    at_scales, exists, at_codes, with_code = _planes(payload, tile, OF)
    steps = tl.reshape(step, (OF.blocks,))
    bits = steps.to(tl.int32, bitcast=True) >> 16
    tl.store(at_scales, tl.where(steps == steps, bits, 0x7FC0).to(tl.int16), mask=exists)
    shifts = (tl.arange(0, OF.parts) * OF.bits)[None, :, None]
    tl.store(at_codes, tl.sum(codes << shifts, axis=1).to(tl.uint8), mask=with_code)


@triton.jit
def _raw_places(payload, tile, OF: tl.constexpr):
    """Places of elements that are not compressed, ``(blocks, 1, 1)``, and which exist."""
    CODE_ALIGNMENT: tl.constexpr = OF.code_alignment
    ALIGNMENT: tl.constexpr = OF.alignment
    element = tl.arange(0, OF.blocks)[:, None, None]
    first = (payload + tl.load(tile + 6) * CODE_ALIGNMENT).to(tl.pointer_type(OF.raw))
    return first + element, element < tl.multiple_of(tl.load(tile + 3).to(tl.int32), ALIGNMENT)


@triton.jit
def _store_raw(payload, tile, x, OF: tl.constexpr):
    at, exists = _raw_places(payload, tile, OF)
    _store_gradient(at, x, exists, OF.raw_is_bfloat16)


@triton.jit
def _decoded(payload, tile, LEVEL: tl.constexpr, OF: tl.constexpr):
    if OF.raw is not None:
        at, exists = _raw_places(payload, tile, OF)
        return _load_gradient(at, exists, OF.raw_is_bfloat16)
    else:
        return _decoded_codes(payload, tile, LEVEL, OF)


@triton.jit
def _decoded_codes(payload, tile, LEVEL: tl.constexpr, OF: tl.constexpr):
    at_scales, exists, at_codes, with_code = _planes(payload, tile, OF)
    bits = tl.load(at_scales, mask=exists, other=0).to(tl.int32) << 16
    step = bits.to(tl.float32, bitcast=True)[:, None, None]
    packed = tl.load(at_codes, mask=with_code, other=0)
    shifts = (tl.arange(0, OF.parts) * OF.bits)[None, :, None]
    codes = (packed.to(tl.int32)[:, None, :] >> shifts) & OF.mask
    values = LEVEL(codes, OF).to(tl.float32) * step
    if OF.width != OF.real:  # a code of 0 need not be the number 0
        values = tl.where((tl.arange(0, OF.width) < OF.real)[None, None, :], values, 0.0)
    return values


@triton.jit
def _weighted_sum(
    payloads,
    stride,
    tile,
    COUNT: tl.constexpr,
    WEIGHT: tl.constexpr,
    LEVEL: tl.constexpr,
    OF: tl.constexpr,
):
    """Sum in the order given. Each is weighted before it is added: a mean does not overflow."""
    summed = _decoded(payloads, tile, LEVEL, OF) * WEIGHT
    for rank in range(1, COUNT):
        payload = payloads + rank * stride.to(tl.int64) * 8
        summed = summed + _decoded(payload, tile, LEVEL, OF) * WEIGHT
    return summed
