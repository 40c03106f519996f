"""Checksums of parts give the checksum of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.disk.archive import combine, combined, crc32


@given(st.binary(), st.binary())
def test_two_parts(first: bytes, second: bytes) -> None:
    whole = combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert whole == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=300)))
def test_many_parts(parts: list[bytes]) -> None:
    whole = zlib.crc32(b"".join(parts))
    assert combined((zlib.crc32(part), len(part)) for part in parts) == whole
    assert crc32(parts) == whole
    assert crc32(map(memoryview, parts)) == whole


@given(st.binary(max_size=40), st.integers(0, 1 << 22))
def test_long_second_parts(first: bytes, nbytes: int) -> None:
    zeros = zlib.crc32(bytes(nbytes))
    assert combine(zlib.crc32(first), zeros, nbytes) == zlib.crc32(bytes(nbytes), zlib.crc32(first))


def test_parts_beyond_four_gib() -> None:
    """Five times a GiB of zeros, from the checksum of one."""
    gib = combined([(zlib.crc32(bytes(1 << 20)), 1 << 20)] * 1024)
    whole = combined([(gib, 1 << 30)] * 5)
    assert combine(0, whole, 5 << 30) == whole
    halves = combine(combined([(gib, 1 << 30)] * 2), combined([(gib, 1 << 30)] * 3), 3 << 30)
    assert halves == whole


def test_nothing_changes_nothing() -> None:
    assert combined([]) == 0
    assert combine(0x12345678, 0, 0) == 0x12345678
