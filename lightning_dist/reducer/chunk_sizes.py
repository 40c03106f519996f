"""How much of a bucket is one exchange. No torch: predictions ask too."""

from __future__ import annotations

CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32 gradient; measured best of 256 Ki and 1 Mi
_LEAST_ROW_ELEMENTS = 1 << 15  # many ranks: larger chunks rather than tiny messages


def chunk_elements(rows: int) -> int:
    """Elements of one chunk, of which each of ``rows`` ranks reduces a part."""
    return max(CHUNK_ELEMENTS, rows * _LEAST_ROW_ELEMENTS)
