"""What is worth asking of a run, where nobody says what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.profiling.whatif.predict import Wish
from lightning_dist.profiling.whatif.setting import DDP, FLAT, FORMS

SCALE = tuple(2**power for power in range(1, 11))
"""Hosts of a table of many."""


def candidates(
    observed: Observed,
    codecs: Iterable[str],
    *,
    like: Wish,
    forms: Sequence[str] | None = None,
    ddp: bool = True,
) -> list[Wish]:
    """Every codec, flat and, where hosts have several ranks, by hosts.

    Args:
        like: what is the same for all: links, hosts.
        forms: only these.
        ddp: stock DDP too.
    """
    several = max(observed.setting.counts) > 1
    chosen = forms or (FORMS if several else (FLAT,))
    wishes = [replace(like, codec=DDP, form=FLAT)] if ddp and FLAT in chosen else []
    return wishes + [replace(like, codec=name, form=form) for form in chosen for name in codecs]


def scaled(wishes: Sequence[Wish], hosts: Sequence[int] = SCALE) -> list[Wish]:
    """All of them for each number of hosts."""
    return [replace(wish, hosts=count) for count in hosts for wish in wishes]
