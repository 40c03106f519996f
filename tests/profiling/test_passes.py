"""Steps in which gradients are exchanged several times."""

from __future__ import annotations

import pytest
from identities import check_identities
from planted import MS, Planted, doubled, replace, replaced, twice

from lightning_dist.profiling.analysis.breakdown import analyse, exposed_in, passes_of
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.analysis.tables import BUCKET_COLUMNS, step_table
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe

ONCE = Planted(steps=6).run()
TWICE = twice(ONCE)


def test_a_bucket_that_comes_again_is_of_the_next_pass() -> None:
    record = ONCE.ranks[0].steps[0]
    (only,) = passes_of(record)
    assert only == list(record.buckets)
    first, second = passes_of(doubled(record))
    assert first == only
    assert second[0].ready == only[0].ready + record.duration
    assert passes_of(replace(record, buckets=())) == []


def test_every_pass_has_its_exposed_part() -> None:
    record = ONCE.ranks[0].steps[0]
    ((begin, end),) = exposed_in(record)
    again = record.duration
    assert exposed_in(doubled(record)) == [(begin, end), (begin + again, end + again)]


def test_all_of_it_counts_and_the_parts_add_up() -> None:
    for one, two in zip(analyse(ONCE, 3), analyse(TWICE, 3), strict=True):
        check_identities(two)
        assert two.ns["exposed"] == 2 * one.ns["exposed"] > 0
        assert two.ns["hidden"] == 2 * one.ns["hidden"] > 0
        assert two.parts["exposed_wait"] == 2 * one.parts["exposed_wait"]
    once, both = summarize(ONCE), summarize(TWICE)
    assert both.traffic.raw_bytes == 2 * once.traffic.raw_bytes
    assert both.traffic.wire_gbps == pytest.approx(once.traffic.wire_gbps)


def test_a_bucket_is_counted_once_for_every_pass() -> None:
    single, double = (step_table(run, [3]).buckets for run in (ONCE, TWICE))
    assert len(single) == len(double) == 4
    for index, (_, count, sums) in single.items():
        _, twice_count, twice_sums = double[index]
        assert (count, twice_count) == (2, 4), "once on each rank"
        one, two = (dict(zip(BUCKET_COLUMNS, of, strict=True)) for of in (sums, twice_sums))
        for name in set(BUCKET_COLUMNS) - {"ready_ms"}:
            assert two[name] == 2 * one[name], name
        assert two["exposed_ms"] == 0 or two["exposed_ms"] > MS


def test_nothing_is_predicted_of_it() -> None:
    with pytest.raises(ValueError, match="its steps exchange gradients several times"):
        observe(TWICE)


def note_of(run: Run) -> str:
    found = [each for each in summarize(run).notes if "no_sync" in each]
    assert len(found) <= 1
    return "".join(found)


def without_optimizer(run: Run, every: int) -> Run:
    """In all steps but one of so many."""
    for rank, of_rank in run.ranks.items():
        steps = {
            step: record
            if step % every == 0
            else replace(record, phases=[p for p in record.phases if p.name != "optimizer"])
            for step, record in of_rank.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    return run


def test_exchanges_that_could_be_spared_are_reported() -> None:
    several = note_of(TWICE)
    assert several.startswith("gradients are exchanged 2 times in a step of an optimizer: ")
    often = without_optimizer(Planted(steps=32).run(), every=3)
    assert note_of(often).startswith("an optimizer stepped after 33% of the gradient exchanges")


def test_steps_that_a_scaler_skips_and_loops_without_optimizers_are_no_such_exchanges() -> None:
    run = Planted(steps=32).run()
    assert note_of(run) == ""
    assert note_of(without_optimizer(run, every=10**6)) == ""  # 0 is left out: none has one
    rare = run.ranks[0].steps[20]
    phases = [phase for phase in rare.phases if phase.name != "optimizer"]
    of_rank = {**run.ranks[0].steps, 20: replace(rare, phases=phases)}
    assert note_of(replaced(run, 0, steps=of_rank)) == ""
