import json
import time

import pytest
from planted import MS, Planted, bare, changed, replace, replaced
from report_pages import assert_snapshot

from lightning_dist.profiling.analysis.parts import PARTS, Summary
from lightning_dist.profiling.analysis.summarize import pick_steps, summarize
from lightning_dist.profiling.analysis.tables import sample
from lightning_dist.profiling.capture.events import EndRecord, ErrorRecord, LinkRecord, StepRecord
from lightning_dist.profiling.run import Run


def test_a_planted_run_in_numbers() -> None:
    summary = summarize(Planted(late={1: 50}, shift={1: 123.4}).run())
    assert (summary.steps, summary.warmup_steps) == (4, 2)
    assert summary.step_ms == pytest.approx({"mean": 150, "median": 150, "p95": 150})
    assert summary.breakdown_ms == pytest.approx(
        {
            "between_steps": 2,
            "forward": 45,
            "backward": 40,
            "exposed_wait": 10.5,
            "exposed_transfer": 45.5,
            "exposed_codec": 2,
            "exposed_other": 0,
            "optimizer": 5,
            "other": 0,
        }
    )
    assert summary.exposed_ms == pytest.approx(58)
    assert summary.hidden_ms == pytest.approx(29)
    assert summary.overlap_fraction == pytest.approx(2 * 29 / (110 + 60))
    assert summary.exposed_fraction == pytest.approx(58 / 150)
    assert summary.profiler_overhead == pytest.approx(0.05 / 150)
    assert summary.straggler == 1
    assert summary.unavailable == {
        "errors": "none was sampled",
        "links": "no link was measured",
        "traffic.link_gbps": "no link was measured",
    }
    assert summary.notes == []
    assert summary.run == {
        "codec": "int8",
        "backend": "gloo",
        "device": "cpu",
        "world_size": 2,
        "nodes": ["node-a", "node-b"],
        "script": "",
        "started": "2027-01-15T08:00:00+00:00",
        "versions": {"torch": "2.13.0"},
    }
    assert json.loads(json.dumps(summary.as_dict()))["steps"] == 4


def test_ranks_of_a_planted_run() -> None:
    summary = summarize(Planted(world_size=4, late={1: 30, 3: 70}, shift={2: -9}).run())
    assert [each.rank for each in summary.ranks] == [0, 1, 2, 3]
    assert [each.node for each in summary.ranks] == ["node-a", "node-b"] * 2
    assert [each.wait_ms for each in summary.ranks] == pytest.approx([70, 40, 70, 0])
    assert [each.waited_for_ms for each in summary.ranks] == pytest.approx([0, 0, 0, 180])
    assert [each.exposed_ms for each in summary.ranks] == pytest.approx([103, 73, 103, 33])
    uncertainties = [each.clock_uncertainty_ms for each in summary.ranks]
    assert uncertainties[0] is None
    assert uncertainties[1:] == pytest.approx([0.02] * 3, abs=1e-3)  # and a drift within a second
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
    run = changed(
        run, lambda step: replace(step, spans=[replace(span, bucket=0) for span in step.spans])
    )
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
    assert traffic.ddp_equivalent_busbw_gbps == pytest.approx(16e6 * 8 / 60e6)
    assert traffic.link_gbps == pytest.approx(1.0)
    assert traffic.link_utilization == pytest.approx(4e6 * 8 / 60e6)
    assert summary.unavailable == {"errors": "none was sampled"}
    assert [each["sent"] for each in summary.links] == [100_000_000, 250_000_000, 1]
    assert {(each["rank"], each["group"]) for each in summary.links} == {(1, "flat")}
    for each in summary.ranks:
        assert each.inter_gbps == pytest.approx(4e6 * 8 / 60e6)
        assert each.intra_gbps is None


