"""Size of one exchange. Without torch, because predictions use it too."""

from __future__ import annotations

UNIT_ELEMENTS = 1 << 18  # 1 MB of float32 gradient; measured best of 256 Ki and 1 Mi
_LEAST_ROW_ELEMENTS = 1 << 15  # many ranks: larger units rather than tiny messages
_LEAST_SPARSE_BYTES = 1 << 16  # 2.6 ms at 200 Mbit/s; a message costs 0.1 to 0.4 ms of both nodes


WHOLE_BUCKET = 1 << 62  # an accelerator's network needs no pieces, and each costs launches


def unit_elements(rows: int, *, sparse: float = 0.0, whole: bool = False) -> int:
    """Elements of one unit, of which each of ``rows`` ranks reduces a part.

    Args:
        sparse: bytes per element of a payload that is gathered; 0: another exchange.
        whole: whether whole buckets travel, as on accelerators.
    """
    if whole:
        return WHOLE_BUCKET
    together = int(_LEAST_SPARSE_BYTES / sparse) if sparse else 0
    return max(UNIT_ELEMENTS, rows * _LEAST_ROW_ELEMENTS, together)
