from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from planted import Planted, replace

from lightning_dist.integrations.profiler.live import of_errors
from lightning_dist.profiling.analysis.imbalance import ResidualAlarm, growth_of
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import ErrorRecord


def errors(ratio: Callable[[int], float | None], count: int, bucket: int = 0) -> list[ErrorRecord]:
    return [ErrorRecord(50 * i, bucket, 0.5, 0.5, ratio(i)) for i in range(count)]


@pytest.mark.parametrize(
    "ratio",
    [
        lambda i: 50.0 * (1 - 0.8**i),  # fills, and levels off
        lambda i: 5.0 * i,  # as a sparse codec's does at first
        lambda i: 0.01 * 1.3**i if i < 25 else 7.0,  # small
        lambda i: 20 + random.Random(i).random() * 30,
        lambda i: 100.0 if i == 39 else 2.0,  # one bad batch
        lambda i: None,
    ],
    ids=["levels off", "fills", "small", "noise", "one", "no residual"],
)
def test_a_healthy_residual(ratio: Callable[[int], float | None]) -> None:
    assert growth_of(errors(ratio, 40)) is None


@pytest.mark.parametrize("start", [0, 30])
def test_one_that_diverges(start: int) -> None:
    alarm = ResidualAlarm()
    found = [alarm.add(each) for each in errors(lambda i: 2.0 * 1.3 ** max(0, i - start), 60)]
    first = next(i for i, growth in enumerate(found) if growth is not None)
    growth = found[first]
    assert growth is not None
    assert start < first < start + 20
    assert growth.step == 50 * first
    assert growth.now > max(10, 3 * growth.before)


def test_buckets_are_not_mixed() -> None:
    mixed = [
        each
        for pair in zip(
            errors(lambda i: 1.0, 30), errors(lambda i: 40.0, 30, bucket=1), strict=True
        )
        for each in pair
    ]
    assert growth_of(sorted(mixed, key=lambda each: each.bucket)) is None


def run_with(of_ranks: Sequence[Sequence[ErrorRecord]]) -> list[str]:
    run = Planted().run()
    ranks = {rank: replace(run.ranks[rank], errors=of) for rank, of in enumerate(of_ranks)}
    return [note for note in summarize(replace(run, ranks=ranks)).notes if "residual" in note]


def test_the_summary_has_the_worst_rank() -> None:
    calm = errors(lambda i: 2.0, 20)
    assert run_with([calm, calm]) == []
    mild, wild = errors(lambda i: 2 * 1.3**i, 20), errors(lambda i: 2 * 1.5**i, 20, bucket=4)
    (note,) = run_with([mild, wild])
    assert note.startswith("rank 1: the residual of bucket 4 has grown from ")
    assert "Use a codec or options that lose less" in note


def test_reasons_for_having_none() -> None:
    assert summarize(Planted(codec="ddp").run()).unavailable["errors"].startswith("DDP itself")
    assert summarize(Planted(codec="none").run()).unavailable["errors"] == "nothing is compressed"
    assert summarize(Planted().run()).unavailable["errors"] == "none was sampled"


def test_metrics_are_medians_of_what_there_is() -> None:
    rows = [
        {"relative_l2": value, "cosine": None, "residual_ratio": ratio}
        for value, ratio in ((0.1, None), (0.3, 4.0), (9.0, 6.0))
    ]
    assert of_errors(rows) == {"error_relative_l2": 0.3, "residual_ratio": 5.0}
    assert of_errors([]) == {}
