"""What is worth asking of a run, where nobody says what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_dist.profiling.whatif.buckets import SIZES, recut
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


def in_buckets(wishes: Sequence[Wish], sizes: Sequence[float]) -> list[Wish]:
    """All of them with each of these sizes of buckets, in MB."""
    return [replace(wish, bucket_mb=size) for size in sizes for wish in wishes]


def other_buckets(observed: Observed, *, like: Wish, sizes: Sequence[float] = SIZES) -> list[Wish]:
    """The run's own codec and form in other buckets; sizes that change nothing are left out."""
    seen = [list(observed.buckets)]
    found = []
    for size in sizes:
        buckets = recut(observed.buckets, size, begin=observed.begin)
        if buckets not in seen:
            seen.append(buckets)
            found.append(replace(like, codec=None, form=None, bucket_mb=size))
    return found


def with_own(observed: Observed, wishes: Sequence[Wish]) -> list[Wish]:
    """``wishes``, with the run's own setting wherever they ask about other links or hosts."""
    setting, found = observed.setting, list[Wish]()
    for question in dict.fromkeys(wish.question for wish in wishes):
        alike = [wish for wish in wishes if wish.question == question]
        is_there = any(
            (wish.codec or setting.codec, wish.form or setting.form, wish.bucket_mb)
            == (setting.codec, setting.form, None)
            for wish in alike
        )
        found += alike if is_there or question == Wish() else [question, *alike]
    return found
