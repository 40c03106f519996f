"""Ends of collectives: each is recorded when it comes, whatever else is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.recorder import ThreadCompletionWatcher

PATIENCE = 10


class Work:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.seen = threading.Event()

    def end(self) -> bool:
        """Whether that was seen soon."""
        self._over.set()
        return self.seen.wait(PATIENCE)

    def wait(self) -> None:
        assert self._over.wait(3 * PATIENCE)


@pytest.fixture
def watcher() -> Iterator[ThreadCompletionWatcher]:
    watching = ThreadCompletionWatcher(time.monotonic_ns)
    yield watching
    watching.close()


def launched(watcher: ThreadCompletionWatcher, group: str) -> Work:
    work = Work()
    watcher.watch(work, lambda end: work.seen.set(), group=group)
    return work


def test_an_exchange_within_a_host_ends_before_one_between_hosts_that_began_earlier() -> None:
    has_ended = threading.Event()

    def one(rank: Rank) -> tuple[int, dict[str, int]]:
        groups = {name: rank.group(name) for name in ("inter", "intra")}
        watcher, ends, late = ThreadCompletionWatcher(time.monotonic_ns), dict[str, int](), 0

        def launch(name: str) -> None:
            def ended(end: int) -> None:
                ends[name] = end
                if (rank.rank, name) == (0, "intra"):
                    has_ended.set()

            work = dist.all_reduce(torch.ones(8), group=groups[name], async_op=True)
            watcher.watch(work, ended, group=name)

        if rank.rank == 0:
            launch("inter")
            launch("intra")
        else:
            launch("intra")
            assert has_ended.wait(PATIENCE), "the end of the other exchange was not recorded"
            late = time.monotonic_ns()
            launch("inter")
        assert watcher.drain(2 * PATIENCE)
        watcher.close()
        return late, ends

    (_, ends), (late, _) = run_threads(one, 2)
    assert ends["intra"] < late < ends["inter"]


def test_groups_do_not_wait_for_each_other(watcher: ThreadCompletionWatcher) -> None:
    across, within, control = (launched(watcher, name) for name in ("inter", "intra", "control"))
    assert within.end()
    assert control.end()
    assert not across.seen.is_set()
    assert not watcher.drain(0)
    assert across.end()
    assert watcher.drain(PATIENCE)


def test_a_short_one_does_not_wait_for_the_long_one_before_it(
    watcher: ThreadCompletionWatcher,
) -> None:
    """gloo has two of a group under way at once."""
    long, *others = [launched(watcher, "flat") for _ in range(5)]
    assert all(each.end() for each in others)
    assert not long.seen.is_set()
    assert long.end()


def test_no_more_threads_than_collectives_under_way() -> None:
    before = threading.active_count()
    watcher = ThreadCompletionWatcher(time.monotonic_ns)
    alone = launched(watcher, "control")
    assert threading.active_count() == before + 1
    works = [launched(watcher, "flat") for _ in range(40)]
    assert threading.active_count() == before + 3
    assert all(each.end() for each in (alone, *works))
    watcher.close()