@pytest.mark.parametrize("nodes", [("node-a", "node-b"), ("node-a",)])
def test_a_rank_that_is_done_first_still_sends(nodes: tuple[str, ...]) -> None:
    """Rank 1 has what rank 0 sent it 10 ms before its own bytes are there."""
    run = Planted(nodes=nodes, shift={1: 7}).run()

    def first(step: StepRecord) -> StepRecord:
        earlier = [
            replace(span, end=span.end - 10 * MS) if span.phase == "exchange" else span
            for span in step.spans
        ]
        return replace(step, spans=earlier)

    summary = summarize(changed(run, first, 1))
    # From 33 to 93 ms on both links, as if they had ended together.
    assert summary.traffic.wire_gbps == pytest.approx(4e6 * 8 / 60e6)
    assert summary.traffic.ddp_equivalent_busbw_gbps == pytest.approx(16e6 * 8 / 60e6)
    rates = [each.inter_gbps or each.intra_gbps for each in summary.ranks]
    assert rates == pytest.approx([4e6 * 8 / 60e6] * 2)
    assert summary.breakdown_ms["exposed_transfer"] == pytest.approx((31 + 21) / 2), (
        "of each what it saw"
    )


def test_the_peak_is_of_links_between_hosts_if_there_are_any() -> None:
    run = Planted(world_size=4).run()
    within = LinkRecord("flat", sent=1_000_000_000, seconds=1.0, peer=2)
    run = replaced(run, 0, links=[within])
    assert summarize(run).traffic.link_gbps == pytest.approx(8)
    across = LinkRecord("flat", sent=1_000_000, seconds=0.1, peer=1)
    run = replaced(run, 0, links=[within, across])
    assert summarize(run).traffic.link_gbps == pytest.approx(0.08)


def inside_first(run: Run) -> Run:
    """Of 2 nodes of 2 ranks: buckets 0 and 1 go inside the node, 2 and 3 between nodes."""

    def inside(step: StepRecord) -> StepRecord:
        spans = [
            replace(s, group="intra" if s.bucket < 2 else "inter") if s.phase == "exchange" else s
            for s in step.spans
        ]
        buckets = [
            replace(b, intra=b.intra + b.inter, inter=0) if b.index < 2 else b for b in step.buckets
        ]
        return replace(step, spans=spans, buckets=buckets)

    for rank, each in run.ranks.items():
        groups = {"intra": [rank // 2 * 2, rank // 2 * 2 + 1], "inter": [rank % 2, rank % 2 + 2]}
        run = replaced(run, rank, metadata=replace(each.metadata, groups=groups))
    return changed(run, inside)


def test_rates_are_over_what_can_carry_them() -> None:
    """Half of the bytes, in half of the buckets, stay in a node: the link has the rest."""
    summary = summarize(inside_first(Planted(world_size=4, nodes=["a", "a", "b", "b"]).run()))
    for each in summary.ranks:
        # From 33 to 63 ms, and from 53 to 93 ms: they queue behind one another.
        assert each.intra_gbps == pytest.approx(2e6 * 8 / 30e6)
        assert each.inter_gbps == pytest.approx(2e6 * 8 / 40e6)
    assert summary.traffic.wire_gbps == pytest.approx(2 * 2e6 * 8 / 40e6)
    assert (summary.traffic.intra_bytes, summary.traffic.inter_bytes) == (2e6, 2e6)


def test_series_and_the_steps_to_show() -> None:
    planted = Planted(steps=23, slow_steps={5: 3, 7: 2, 10: 1.5})
    run = planted.run()
    summary = summarize(run)
    assert list(summary.per_step.steps) == list(range(2, 23))
    by_step = dict(zip(summary.per_step.steps, summary.per_step.step_ms, strict=True))
    assert {step for step, each in by_step.items() if each > 101} == {5, 7, 10}
    assert summary.step_ms["median"] == pytest.approx(100)
    assert summary.step_ms["mean"] == pytest.approx((21 * 100 + 120 + 60 + 30) / 21)
    assert summary.step_ms["p95"] == by_step[7]
    assert [(each.step, each.label) for each in pick_steps(run, summary)] == [
        (2, "median step"),
        (7, "p95 step"),
        (5, "slowest step"),
    ]
    for name in PARTS:
        assert len(summary.per_step.breakdown_ms[name]) == 21
    for i, of_step in enumerate(summary.per_step.step_ms):
        assert sum(summary.per_step.breakdown_ms[name][i] for name in PARTS) == pytest.approx(
            of_step
        )
    assert {rank: len(each) for rank, each in summary.per_step.wait_ms.items()} == {0: 21, 1: 21}
    late = summarize(Planted(late={0: 10}).run())
    assert late.per_step.wait_ms == {0: [0] * 4, 1: pytest.approx([10] * 4)}


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "counted", "left_out"),
    [(6, 2, 4, 2), (3, 2, 1, 2), (2, 2, 2, 0), (1, 2, 1, 0), (1, 0, 1, 0)],
)
def test_first_steps_are_left_out(
    steps: int, warmup_steps: int, counted: int, left_out: int
) -> None:
    summary = summarize(Planted(steps=steps, slow_steps={0: 9}).run(), warmup_steps=warmup_steps)
    assert (summary.steps, summary.warmup_steps) == (counted, left_out)
    assert (summary.step_ms["mean"] > 101) == (left_out == 0)
    assert any("the first are not left out" in note for note in summary.notes) == (
        left_out < warmup_steps
    )


