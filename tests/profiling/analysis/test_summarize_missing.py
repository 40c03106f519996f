"""A summary where something is missing, and ranks that are named only where they are last."""

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from planted import MS, Planted, bare, coarse, replaced
from report_pages import body_of

from lightning_dist.profiling.analysis.compare import compare, measured
from lightning_dist.profiling.analysis.imbalance import straggler
from lightning_dist.profiling.analysis.summarize import pick_steps, summarize
from lightning_dist.profiling.analysis.tables import COLUMNS, Array, StepTable
from lightning_dist.profiling.capture.events import EndRecord
from lightning_dist.profiling.report.files import to_json
from lightning_dist.profiling.report.tables import facts, ranks_table
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.session.live import metrics_of
from lightning_dist.profiling.whatif.predict import Costs, with_whatif


def waits(*steps: dict[int, int]) -> Array:
    return np.array([[step.get(rank, 0) for rank in range(2)] for step in steps], dtype=float)


def most(late: Array) -> int:
    return int(late.sum(axis=0).argmax())


def named(late: Array, *, uncertainty: int = 0) -> int | None:
    steps = range(len(late))
    values = np.zeros((len(steps), 2, len(COLUMNS)))
    values[..., COLUMNS.index("late")] = late.reshape(-1, 2)
    values[..., COLUMNS.index("uncertainty")] = uncertainty
    nothing = np.zeros((len(steps), 2))
    table = StepTable(steps, [0, 1], ["a", "b"], values, np.zeros((2, 2)), nothing, {})
    return straggler(table, [])[0]


def test_ranks_that_are_equally_late_are_hardly_ever_named() -> None:
    rng = random.Random(0)
    runs = [
        waits(*({rng.randrange(2): rng.randrange(1, 2000)} for _ in range(steps)))
        for steps in (3, 5, 10, 50, 400)
        for _ in range(100)
    ]
    assert sum(named(run) is not None for run in runs) <= 10  # of 500
    assert {0, 1} <= {most(run) for run in runs}


@pytest.mark.parametrize(
    ("steps", "who"),
    [
        ([{1: 9}] * 3, None),
        ([{1: 9}] * 4, 1),
        ([{1: 9}, {}, {}] * 4, 1),  # every third step
        ([{1: 9}, {0: 1}, {1: 1}] * 6, 1),
        ([{1: 2}, {0: 2}, {1: 2}] * 20, 1),
        ([{1: 6}, {0: 4}] * 100, None),  # three fifths of the waiting
        ([{1: 900}, *[{0: 1}, {1: 1}] * 40], None),  # one step only
        ([], None),
    ],
)
def test_who_is_named(steps: Sequence[dict[int, int]], who: int | None) -> None:
    assert named(waits(*steps)) == who


def test_nobody_is_named_by_less_than_clocks_are_uncertain() -> None:
    late = waits(*[{1: 30}] * 10)  # 10 of each of three waiters
    assert named(late, uncertainty=9 * 3) == 1
    assert named(late, uncertainty=10 * 3) is None


def test_a_run_whose_clocks_are_no_better_than_that() -> None:
    sure = summarize(Planted(late={1: 50}, uncertainty=1).run())
    vague = summarize(Planted(late={1: 50}, uncertainty=51).run())
    assert (sure.straggler, vague.straggler) == (1, None)
    assert sure.headline.endswith(" Straggler: rank 1.")
    assert "Straggler" not in vague.headline
    assert vague.unavailable["straggler"] == (
        "no rank is clearly the last: the clock uncertainty is as large as the delay of rank 1"
    )
    assert vague.ranks[0].wait_ms * MS > 0  # all the same


