"""Small collectives at once: in worlds of threads."""

from __future__ import annotations

import pytest
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.events import BurstRecord
from lightning_dist.profiling.links import measure_burst


@pytest.mark.parametrize("count", [1, 8])
def test_every_rank_has_the_same_time_and_a_cpu_of_its_own(count: int) -> None:
    def work(rank: Rank) -> BurstRecord:
        return measure_burst(rank.group("payload"), name="flat", count=count)

    found = run_threads(work, 3)
    assert {each.seconds for each in found} == {found[0].seconds}
    for each in found:
        assert (each.group, each.op, each.sent, each.count) == ("flat", "all_gather", 8192, count)
        assert 0 < each.seconds < 10
        assert each.cpu >= 0
