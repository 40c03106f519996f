from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from planted import MS, Planted

from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.parts import EXPOSED, PARTS
from lightning_dist.profiling.records import ErrorRecord, LinkRecord
from lightning_dist.profiling.sample import sample
from lightning_dist.profiling.summarize import pick_steps, summarize


def replaced(run: Run, rank: int, **changes: object) -> Run:
    return Run({**run.ranks, rank: replace(run.ranks[rank], **changes)}, run.notes)


def without_detail(run: Run, rank: int, *steps: int) -> Run:
    bare = {
        step: replace(run.ranks[rank].steps[step], buckets=(), spans=(), detailed=False)
        for step in steps
    }
    return replaced(run, rank, steps={**run.ranks[rank].steps, **bare})


def test_a_planted_run_in_numbers() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 123.4}).run())
    assert (summary.steps, summary.skipped) == (4, 2)
    assert summary.step_ms == pytest.approx({"mean": 150, "median": 150, "p95": 150})
    assert summary.parts_ms == pytest.approx(
        {
            "data": 2,
            "forward": 45,
            "backward": 40,
            "wait": 10.5,
            "transfer": 45.5,
            "codec": 2,
            "unattributed": 0,
            "optimizer": 5,
            "other": 0,
        }
    )
    assert summary.exposed_ms == pytest.approx(58)
    assert summary.hidden_ms == pytest.approx(29)
    assert summary.overlap == pytest.approx(2 * 29 / (110 + 60))
    assert summary.exposed == pytest.approx(58 / 150)
    assert summary.overhead == pytest.approx(0.05 / 150)
    assert summary.straggler == 1
    assert summary.reasons == {
        "errors": "none was sampled",
        "links": "no link was measured",
        "traffic.peak_gbps": "no link was measured",
    }
    assert summary.notes == []
    assert summary.run == {
        "codec": "int8",
        "backend": "gloo",
        "device": "cpu",
        "world_size": 2,
        "hosts": ["host-a", "host-b"],
        "versions": {"torch": "2.13.0"},
    }
    assert json.loads(json.dumps(summary.as_dict()))["steps"] == 4


def test_ranks_of_a_planted_run() -> None:
    summary = summarize(Planted(world_size=4, late={1: 30, 3: 70}, shift={2: -9}).run())
    assert [each.rank for each in summary.ranks] == [0, 1, 2, 3]
    assert [each.host for each in summary.ranks] == ["host-a", "host-b"] * 2
    assert [each.wait_ms for each in summary.ranks] == pytest.approx([70, 40, 70, 0])
    assert [each.caused_ms for each in summary.ranks] == pytest.approx([0, 0, 0, 180])
    assert [each.exposed_ms for each in summary.ranks] == pytest.approx([103, 73, 103, 33])
    assert [each.clock_uncertainty_ms for each in summary.ranks] == [None, 0.02, 0.02, 0.02]
    assert summary.straggler == 3


def test_buckets_of_a_planted_run() -> None:
    buckets = summarize(Planted(shift={1: 7}).run()).buckets
    assert [each.index for each in buckets] == [0, 1, 2, 3]
    assert {(each.codec, each.raw_mb, each.wire_mb) for each in buckets} == {("int8", 4, 1)}
    assert {(each.encode_ms, each.decode_ms, each.wait_ms) for each in buckets} == {(1, 2, 0)}
    assert [each.ready_ms for each in buckets] == pytest.approx([32, 42, 52, 62])
    # Each is launched 10 ms after the one before and queues for 5 ms more behind it.
    assert [each.transfer_ms for each in buckets] == pytest.approx([15, 20, 25, 30])
    assert [each.exposed_ms for each in buckets] == pytest.approx([0, 1, 16, 31])
    late = summarize(Planted(late={1: 50}).run()).buckets
    assert [each.wait_ms for each in late] == pytest.approx([25, 25, 25, 25])