def test_missing_ranks() -> None:
    run = Planted(world_size=3, late={1: 50}).run()
    run = Run({rank: each for rank, each in run.ranks.items() if rank != 1}, ["nothing of rank 1"])
    summary = summarize(run)
    assert summary.notes == ["nothing of rank 1", summary.unavailable["exposed_wait"]]
    assert summary.run["nodes"] == ["node-a", None, "node-a"]
    assert summary.exposed_ms == pytest.approx(83)
    told = json.loads(to_json(summary.as_dict()))
    assert (told["breakdown_ms"]["exposed_wait"], told["detailed_step_ms"]) == (
        None,
        pytest.approx(150),
    )
    assert "exposed_wait" not in told["per_step"]["breakdown_ms"]
    assert {(each["wait_ms"], each["waited_for_ms"]) for each in told["ranks"]} == {(None, None)}
    assert {each["wait_ms"] for each in told["buckets"]} == {None}
    assert "comm/exposed_wait_ms" not in metrics_of(summary)
    assert len(pick_steps(run, summary)) == 1


def test_a_rank_that_died_early_and_one_that_never_began() -> None:
    run = Planted(world_size=3, steps=9).run()
    few = {step: run.ranks[1].steps[step] for step in range(5)}
    run = replaced(replaced(run, 1, steps=few), 2, steps={})
    summary = summarize(run)
    assert summary.steps == 3
    assert [each.rank for each in summary.ranks] == [0, 1]
    assert summary.notes[0] == "5 of 9 steps are of all ranks; only these count"
    assert "without a record of rank 2" in summary.unavailable["exposed_wait"]


def test_no_steps() -> None:
    for run in (Planted(steps=0).run(), Run({})):
        summary = summarize(run)
        assert (summary.steps, summary.breakdown_ms, summary.buckets) == (0, {}, [])
        assert (summary.exposed_ms, summary.exposed_fraction, summary.hidden_ms) == (
            None,
            None,
            None,
        )
        assert summary.traffic is None
        told = json.loads(to_json(summary.as_dict()))
        assert told["step_ms"] == {"mean": None, "median": None, "p95": None}
        assert told["profiler_overhead"] is None
        missing = {each.label for each in facts(summary) if each.missing}
        assert missing >= {"step", "profiler overhead"}
        assert metrics_of(summary) == {}
        assert pick_steps(run, summary) == []


def test_the_end_of_a_training_without_a_step_is_reported_once() -> None:
    error = "OSError: no data in /a/folder " + 20 * "again, " + "and again"
    run = replaced(Planted(steps=0).run(), 1, end=EndRecord(error))
    summary = with_whatif(summarize(run), run, lambda observed: Costs(reason="not asked"))
    assert summary.notes == [f"the training ended by {error} (rank 1)"]
    assert to_json(summary.as_dict()).count(error) == 1
    assert body_of(summary).count(error) == 1
    for each in compare(measured(run, summary), measured(run, summary)):
        assert (
            each.reason
            == "A: no step was recorded on any rank; B: no step was recorded on any rank"
        )
    assert [each.detail for each in facts(summary) if each.label == "step"] == [
        "no step was recorded on any rank"
    ]


def test_the_first_error_is_reported_first_whichever_clock_is_ahead() -> None:
    """The clock of rank 1 is 5 s ahead; an older version has left no time."""
    run = Planted(world_size=3, shift={1: 5_000}).run()
    at, ahead = 10 * 10**9, 5 * 10**9
    run = replaced(run, 2, end=EndRecord("unknown"))
    run = replaced(run, 0, end=EndRecord("lost", at))
    for later, told in (
        (-(10**6), "cause (rank 1), lost (rank 0), unknown (rank 2)"),
        (10**6, "lost (rank 0), cause (rank 1), unknown (rank 2)"),
    ):
        ended = replaced(run, 1, end=EndRecord("cause", at + ahead + later))
        assert summarize(ended).notes[0] == f"the training ended by {told}"


def test_half_a_run_has_no_rate() -> None:
    run = Planted(world_size=4, nodes=["a", "a", "b", "b"]).run()
    summary = summarize(Run({rank: each for rank, each in run.ranks.items() if rank != 3}))
    assert summary.traffic is not None
    assert summary.traffic.wire_bytes == 4e6  # of a rank, of those that are there
    for name in ("wire_gbps", "ddp_equivalent_busbw_gbps"):
        assert getattr(summary.traffic, name) is None
        assert f"traffic.{name}" in summary.unavailable
    assert summary.traffic.link_utilization is None
    assert {(each.intra_gbps, each.inter_gbps) for each in summary.ranks} == {(None, None)}
    (sent,) = [each for each in facts(summary) if each.label == "bytes sent"]
    assert sent.detail.startswith("per step and rank with records, ")
    assert not summary.is_of_all
    assert summarize(run).is_of_all


