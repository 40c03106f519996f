"""Which rank of a host is responsible for which part of a parameter. Arithmetic only.

A parameter is cut into fragments, each of which crosses between hosts by itself, and a fragment
into one share for each owner. As with blocks the cut depends on the parameter alone, not on the
bucket or the codec: the state of a part stays on the rank that it was on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

_ALIGN = 512  # elements; every dense codec's block divides it, so that few blocks are broken


@dataclass(frozen=True)
class Fragment:
    """Part of a flat parameter: ``(start, end)`` for every member of the group, in rank order."""

    shares: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(end - start for start, end in self.shares)


def fragments(
    name: str,
    numel: int,
    *,
    members: int,
    owners: int,
    most: int,
    whole: bool,
    beyond: int = 1,
) -> Iterator[Fragment]:
    """Cut a parameter of ``numel`` elements.

    Args:
        members: ranks of the group, of which the first ``owners`` have shares.
        most: elements of a share.
        whole: one owner takes it all; for codecs of matrices.
        beyond: ranks that a share goes to on the levels outside this one.
    """
    # Small parameters belong to one rank: take turns, on every level by other bits of the hash.
    first = zlib.crc32(name.encode()) // beyond % owners
    none = [(0, 0)] * members
    if whole:
        yield Fragment((*none[:first], (0, numel), *none[first + 1 :]))
        return
    for start in range(0, numel, owners * most):
        end = min(start + owners * most, numel)
        share = -(-(end - start) // (owners * _ALIGN)) * _ALIGN
        cuts = list(none)
        for turn in range(owners):
            at = min(start + turn * share, end)
            cuts[(first + turn) % owners] = at, min(at + share, end)
        yield Fragment(tuple(cuts))