def test_waiting_under_a_transfer_of_the_same_bucket_is_not_waiting() -> None:
    run = Planted(late={1: 50}, buckets=2).run()
    for rank, of_rank in run.ranks.items():
        steps = {
            step: replace(each, spans=[replace(span, bucket=0) for span in each.spans])
            for step, each in of_rank.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    # Rank 0 waits from 43 to 93 ms, and the second exchange, which waits until 113, from 63 on;
    # the first moves from 93 to 108.
    assert summarize(run).buckets[0].wait_ms == pytest.approx((50 + 5) / 2)


def test_rates_are_over_the_time_in_which_something_moved() -> None:
    run = Planted(late={1: 50}).run()
    run = replaced(
        run,
        1,
        links=[
            LinkRecord("flat", sent=100_000_000, seconds=1.0),
            LinkRecord("flat", sent=250_000_000, seconds=2.0, peer=0),
            LinkRecord("flat", sent=1, seconds=0.0, peer=0),
        ],
    )
    summary = summarize(run)
    traffic = summary.traffic
    assert traffic.raw_bytes == 16e6
    assert (traffic.wire_bytes, traffic.intra_bytes, traffic.inter_bytes) == (4e6, 0, 4e6)
    assert traffic.wire_gbps == pytest.approx(4e6 * 8 / 60e6)
    assert traffic.effective_gbps == pytest.approx(16e6 * 8 / 60e6)
    assert traffic.peak_gbps == pytest.approx(1.0)
    assert traffic.link_utilization == pytest.approx(4e6 * 8 / 60e6)
    assert summary.reasons == {"errors": "none was sampled"}
    assert [each["sent"] for each in summary.links] == [100_000_000, 250_000_000, 1]
    assert {(each["rank"], each["group"]) for each in summary.links} == {(1, "flat")}
    for each in summary.ranks:
        assert each.inter_gbps == pytest.approx(4e6 * 8 / 60e6)
        assert each.intra_gbps is None


def test_the_peak_is_of_links_between_hosts_if_there_are_any() -> None:
    run = Planted(world_size=4).run()
    within = LinkRecord("flat", sent=1_000_000_000, seconds=1.0, peer=2)
    run = replaced(run, 0, links=[within])
    assert summarize(run).traffic.peak_gbps == pytest.approx(8)
    across = LinkRecord("flat", sent=1_000_000, seconds=0.1, peer=1)
    run = replaced(run, 0, links=[within, across])
    assert summarize(run).traffic.peak_gbps == pytest.approx(0.08)


def test_rates_of_a_rank_are_over_what_can_carry_them() -> None:
    """Buckets 0 and 1 go inside the host, 2 and 3 between hosts."""
    run = Planted(world_size=4, hosts=["a", "a", "b", "b"], transfer=15).run()
    groups = {0: ([0, 1], [0, 2]), 1: ([0, 1], [1, 3]), 2: ([2, 3], [0, 2]), 3: ([2, 3], [1, 3])}
    for rank, (intra, inter) in groups.items():
        about = replace(run.ranks[rank].about, groups={"intra": intra, "inter": inter})
        steps = {}
        for step, record in run.ranks[rank].steps.items():
            spans = [
                replace(s, group="intra" if s.bucket < 2 else "inter")
                if s.phase == "exchange"
                else s
                for s in record.spans
            ]
            buckets = [
                replace(b, intra=b.intra + b.inter, inter=0) if b.index < 2 else b
                for b in record.buckets
            ]
            steps[step] = replace(record, spans=spans, buckets=buckets)
        run = replaced(run, rank, about=about, steps=steps)
    for each in summarize(run).ranks:
        # From 33 to 63 ms, and from 53 to 93 ms: they queue behind one another.
        assert each.intra_gbps == pytest.approx(2e6 * 8 / 30e6)
        assert each.inter_gbps == pytest.approx(2e6 * 8 / 40e6)


def test_series_and_the_steps_to_show() -> None:
    planted = Planted(steps=23, slow_steps={5: 3, 7: 2, 10: 1.5})
    run = planted.run()
    summary = summarize(run)
    assert list(summary.series.steps) == list(range(2, 23))
    by_step = dict(zip(summary.series.steps, summary.series.step_ms, strict=True))
    assert {step for step, each in by_step.items() if each > 101} == {5, 7, 10}
    assert summary.step_ms["median"] == pytest.approx(100)
    assert summary.step_ms["mean"] == pytest.approx((21 * 100 + 120 + 60 + 30) / 21)
    assert summary.step_ms["p95"] == by_step[7]
    assert [(each.step, each.label) for each in pick_steps(run, summary)] == [
        (2, "median step"),
        (7, "p95 step"),
    ]
    for name in PARTS:
        assert len(summary.series.parts_ms[name]) == 21
    for i, of_step in enumerate(summary.series.step_ms):
        assert sum(summary.series.parts_ms[name][i] for name in PARTS) == pytest.approx(of_step)
    assert {rank: len(each) for rank, each in summary.series.wait_ms.items()} == {0: 21, 1: 21}
    assert set(summary.series.slowest) == {None}
    late = summarize(Planted(late={0: 10}).run())
    assert set(late.series.slowest) == {0}
    assert late.series.wait_ms[1] == pytest.approx([10] * 4)


@pytest.mark.parametrize(
    ("steps", "skip", "counted", "skipped"),
    [(6, 2, 4, 2), (3, 2, 1, 2), (2, 2, 2, 0), (1, 2, 1, 0), (1, 0, 1, 0)],
)
def test_first_steps_are_left_out(steps: int, skip: int, counted: int, skipped: int) -> None:
    summary = summarize(Planted(steps=steps, slow_steps={0: 9}).run(), skip=skip)
    assert (summary.steps, summary.skipped) == (counted, skipped)
    assert (summary.step_ms["mean"] > 101) == (skipped == 0)
    assert any("so the first are not left out" in note for note in summary.notes) == (
        skipped < skip
    )


def test_a_negative_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, it is -1; 0 counts all steps"):
        summarize(Planted().run(), skip=-1)


def test_several_stragglers_are_none() -> None:
    run = Planted(world_size=3, steps=8).run()
    for rank in range(3):
        # Who is late changes from step to step.
        turns = [Planted(world_size=3, steps=8, late={late: 40}).run() for late in range(3)]
        steps = {step: turns[step % 3].ranks[rank].steps[step] for step in range(2, 8)}
        run = replaced(run, rank, steps=steps)
    summary = summarize(run, skip=0)
    assert summary.straggler is None
    assert summary.reasons["straggler"] == (
        "waiting is for several ranks; 33% of it is for rank 0, the most"
    )


@pytest.mark.parametrize(("late", "straggler"), [(3, None), (6, 1)])
def test_little_waiting_has_no_straggler(late: float, straggler: int | None) -> None:
    summary = summarize(Planted(late={1: late}).run())
    assert summary.straggler == straggler
    if straggler is None:
        assert summary.reasons["straggler"] == "waiting is 1.5% of the step"
    assert summary.ranks[0].wait_ms == pytest.approx(late)


def test_missing_ranks() -> None:
    run = Planted(world_size=3, late={1: 50}).run()
    run = Run({rank: each for rank, each in run.ranks.items() if rank != 1}, ["nothing of rank 1"])
    summary = summarize(run)
    reason = "exchanges without a record of rank 1 count as transfer, waiting included"
    assert summary.reasons["wait"] == summary.reasons["straggler"] == reason
    assert summary.notes == ["nothing of rank 1", reason]
    assert summary.run["hosts"] == ["host-a", None, "host-a"]
    assert summary.exposed_ms == pytest.approx(83)
    assert len(pick_steps(run, summary)) == 1


def test_one_exchange_without_a_record_is_told() -> None:
    run = Planted().run()
    steps = dict(run.ranks[1].steps)
    steps[2] = replace(steps[2], spans=[each for each in steps[2].spans if each.bucket])
    assert "record of rank 1" in summarize(replaced(run, 1, steps=steps)).reasons["wait"]


def test_a_rank_that_died_early_and_one_that_never_began() -> None:
    run = Planted(world_size=3, steps=9).run()
    few = {step: run.ranks[1].steps[step] for step in range(5)}
    run = replaced(replaced(run, 1, steps=few), 2, steps={})
    summary = summarize(run)
    assert summary.steps == 3
    assert [each.rank for each in summary.ranks] == [0, 1]
    assert summary.notes[0] == "5 of 9 steps are of all ranks; only these count"
    assert "without a record of rank 2" in summary.reasons["wait"]


def test_no_steps() -> None:
    for run in (Planted(steps=0).run(), Run({})):
        summary = summarize(run)
        assert (summary.steps, summary.parts_ms, summary.buckets) == (0, {}, [])
        for name in ("step_ms", "parts_ms", "exposed_ms", "hidden_ms", "overlap", "traffic"):
            assert summary.reasons[name] == "no step is recorded on all ranks"
        assert summary.traffic is None
        assert pick_steps(run, summary) == []


def test_one_rank() -> None:
    summary = summarize(Planted(world_size=1, buckets=0).run())
    assert summary.parts_ms["forward"] == 20
    assert summary.reasons["overlap"] == "one rank exchanges nothing"
    assert summary.reasons["traffic"] == "one rank sends nothing"
    assert summary.reasons["straggler"] == "one rank exchanges nothing"


def test_no_exchange() -> None:
    summary = summarize(Planted(buckets=0).run())
    assert summary.reasons["overlap"] == "no exchange was recorded"
    assert summary.reasons["traffic"] == "no bucket of gradients was sent"
    assert summary.reasons["straggler"] == "no rank waited"


def test_ddp_of_torch_has_no_codec() -> None:
    summary = summarize(Planted(codec="ddp", encode=0, decode=0, sent=4_000_000).run())
    assert summary.reasons["codec"] == "DDP itself exchanges the gradients, without a codec"
    assert summary.parts_ms["transfer"] == pytest.approx(30)
    assert summary.traffic.ratio == 1


def test_buckets_without_exchanges() -> None:
    run = Planted().run()
    for rank, of_rank in run.ranks.items():
        steps = {step: replace(each, spans=()) for step, each in of_rank.steps.items()}
        run = replaced(run, rank, steps=steps)
    summary = summarize(run)
    assert summary.parts_ms["unattributed"] == summary.exposed_ms == pytest.approx(33)
    assert summary.overlap is None
    assert summary.traffic.wire_gbps is None
    assert summary.reasons["traffic.wire_gbps"] == "no exchange was recorded"
    assert summary.traffic.ratio == 4


def test_steps_that_are_not_recorded_in_detail() -> None:
    run = Planted().run()
    for rank in (0, 1):
        run = without_detail(run, rank, *range(6))
    summary = summarize(run)
    assert summary.step_ms["mean"] == pytest.approx(100)
    assert summary.reasons["parts_ms"] == "no step is recorded in detail on all ranks"
    # The phases are known, and what is exposed is not: it is not zero either.
    assert summary.parts_ms == pytest.approx(
        {"data": 2, "forward": 20, "backward": 73, "optimizer": 5, "other": 0}
    )
    assert not summary.parts_ms.keys() & set(EXPOSED)
    assert [each.label for each in pick_steps(run, summary)] == ["median step"]


def test_only_steps_that_all_have_in_detail_count_in_parts() -> None:
    run = Planted(slow_steps={3: 2}).run()
    run = without_detail(run, 1, 2, 4, 5)
    summary = summarize(run)
    assert (summary.steps, list(summary.series.steps)) == (4, [3])
    assert summary.step_ms["mean"] == pytest.approx(115)
    assert summary.notes == ["steps looked at in detail take 160.0 ms, and all steps 115.0 ms"]
    assert "wait" not in summary.reasons


@pytest.mark.parametrize(("misread", "is_told"), [(0, False), (3, False), (20, True), (-20, True)])
def test_wrong_clocks_are_told(misread: float, is_told: bool) -> None:
    notes = summarize(Planted(misread={1: misread}).run()).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told
    if misread == 20:
        assert notes == [
            "transfer is 37.5 ms a step by clocks and 60.0 ms by durations: clocks may be wrong, "
            "trust the latter"
        ]


@pytest.mark.parametrize(
    "planted",
    [
        Planted(misread={1: 6}),  # 3 ms a step, and 5 %
        Planted(misread={1: 0.9}, transfer=1),  # 45 %, and 1.8 ms a step
    ],
)
def test_small_differences_between_clocks_and_durations_are_not_told(planted: Planted) -> None:
    assert summarize(planted.run()).notes == []


@pytest.mark.parametrize(("op", "is_told"), [("broadcast", False), ("all_gather", True)])
def test_who_sends_a_broadcast_may_leave_early(op: str, is_told: bool) -> None:
    run = Planted().run()
    for rank, of_rank in run.ranks.items():
        steps = {}
        for step, record in of_rank.steps.items():
            spans = [
                replace(s, op=op, end=s.end if rank else s.begin + MS)
                if s.phase == "exchange"
                else s
                for s in record.spans
            ]
            steps[step] = replace(record, spans=spans)
        run = replaced(run, rank, steps=steps)
    notes = summarize(run).notes
    assert any("clocks may be wrong" in note for note in notes) == is_told


@pytest.mark.parametrize(("uncertainty", "is_told"), [(2.2, False), (2.3, True)])
def test_uncertain_clocks_are_told(uncertainty: float, is_told: bool) -> None:
    notes = summarize(Planted(uncertainty=uncertainty).run()).notes
    assert bool(notes) == is_told
    if is_told:
        assert notes == [
            "clocks are uncertain by 2.30 ms and an exchange takes 22.50 ms: what is waiting and "
            "what transfer is vague"
        ]


def test_clocks_that_were_never_compared_are_told() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 1e6}, uncertainty=None).run())
    assert summary.notes == [
        "no clock of rank 1 was compared with rank 0's: who waited follows from how long exchanges "
        "took"
    ]
    assert summary.straggler == 1
    assert summary.ranks[0].wait_ms == pytest.approx(50)
    # Processes of one host read the same clock.
    assert summarize(Planted(hosts=["host-a"], uncertainty=None).run()).notes == []


