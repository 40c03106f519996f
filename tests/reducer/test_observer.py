"""What an observer is told: every collective and every byte, without changing a bit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from feeding import EVERY_CODEC, Fed, backward, compressed, feed, step_digest
from layouts import FORMS, Layout, flat
from worlds import Rank, run_threads

from lightning_dist.exchange.channel import PendingWork
from lightning_dist.reducer.observer import Observer, Phase
from lightning_dist.reducer.units.base import CodecGroup

SETTINGS = {"min_compress_numel": 256}


@dataclass
class Story(Observer):
    """Everything that was told, with what was going on."""

    open: Counter[str] = field(default_factory=Counter)
    collectives: list[tuple[str, str, int]] = field(default_factory=list)
    under_way: list[PendingWork] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    finished_steps: list[list[int]] = field(default_factory=list)
    codecs: set[str] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)

    def ready(self, bucket: int) -> None:
        self.buckets.append(bucket)

    def works(self, bucket: int, phase: Phase) -> Callable[[], None]:
        self.threads.add(threading.get_ident())
        return self._begin(f"{phase} {bucket}")

    def launches(self, op: str, *, group: str, sent: int) -> Callable[[PendingWork], None]:
        self.collectives.append((group, op, sent))
        return self.under_way.append

    def waits(self) -> Callable[[], None]:
        self.threads.add(threading.get_ident())
        return self._begin("waits")

    def finished(self, buckets: Sequence[tuple[int, Sequence[CodecGroup]]]) -> None:
        self.finished_steps.append([index for index, _ in buckets])
        self.codecs |= {group.codec.name for _, groups in buckets for group in groups}

    def _begin(self, what: str) -> Callable[[], None]:
        self.open[what] += 1

        def end() -> None:
            self.open[what] -= 1

        return end


def observed(rank: Rank, layout: Layout, codec: str) -> tuple[Story, list[str], int]:
    story, digests = Story(), []
    with compressed(rank, Fed(), codec, **layout.form, **SETTINGS) as (model, reducer):
        reducer.observe(story)
        for step in range(3):
            digests.append(step_digest(backward(model, feed(rank.rank, step)), reducer))
        wire = reducer.comm_stats()["wire_bytes"]
        reducer.detach(story)
        digests.append(step_digest(backward(model, feed(rank.rank, 3)), reducer))
    return story, digests, wire


def unobserved(rank: Rank, layout: Layout, codec: str) -> list[str]:
    with compressed(rank, Fed(), codec, **layout.form, **SETTINGS) as (model, reducer):
        return [step_digest(backward(model, feed(rank.rank, s)), reducer) for s in range(4)]


CASES = [
    (flat(3), EVERY_CODEC),
    *((layout, ("int8", "none", "threshold")) for layout in (flat(2), *FORMS)),
]


@pytest.mark.parametrize(("layout", "codecs"), CASES, ids=str)
def test_every_collective_and_every_byte(layout: Layout, codecs: Sequence[str]) -> None:
    def body(rank: Rank) -> list[tuple[tuple[Story, list[str], int], list[str]]]:
        return [(observed(rank, layout, c), unobserved(rank, layout, c)) for c in codecs]

    for codec, *ranks in zip(codecs, *run_threads(body, layout.size), strict=True):
        for (story, digests, wire), plain in ranks:
            payload = [sent for group, _, sent in story.collectives if group != "control"]
            assert sum(payload) == wire, codec
            assert +story.open == Counter()  # all that began has ended
            assert len(story.under_way) == len(story.collectives)
            for work in story.under_way:
                work.wait()  # a second one who waits does no harm
            assert story.buckets == [0, 0, 0]
            assert story.finished_steps == [[0]] * 3
            assert codec.partition(":")[0] in story.codecs
            assert len(story.threads) == 1  # not that of the backward pass
            assert digests == plain, codec


def test_an_observer_that_is_attached_while_another_one_ends_stays() -> None:
    """The training's thread attaches it while the reducer's takes the other one off."""

    def body(rank: Rank) -> None:
        with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
            late = Story()

            class Ends(Observer):
                @property
                def done(self) -> bool:  # type: ignore[override]
                    reducer.detach(late)
                    reducer.observe(late)
                    return True

            reducer.observe(Ends())
            backward(model, feed(rank.rank, 0))
            backward(model, feed(rank.rank, 1))
            reducer.detach(late)
            assert len(late.finished_steps) == 1

    run_threads(body, 2)
