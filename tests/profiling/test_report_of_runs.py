"""The page of planted runs: what was not measured is n/a with a reason, shares are of their sum."""

from __future__ import annotations

import re

import pytest
from planted import Planted, replace, replaced
from report_pages import body_of, figures_of

from lightning_dist.profiling.analysis.parts import EXPOSED
from lightning_dist.profiling.analysis.summarize import pick_steps, summarize
from lightning_dist.profiling.report.facts import facts
from lightning_dist.profiling.report.tables import buckets_table, parts_table, ranks_table
from lightning_dist.profiling.report.words import PART_WORDS
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.costs import Costs
from lightning_dist.profiling.whatif.predict import with_whatif


def bare(run: Run, **changes: object) -> Run:
    for rank, of_rank in run.ranks.items():
        steps = {step: replace(each, **changes) for step, each in of_rank.steps.items()}
        run = replaced(run, rank, steps=steps)
    return run


@pytest.mark.parametrize(
    "run",
    [
        Run({}),
        Planted(steps=0).run(),
        bare(Planted().run(), buckets=(), spans=(), detailed=False),
        bare(Planted().run(), buckets=(), spans=(), phases=(), detailed=False),
        Planted(world_size=1, buckets=0).run(),
        Planted(buckets=0, codec="ddp").run(),
        bare(Planted().run(), spans=()),
    ],
    ids=["no rank", "no step", "no detail", "no phases", "one rank", "blind", "no exchange"],
)
def test_of_what_summarize_makes_everything_missing_has_its_reason(run: Run) -> None:
    summary = with_whatif(summarize(run), run, lambda observed: Costs(reason="not asked"))
    text = re.sub(r"<[^>]+>", " ", body_of(summary, *pick_steps(run, summary)))
    assert "no reason was recorded" not in text
    tables = parts_table(summary), ranks_table(summary)
    cells = [cell for table in tables for row in table.rows for cell in row]
    if "parts_ms" in summary.reasons:
        assert not {PART_WORDS[name].name for name in EXPOSED} & set(cells)
        assert "exposed parts are 0" not in text
        assert all(row[3:6] == ("n/a", "n/a", "n/a") for row in tables[1].rows)
        assert not any(each.value == "none" for each in facts(summary))


def mixed() -> Run:
    """Every second of 36 steps is looked at in detail, and all of those are slower."""
    run = Planted(steps=38, slow_steps=dict.fromkeys(range(0, 38, 2), 2)).run()
    for rank, of_rank in run.ranks.items():
        steps = {
            step: replace(each, buckets=(), spans=(), detailed=False) if step % 2 else each
            for step, each in of_rank.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    return run


def page_of(run: Run) -> str:
    return body_of(summarize(run))


def test_the_page_of_a_run_says_when_it_began_and_what_ran() -> None:
    run = Planted(world_size=1).run()
    about = replace(run.ranks[0].about, script="jobs/train.py")
    new = Run({0: replace(run.ranks[0], about=about)})
    assert '<p class="origin">train.py, started 2027-01-15 08:00:00 UTC</p>' in page_of(new)
    assert '<p class="origin">started 2027-01-15 08:00:00 UTC</p>' in page_of(run)  # an older one
    broken = Run({0: replace(run.ranks[0], about=replace(about, unix=1e300))})
    assert '<p class="origin">train.py</p>' in page_of(broken)


def test_shares_of_the_parts_are_of_their_sum() -> None:
    summary = summarize(mixed())
    assert (summary.step_ms["mean"], summary.parts_step_ms) == pytest.approx((130, 160))
    table = parts_table(summary)
    *parts, total = table.rows
    times = [float(row[1]) for row in parts]
    shares = [float(row[2].removesuffix(" %")) for row in parts]
    assert sum(times) == pytest.approx(160)
    assert sum(shares) == pytest.approx(100, abs=1)
    assert total == ("a step in detail", "160", "100 %", "of 18 steps")
    assert table.caption.endswith("all 36 steps: mean 130 ms and median 130 ms.")
    exposed, of_all = facts(summary)[:2]
    assert (exposed.value, exposed.detail) == ("58 %", "93.0 ms of the 160 ms of a step in detail")
    assert (of_all.label, of_all.value) == ("All 36 steps", "130 ms")
    assert all(row[2:4] == ("160", "93.0") for row in ranks_table(summary).rows)


def test_waiting_for_a_rank_without_lines_is_no_zero_on_the_page() -> None:
    run = Planted(late={1: 50}).run()
    run = Run({0: run.ranks[0]})
    summary = summarize(run)
    rows = {row[0]: row for row in parts_table(summary).rows}
    assert rows["exposed: waiting"][1:3] == ("n/a", "n/a")
    assert rows["exposed: waiting"][3].startswith("n/a: exchanges without a record of rank 1")
    assert [row[6] for row in buckets_table(summary).rows] == ["n/a"] * 4
    assert not summary.series.wait_ms
    drawn = figures_of(summary, *pick_steps(run, summary))
    assert "waits" not in drawn
    assert "exposed: waiting" not in {trace["name"] for trace in drawn["steps"]["data"]}
    (steps,) = [each for each in facts(summary) if each.label == "Steps"]
    assert steps.detail.startswith("that the ranks with lines, 1 of 2, have recorded, 4 of them")


def test_ddp_has_no_times_of_a_codec_on_the_page() -> None:
    summary = summarize(Planted(codec="ddp", encode=0, decode=0).run())
    rows = {row[0]: row for row in parts_table(summary).rows}
    assert rows["exposed: codec"][1:3] == ("n/a", "n/a")
    assert rows["exposed: waiting"][1:3] == ("0", "0 %")  # this was measured
    assert {(row[5], row[8]) for row in buckets_table(summary).rows} == {("n/a", "n/a")}
