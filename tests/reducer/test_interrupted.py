"""A backward pass that an exception cuts short on all ranks leaves no trace in the next one.

Under the deferred commit; ``test_commit.py`` has the immediate one.
"""

from __future__ import annotations

import threading
from typing import Literal

import pytest
import torch
from feeding import FakeBucket, Tensors, digest, feed, residuals
from layouts import PAIRS, UNEVEN, Layout
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.exchange.rounds import AllReduce, TwoShot
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings

SHAPES = {"first": (40, 48), "second": (33, 50), "third": (16, 70)}
INTERRUPTED = 2


class Model:
    """A reducer and three buckets of one parameter each."""

    def __init__(
        self,
        rank: Rank,
        codec: str,
        layout: Layout | None = None,
        *,
        commit: Literal["immediate", "deferred"] = "deferred",
    ) -> None:
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.flats = {name: torch.zeros(p.numel()) for name, p in self.parameters.items()}
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        settings = Settings.check(codec, error_feedback=True, min_compress_numel=0, commit=commit)
        network = rank.network(layout.tree, leader=layout.leader) if layout else rank.network()
        self.reducer = Reducer(names, settings=settings, network=network)
        self.buckets = DDPBuckets(self.reducer)

    def reduce(self, given: Tensors, buckets: int = 3) -> list[torch.futures.Future[Tensor]]:
        """Hand over the first ``buckets`` buckets of a step."""
        futures = []
        for number, (name, parameter) in enumerate(list(self.parameters.items())[:buckets]):
            flat = self.flats[name].copy_(given[name].flatten())
            bucket = FakeBucket(flat, [parameter], number, last=number == 2)
            futures.append(self.buckets.reduce(bucket))
        return futures


def idle(reducer: Reducer) -> None:
    """Wait until the worker has done all that it was given."""
    done = threading.Event()
    reducer._executor.submit(done.set)
    assert done.wait(60), "the worker is gone"


def trained(rank: Rank, model: Model, *, buckets: int, bad: bool = False) -> list[str]:
    """Digests of four steps, the third of which begins anew after ``buckets`` buckets.

    ``bad``: what rank 1 had handed over by then was not finite.
    """
    digests = []
    try:
        for step in range(4):
            if buckets and step == INTERRUPTED:
                aborted = feed(rank.rank, 77, SHAPES)
                if bad and rank.rank == 1:
                    aborted["first"][0, 0] = torch.inf
                model.reduce(aborted, buckets)
                if bad:  # encoded, in the bucket's memory, before the next step is written there
                    idle(model.reducer)
            torch.futures.wait_all(model.reduce(feed(rank.rank, step, SHAPES)))
            digests.append(digest([*model.flats.values(), *residuals(model.reducer).values()]))
        assert model.reducer.comm_stats()["steps"] == 4
        return digests
    finally:
        model.reducer.close()


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize(("codec", "size"), [("int8", 2), ("int8", 3), ("fp16", 3)])
def test_the_next_step_is_clean(codec: str, size: int, buckets: int) -> None:
    """Gradients and residuals afterwards equal a run in which that step never began."""

    def body(rank: Rank, buckets: int) -> list[str]:
        return trained(rank, Model(rank, codec), buckets=buckets)

    clean = run_threads(lambda rank: body(rank, 0), size)
    assert run_threads(lambda rank: body(rank, buckets), size) == clean


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2"])
@pytest.mark.parametrize("layout", [None, Layout(PAIRS)], ids=str)
def test_an_overflow_of_the_pass_that_was_cut_short_is_not_the_next_ones(
    codec: str, layout: Layout | None
) -> None:
    """The next step is finite on every rank, so its residuals are kept."""

    def body(rank: Rank) -> list[list[str]]:
        ways = (0, False), (1, True), (2, True)
        return [trained(rank, Model(rank, codec, layout), buckets=n, bad=bad) for n, bad in ways]

    for clean, *interrupted in run_threads(body, layout.size if layout else 2):
        assert interrupted == [clean] * 2


@pytest.mark.parametrize("codec", ["int8", "fp16", "powersgd:rank=2", "threshold:tau=1.5"])
@pytest.mark.parametrize(
    "layout", [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)], ids=str
)
def test_the_next_step_is_clean_where_hosts_reduce_first(codec: str, layout: Layout) -> None:
    def body(rank: Rank) -> list[list[str]]:
        return [trained(rank, Model(rank, codec, layout), buckets=of) for of in (0, 1, 2)]

    for clean, *interrupted in run_threads(body, layout.size):
        assert interrupted == [clean] * 2


@pytest.mark.parametrize("exchange", [AllReduce, TwoShot])
def test_a_failure_of_what_was_left_over_reaches_the_new_step(
    exchange: type[AllReduce | TwoShot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the payloads of the interrupted step fails: the new step must say so."""

    def fail(self: object) -> None:
        raise RuntimeError("the link broke")

    def body(rank: Rank) -> str:
        model = Model(rank, "int8" if exchange is TwoShot else "fp16")
        try:
            model.reduce(feed(rank.rank, 0, SHAPES), 1)
            rank.barrier.wait()
            monkeypatch.setattr(exchange, "wait", fail)
            model.flats = {name: flat.clone() for name, flat in model.flats.items()}
            (future,) = model.reduce(feed(rank.rank, 1, SHAPES), 1)
            idle(model.reducer)
            assert future.done(), "nobody told the new step"
            with pytest.raises(RuntimeError, match="the link broke"):
                future.value()
            return "told"
        finally:
            model.reducer.close()

    assert run_threads(body, 3) == ["told"] * 3
