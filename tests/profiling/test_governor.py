from __future__ import annotations

import pytest

from lightning_dist.profiling.capture.recorder import Governor
from lightning_dist.profiling.capture.session import SessionSettings

MS = 1_000_000


def run(governor: Governor, *, cost: float, steps: int, of: int = 10 * MS, first: int = 0) -> float:
    """Share of the last half of the steps that the profiler took."""
    shares = []
    for step in range(first, first + steps):
        wanted = governor.wants(step)
        if wanted:
            governor.spent(cost, of=of)
        shares.append(cost / of if wanted else 0.0)
    half = shares[steps // 2 :]
    return sum(half) / len(half)


@pytest.mark.parametrize("cost", [0.01, 0.3, 1.0, 4.0, 30.0])
def test_the_mean_cost_stays_within_the_budget(cost: float) -> None:
    assert run(Governor(0.01), cost=cost * MS, steps=20_000) <= 0.0102


def test_a_profiler_that_is_cheap_looks_at_every_step() -> None:
    governor = Governor(0.01)
    run(governor, cost=0.05 * MS, steps=100)
    assert governor.period == 1


def test_it_looks_again_when_steps_take_longer() -> None:
    governor = Governor(0.01)
    run(governor, cost=1.0 * MS, steps=2000)
    assert governor.period >= 8
    run(governor, cost=1.0 * MS, steps=20_000, of=1000 * MS, first=2000)
    assert governor.period == 1


def test_ranks_that_decide_for_themselves_have_steps_in_common() -> None:
    quick, slow = Governor(0.01), Governor(0.01)
    seen: list[set[int]] = [set(), set()]
    for step in range(4000):
        for governor, cost, steps in ((quick, 0.3, seen[0]), (slow, 2.5, seen[1])):
            if governor.wants(step):
                governor.spent(cost * MS, of=10 * MS)
                steps.add(step)
    assert quick.period < slow.period
    late = {step for step in seen[1] if step > 2000}
    assert late
    assert late <= seen[0]


@pytest.mark.parametrize("every", [2, 3, 4, 10, 64, 89])
@pytest.mark.parametrize("period", [2, 8, 64])
def test_what_happens_every_so_many_steps_is_seen_as_often(period: int, every: int) -> None:
    """An accumulation, a validation, a logger: always or never would be wrong by a factor."""
    governor = Governor(0.01)
    governor.period = period
    steps = [step for step in range(100 * period * every) if governor.wants(step)]
    assert len(steps) == pytest.approx(100 * every, rel=0.03)
    assert sum(step % every == 0 for step in steps) == pytest.approx(100, abs=10)


@pytest.mark.parametrize("budget", [0, -0.1, 1.5])
def test_a_budget_out_of_range(budget: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 1; got {budget}"):
        SessionSettings(budget=budget)
