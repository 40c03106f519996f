"""Seeds that depend on what they are for, not on who asks or when."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A seed of 63 bits for one purpose: the same everywhere, and unlike that of any other."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