def test_a_negative_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1; 0 counts all steps"):
        summarize(Planted().run(), warmup_steps=-1)


@pytest.mark.parametrize(("late", "straggler"), [(3, None), (6, 1)])
def test_little_waiting_has_no_straggler(late: float, straggler: int | None) -> None:
    summary = summarize(Planted(late={1: late}).run())
    assert summary.straggler == straggler
    if straggler is None:
        assert summary.unavailable["straggler"] == "waiting is 1.5 % of the step"
    assert summary.ranks[0].wait_ms == pytest.approx(late)


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
        end = steps[20_001].begin
        clocks = [replace(each, at=at) for each, at in zip(of_rank.clocks, (0, end), strict=False)]
        run = replaced(run, rank, steps=steps, clocks=clocks)
    begin = time.monotonic()
    summary = summarize(run)
    assert time.monotonic() - begin < 60
    assert summary.steps == 20_000
    assert summary.notes == [
        "communication is of 500 of 20000 steps, spread evenly; step times are of all"
    ]
    looked_at = summary.per_step.steps
    assert len(looked_at) == len(summary.per_step.step_ms) == 500
    assert [(step - 2) // 40 for step in looked_at] == list(range(500))
    # What happens every tenth step is not always, and not never, looked at.
    assert 20 < sum(step % 10 == 0 for step in looked_at) < 80
    assert summary.breakdown_ms["exposed_transfer"] == pytest.approx(31)
    assert summarize(run).per_step.steps == looked_at


@pytest.mark.parametrize(("spans", "looked_at"), [(2_000, 125), (10_000, 50), (30_000, 50)])
def test_of_steps_with_many_spans_fewer_are_looked_at(spans: int, looked_at: int) -> None:
    run = Planted(world_size=2, steps=130).run()
    run = changed(run, lambda step: replace(step, spans=step.spans[:1] * spans))
    assert len(sample(run, warmup_steps=0).detailed) == looked_at


def test_ranks_of_a_host_share_its_link() -> None:
    """2 nodes of 2 ranks: 15 ms a bucket for 2 MB, of a link that can do as much."""
    run = Planted(world_size=4, nodes=["a", "a", "b", "b"]).run()
    run = replaced(run, 0, links=[LinkRecord("flat", sent=4_000_000, seconds=0.03, peer=2)])
    traffic = summarize(run).traffic
    # From 33 to 93 ms, two ranks of each node: 8 MB.
    assert traffic.wire_gbps == pytest.approx(8e6 * 8 / 60e6)
    assert traffic.link_utilization == pytest.approx(1.0)
    assert traffic.wire_bytes == 4e6


LATE = Planted(late={1: 50}).run()
NO_STEPS = Planted(steps=0).run()
THREE = Planted(world_size=3, steps=40, late={1: 50}).run()
FOUR_STEPS = Planted(steps=4).run()
HOSTS = Planted(world_size=4, nodes=["a", "a", "b", "b"]).run()
TURNS = [Planted(world_size=3, steps=8, late={late: 40}).run() for late in range(3)]


def only(run: Run, *ranks: int) -> Run:
    return Run({rank: run.ranks[rank] for rank in ranks})


def with_steps(run: Run, rank: int, *steps: int) -> Run:
    of_rank = run.ranks[rank].steps
    return replaced(run, rank, steps={step: of_rank[step] for step in steps})


def with_ends(ends: dict[int, EndRecord | None], run: Run | None = None) -> Run:
    run = replace(Planted(world_size=3).run(), notes=["line 9"]) if run is None else run
    for rank, end in ends.items():
        run = replaced(run, rank, end=end)
    return run


def late_in_turn() -> Run:
    run = TURNS[0]
    for rank, of in run.ranks.items():
        steps = {step: TURNS[step % 3].ranks[rank].steps[step] for step in of.steps}
        run = replaced(run, rank, steps=steps)
    return run


NO_DATA, LOST = EndRecord("OSError: no data", at=7), EndRecord("RuntimeError: closed by peer", at=8)
RUNS = {
    "even ranks": Planted().run(),
    "rank 1 is late": LATE,
    "ranks are late in turn": late_in_turn(),
    "hidden": Planted(transfer=10, encode=0, decode=0, backward=4000).run(),
    "one rank": Planted(world_size=1, buckets=0).run(),
    "no bucket": Planted(buckets=0).run(),
    "stock DDP": Planted(codec="ddp", encode=0, decode=0, sent=4_000_000).run(),
    "no spans": bare(Planted().run(), spans=()),
    "no detailed step": bare(Planted().run(), buckets=(), spans=(), detailed=False),
    "one of two ranks": only(LATE, 0),
    "rank 1 of three is missing": only(THREE, 0, 2),
    "rank 3 of two nodes is missing": only(HOSTS, 0, 1, 2),
    "rank 1 ends after 17 steps": with_steps(THREE, 1, *range(17)),
    "rank 1 ends after 38 steps": with_steps(THREE, 1, *range(38)),
    "rank 1 has a gap": with_steps(THREE, 1, *range(10), *range(20, 40)),
    "rank 1 ends after 9 steps, rank 2 is missing": with_steps(only(THREE, 0, 1), 1, *range(9)),
    "no step": NO_STEPS,
    "no step, and an error": with_ends({1: EndRecord("OSError: no data")}, NO_STEPS),
    "no step, and no end": with_ends({0: None, 1: None}, NO_STEPS),
    "no common step": with_steps(with_steps(FOUR_STEPS, 0, 0, 1), 1, 2, 3),
    "an error of one rank": with_ends({1: NO_DATA}),
    "errors of ranks in their order": with_ends(
        {1: NO_DATA, 2: replace(NO_DATA, at=9), 0: EndRecord("KeyboardInterrupt: ", at=6)}
    ),
    "a rank that lost its peer": with_ends({1: NO_DATA, 0: LOST}),
    "SIGTERM to all": with_ends(dict.fromkeys(range(3), EndRecord("SystemExit: 143"))),
    "late before the forward pass": Planted(late_data={0: 50}, meets_in_forward=True).run(),
}


def words(summary: Summary) -> str:
    fields: dict[str, list[str]] = {}
    for name, reason in summary.unavailable.items():
        if name not in ("errors", "links", "traffic.link_gbps"):  # planted in none of them
            fields.setdefault(reason, []).append(name)
    unavailable = (f"n/a {', '.join(names)}: {reason}" for reason, names in fields.items())
    return "\n".join([summary.headline, *(f"note: {x}" for x in summary.notes), *unavailable])


def test_words_are_those_of_the_snapshot() -> None:
    texts = [f"# {name}\n{words(summarize(run))}" for name, run in RUNS.items()]
    assert_snapshot("summaries.txt", "\n\n".join(texts) + "\n")