def test_no_exchange() -> None:
    summary = summarize(Planted(buckets=0).run())
    # A model that has a hook already: what is exposed is in the backward pass, and not zero.
    assert summary.breakdown_ms.keys() == {
        "between_steps",
        "forward",
        "backward",
        "optimizer",
        "other",
    }
    assert summary.per_step.breakdown_ms.keys() == summary.breakdown_ms.keys()
    assert sum(summary.breakdown_ms.values()) == pytest.approx(summary.step_ms["mean"])


def test_ddp_of_torch_has_no_codec() -> None:
    summary = summarize(Planted(codec="ddp", encode=0, decode=0, sent=4_000_000).run())
    assert summary.breakdown_ms["exposed_transfer"] == pytest.approx(30)
    assert summary.breakdown_ms["exposed_codec"] is None
    assert summary.exposed_ms == pytest.approx(30)
    assert {(each.encode_ms, each.decode_ms) for each in summary.buckets} == {(None, None)}
    assert {each.wait_ms for each in summary.buckets} == {0}  # this was measured
    assert summary.traffic.compression_ratio == 1


def test_buckets_without_exchanges() -> None:
    summary = summarize(bare(Planted().run(), spans=()))
    assert summary.breakdown_ms["exposed_other"] == summary.exposed_ms == pytest.approx(33)
    assert summary.overlap_fraction is None
    assert summary.traffic.wire_gbps is None
    assert summary.traffic.compression_ratio == 4


def test_steps_that_are_not_recorded_in_detail() -> None:
    """As on CUDA: neither a logger nor the page is told that all communication is hidden."""
    run = bare(Planted().run(), buckets=(), spans=(), detailed=False)
    summary = summarize(run)
    assert summary.step_ms["mean"] == pytest.approx(100)
    assert (summary.breakdown_ms, summary.detailed_steps) == ({}, 0)
    assert (summary.exposed_ms, summary.exposed_fraction, summary.hidden_ms) == (None, None, None)
    metrics = metrics_of(summary)
    assert metrics["comm/step_ms"] > 0
    assert not {"comm/exposed_ms", "comm/exposed_fraction", "comm/hidden_ms"} & set(metrics)
    (exposed,) = [each for each in facts(summary) if each.label == "exposed communication"]
    assert exposed.missing
    assert exposed.detail == "no step was recorded in detail on all ranks"
    assert {len(each.phases_ms) for each in summary.ranks} == {0}
    assert ranks_table(summary).rows[1][6:10] == ("n/a",) * 4
    assert [each.label for each in pick_steps(run, summary)] == ["median step"]


def test_only_steps_that_all_have_in_detail_count_in_parts() -> None:
    run = Planted(slow_steps={3: 2}).run()
    run = coarse(run, 1, 2, 4, 5)
    summary = summarize(run)
    assert (summary.steps, list(summary.per_step.steps)) == (4, [3])
    assert summary.step_ms["mean"] == pytest.approx(115)
    assert summary.notes == [
        "parts and communication are of the 1 step of 4 that were recorded in detail; step times "
        "are of all",
    ]
    assert "exposed_wait" not in summary.unavailable
    # What stands together in the last row of a logger divides.
    metrics = metrics_of(summary)
    assert metrics["comm/step_ms"] == summary.detailed_step_ms == pytest.approx(160)
    assert metrics["comm/all_steps_ms"] == pytest.approx(115)
    share = metrics["comm/exposed_ms"] / metrics["comm/step_ms"]
    assert metrics["comm/exposed_fraction"] == pytest.approx(share)
    assert [each.step_ms for each in summary.ranks] == pytest.approx([160, 160])
    assert summary.detailed_steps == 1
