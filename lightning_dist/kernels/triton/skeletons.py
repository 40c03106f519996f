"""The three kernels, for any codec: its two device functions are constants of a launch.

A program works on one tile of the table (see ``table.py``) as ``(BLOCKS, PARTS, WIDTH)`` elements;
``REAL`` of ``WIDTH`` are there, which is a power of two. Pointers that are None leave out what they
are for.
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
    LEVELS: tl.constexpr,
    OPTION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(BLOCKS, PARTS, WIDTH, REAL)
    element = block * BLOCK + place
    filled = _filled(tile, element, WIDTH, REAL, ALIGNMENT)
    x = _load_gradient(flat + tl.multiple_of(tl.load(tile), ALIGNMENT) + element, filled, BF16)
    if residual is not None:
        kept = residual + tl.multiple_of(tl.load(tile + 1), ALIGNMENT) + element
        factor = tl.load(scale)
        x = x + tl.load(kept, mask=filled, other=0.0) * factor
    step, codes = ENCODE(x, _keys(tile, salts, block), place, BLOCK, LEVELS, OPTION)
    codes = codes & (255 >> (8 - 8 // PARTS))
    good = is_finite(step)
    if payload is not None:
        _store_payload(
            payload + _row_start(tile),
            tile,
            step,
            codes,
            BLOCKS,
            PARTS,
            WIDTH,
            REAL,
            CODE_ALIGNMENT,
        )
    if finite is not None:
        tl.store(finite, 0, mask=tl.sum(tl.where(good, 0, 1)) > 0)
    if WRITES_RESIDUAL:
        error = x - LEVEL(codes, LEVELS).to(tl.float32) * step
        new = tl.div_rn(error, tl.zeros_like(error) + factor)
        tl.store(kept, new, mask=filled & good & is_finite(new))


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
    LEVELS: tl.constexpr,
    OPTION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(BLOCKS, PARTS, WIDTH, REAL)
    element = block * BLOCK + place
    exact = _weighted_sum(
        shards,
        stride,
        tile,
        COUNT,
        1.0 / COUNT,
        LEVEL,
        LEVELS,
        BLOCKS,
        PARTS,
        WIDTH,
        REAL,
        CODE_ALIGNMENT,
    )
    step, codes = ENCODE(exact, _keys(tile, salts, block), place, BLOCK, LEVELS, OPTION)
    codes = codes & (255 >> (8 - 8 // PARTS))
    if mean is not None:
        _store_payload(mean, tile, step, codes, BLOCKS, PARTS, WIDTH, REAL, CODE_ALIGNMENT)
    if residual is not None:
        writes = _filled(tile, element, WIDTH, REAL, ALIGNMENT) & is_finite(step)
        kept = residual + tl.multiple_of(tl.load(tile + 1), ALIGNMENT) + element
        error = (exact - LEVEL(codes, LEVELS).to(tl.float32) * step) * (COUNT * 1.0)
        error = tl.div_rn(error, tl.zeros_like(error) + tl.load(scale))
        new = tl.load(kept, mask=writes, other=0.0) + error
        tl.store(kept, new, mask=writes & is_finite(new))


@triton.jit(do_not_specialize=["stride"])
def decode_kernel(
    tiles,
    payloads,  # uint8, COUNT of them
    stride,  # 8 bytes each, from one to the next
    flat,  # gradients; bfloat16 as int16
    COUNT: tl.constexpr,
    WEIGHT: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
    BF16: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * _FIELDS
    block, place = _block_and_place(BLOCKS, PARTS, WIDTH, REAL)
    element = block * BLOCK + place
    row = payloads + _row_start(tile)
    x = _weighted_sum(
        row, stride, tile, COUNT, WEIGHT, LEVEL, LEVELS, BLOCKS, PARTS, WIDTH, REAL, CODE_ALIGNMENT
    )
    filled = _filled(tile, element, WIDTH, REAL, ALIGNMENT)
    at = flat + tl.multiple_of(tl.load(tile), ALIGNMENT) + element
    if BF16:
        tl.store(at, _bfloat16_bits(x), mask=filled)
    else:
        tl.store(at, x.to(flat.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["stride", "numel"])
def sum_kernel(
    target,  # bfloat16 as int16
    source,  # COUNT rows
    stride,  # elements from one to the next
    numel,
    COUNT: tl.constexpr,
    WEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    BF16: tl.constexpr,
    TARGET_BF16: tl.constexpr,
):
    """Uncompressed payloads, each weighted before it is added: a mean does not overflow."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < numel
    x = _load_gradient(source + at, mask, BF16) * WEIGHT
    for rank in range(1, COUNT):
        row = source + rank * stride.to(tl.int64)
        x = x + _load_gradient(row + at, mask, BF16) * WEIGHT
    if TARGET_BF16:
        tl.store(target + at, _bfloat16_bits(x), mask=mask)
    else:
        tl.store(target + at, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _block_and_place(
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr
):
    """Number of a block in the tile, ``(BLOCKS, 1, 1)``, and of an element in its block."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    part = tl.arange(0, PARTS)[None, :, None]
    return block, part * REAL + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _filled(tile, element, WIDTH: tl.constexpr, REAL: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Which elements exist: a slice ends within a block, and rows beyond it are empty."""
    count = tl.multiple_of(tl.load(tile + 2).to(tl.int32), ALIGNMENT)
    filled = element < count
    if WIDTH != REAL:
        filled = filled & (tl.arange(0, WIDTH) < REAL)[None, None, :]
    return filled


@triton.jit
def _row_start(tile):
    """Bytes of the payload before the tile's row; times 8, so that the compiler sees a multiple."""
    return tl.load(tile + 4) * 8


@triton.jit
def _keys(tile, salts, block):
    """``(BLOCKS, 1, 1)`` uint32, or None."""
    if salts is None:
        return None
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
def _bfloat16_bits(x):
    """int16, half to even. In integers: the interpreter cuts where a device rounds."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _store_payload(
    payload,
    tile,
    step,
    codes,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
):
    columns = tl.load(tile + 3).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    width = tl.arange(0, WIDTH)

    steps = tl.reshape(step, (BLOCKS,))
    bits = steps.to(tl.int32, bitcast=True) >> 16
    bits = tl.where(steps == steps, bits, 0x7FC0).to(tl.int16)
    at = (payload + tl.multiple_of(tl.load(tile + 5), 2)).to(tl.pointer_type(tl.int16))
    tl.store(at + block, bits, mask=block < columns)

    shifts = (tl.arange(0, PARTS) * (8 // PARTS))[None, :, None]
    packed = tl.sum(codes << shifts, axis=1).to(tl.uint8)
    at = payload + tl.load(tile + 6) * CODE_ALIGNMENT
    mask = (block < columns)[:, None]
    if WIDTH != REAL:
        mask = mask & (width < REAL)[None, :]
    tl.store(at + (block[:, None] * REAL + width[None, :]), packed, mask=mask)


@triton.jit
def _decoded(
    payload,
    tile,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
):
    columns = tl.load(tile + 3).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    width = tl.arange(0, WIDTH)

    at = (payload + tl.multiple_of(tl.load(tile + 5), 2)).to(tl.pointer_type(tl.int16))
    bits = tl.load(at + block, mask=block < columns, other=0).to(tl.int32) << 16
    step = bits.to(tl.float32, bitcast=True)[:, None, None]

    at = payload + tl.load(tile + 6) * CODE_ALIGNMENT
    mask = (block < columns)[:, None]
    if WIDTH != REAL:
        mask = mask & (width < REAL)[None, :]
    packed = tl.load(at + (block[:, None] * REAL + width[None, :]), mask=mask, other=0)
    shifts = (tl.arange(0, PARTS) * (8 // PARTS))[None, :, None]
    codes = (packed.to(tl.int32)[:, None, :] >> shifts) & (255 >> (8 - 8 // PARTS))
    values = LEVEL(codes, LEVELS).to(tl.float32) * step
    if WIDTH != REAL:  # a code of 0 need not be the number 0
        values = tl.where((width < REAL)[None, None, :], values, 0.0)
    return values


@triton.jit
def _weighted_sum(
    payloads,
    stride,
    tile,
    COUNT: tl.constexpr,
    WEIGHT: tl.constexpr,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
    CODE_ALIGNMENT: tl.constexpr,
):
    """In the order given. Each is weighted before it is added: a mean does not overflow."""
    total = (
        _decoded(payloads, tile, LEVEL, LEVELS, BLOCKS, PARTS, WIDTH, REAL, CODE_ALIGNMENT) * WEIGHT
    )
    for rank in range(1, COUNT):
        payload = payloads + rank * stride.to(tl.int64) * 8
        part = _decoded(payload, tile, LEVEL, LEVELS, BLOCKS, PARTS, WIDTH, REAL, CODE_ALIGNMENT)
        total = total + part * WEIGHT
    return total
