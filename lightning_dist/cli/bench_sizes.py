"""Sizes as users write them: ``64KB:64MB``, ``1MiB,8MiB``."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMG", start=1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMG", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")
STEP = 4
"""Between the sizes of a range."""


def sizes_of(text: str) -> tuple[int, ...]:
    """Bytes of every size that ``text`` names: a list, or a range in steps of :data:`STEP`.

    Raises:
        ValueError: it names none.
    """
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(_bytes(each) for each in text.split(","))
    size, largest = _bytes(first), _bytes(last)
    if size > largest:
        raise ValueError(f"--sizes must be MIN:MAX with MIN <= MAX, it is {text}")
    sizes = []
    while size < largest:
        sizes.append(size)
        size *= STEP
    return (*sizes, largest)


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None or found[2] not in _UNITS or (size := float(found[1]) * _UNITS[found[2]]) < 1:
        raise ValueError(
            f"--sizes must be like 64KB:64MB or 1MB,8MB (KB: 1000 bytes, KiB: 1024), and in it is "
            f"{text!r}"
        )
    return int(size)
