"""Shares of the ranks of a host in each parameter. Arithmetic only.

A parameter is cut into fragments, each of which crosses between hosts by itself, and a fragment
into one share for each owner. As with blocks the cut depends on the parameter alone, not on the
bucket or the codec: the state of a part stays on the rank that it was on.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from lightning_dist.reducer.plan.slices import ParameterSlice, as_one, neighbours
from lightning_dist.topology.groups import Level

_ALIGN = 512  # elements; every dense codec's block divides it, so that few blocks are broken

Fragment: TypeAlias = tuple[tuple[int, int], ...]
"""Part of a flat parameter: the share ``(start, end)`` of every owner, perhaps an empty one."""

Cut: TypeAlias = tuple[ParameterSlice, Fragment]


def fragments(name: str, numel: int, *, owners: int, most: int, whole: bool) -> Iterator[Fragment]:
    """Cut a parameter of ``numel`` elements.

    Args:
        most: elements of a share.
        whole: one owner takes it all; for codecs of matrices.
    """
    first = zlib.crc32(name.encode()) % owners  # small parameters belong to one rank: take turns
    step = max(numel, 1) if whole else owners * most
    for start in range(0, numel, step):
        end = min(start + step, numel)
        share = end - start if whole else -(-(end - start) // (owners * _ALIGN)) * _ALIGN
        at = [min(start + turn * share, end) for turn in range(owners + 1)]
        turns = [(owner - first) % owners for owner in range(owners)]
        yield tuple((at[turn], at[turn + 1]) for turn in turns)


def units_of_shares(
    slices: Sequence[ParameterSlice],
    *,
    level: Level,
    most: int,
    whole: Collection[str],
    separate: bool,
    together: bool,
) -> Iterator[list[Cut]]:
    """Units inside a host: fragments of ``slices``.

    Args:
        most: elements of a share on the way between hosts.
        whole: names of the parameters that one rank takes on as they are.
        separate: parameters must not be joined, because blocks or state belong to one.
        together: all of it is one unit.
    """
    cuts, filled = list[Cut](), 0
    for part in slices if separate else map(as_one, neighbours(slices)):
        is_whole = separate and part.name in whole
        for fragment in fragments(
            part.name, part.numel, owners=level.owners, most=most, whole=is_whole
        ):
            numel = sum(end - start for start, end in fragment)
            if cuts and filled + numel > level.owners * most and not together:
                yield cuts
                cuts, filled = [], 0
            cuts.append((part, fragment))
            filled += numel
    if cuts:
        yield cuts


def shares_of(cuts: Sequence[Cut], position: int) -> list[ParameterSlice]:
    """Share of the rank at ``position`` of its group, in the order of the bucket."""
    found = []
    for part, fragment in cuts:
        start, end = fragment[position] if position < len(fragment) else (0, 0)
        if end - start == part.numel:
            found.append(part)
        elif end > start:
            before, after = part.start + start, part.rest + part.numel - end
            at = part.offset + start
            found.append(ParameterSlice(part.name, at, (end - start,), before, after))
    return found