def test_errors_have_their_rank() -> None:
    run = replaced(Planted().run(), 1, errors=[ErrorRecord(3, 0, 0.25, 0.5)])
    assert summarize(run).errors == [
        {
            "rank": 1,
            "step": 3,
            "bucket": 0,
            "relative_l2": 0.25,
            "cosine": 0.5,
            "residual_ratio": None,
        }
    ]


def test_of_many_steps_a_part_is_looked_at() -> None:
    run = Planted(steps=3).run()
    for rank, of_rank in run.ranks.items():
        last = of_rank.steps[2]
        steps = {
            step: replace(last, step=step, begin=last.begin + step * 200 * MS)
            for step in range(20_002)
        }
        run = replaced(run, rank, steps=steps)
    begin = time.monotonic()
    summary = summarize(run)
    assert time.monotonic() - begin < 60
    assert summary.steps == 20_000
    assert summary.notes == [
        "communication is of 500 of 20000 steps, spread evenly; step times are of all"
    ]
    looked_at = summary.series.steps
    assert len(looked_at) == len(summary.series.step_ms) == 500
    assert [(step - 2) // 40 for step in looked_at] == list(range(500))
    # What happens every tenth step is not always, and not never, looked at.
    assert 20 < sum(step % 10 == 0 for step in looked_at) < 80
    assert summary.parts_ms["transfer"] == pytest.approx(31)
    assert summarize(run).series.steps == looked_at


@pytest.mark.parametrize(("spans", "looked_at"), [(2_000, 125), (10_000, 50), (30_000, 50)])
def test_of_steps_with_many_spans_fewer_are_looked_at(spans: int, looked_at: int) -> None:
    run = Planted(world_size=2, steps=130).run()
    for rank, of_rank in run.ranks.items():
        steps = {
            step: replace(each, spans=each.spans[:1] * spans)
            for step, each in of_rank.steps.items()
        }
        run = replaced(run, rank, steps=steps)
    assert len(sample(run, skip=0).detailed) == looked_at
