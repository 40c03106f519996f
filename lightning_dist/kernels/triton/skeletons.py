"""The three kernels, for any codec: its two device functions are constants of a launch.

A program works on one tile of the table as ``(blocks, parts, width)`` elements. What is known when
a kernel is compiled is in ``OF``, a :class:`~lightning_dist.kernels.triton.table.TileShape`.
Pointers that are None leave out what they are for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_dist.kernels.triton.device import block_keys, is_finite

_FIELDS: tl.constexpr = tl.constexpr(10)


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
    """In the order given. Each is weighted before it is added: a mean does not overflow."""
    total = _decoded(payloads, tile, LEVEL, OF) * WEIGHT
    for rank in range(1, COUNT):
        payload = payloads + rank * stride.to(tl.int64) * 8
        total = total + _decoded(payload, tile, LEVEL, OF) * WEIGHT
    return total
