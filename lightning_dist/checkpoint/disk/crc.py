"""CRC-32 of things that are put together from pieces."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320
"""CRC-32 of zip and zlib, lowest power of x in the highest bit."""


def crc32(chunks: Iterable[bytes | memoryview]) -> int:
    """CRC-32 of the chunks, one after the other."""
    value = 0
    for chunk in chunks:
        value = zlib.crc32(chunk, value)
    return value


def _times(a: int, b: int) -> int:
    """``a * b`` modulo the polynomial, over GF(2)."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32 of ``A + B``, from the CRC-32 of ``A``, that of ``B`` and the length of ``B``.

    Appending n bytes multiplies a CRC by x^(8n); the power is found by squaring, as in zlib's
    ``crc32_combine``.
    """
    power, square = 1 << 31, 1 << 23  # x^0 and x^8
    while nbytes:
        if nbytes & 1:
            power = _times(square, power)
        square = _times(square, square)
        nbytes >>= 1
    return _times(power, first) ^ second


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of parts given as ``(crc32, nbytes)``, in order."""
    value = 0
    for crc, nbytes in parts:
        value = combine(value, crc, nbytes)
    return value
