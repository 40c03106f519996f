"""Predictions from planted runs: what a profile says, and what such a run would have taken."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
from planted import Planted, bare, replace, replaced
from whatif_runs import CHUNK, COSTS, DDP, INT8, about, asked, duration, only, with_bursts

from lightning_dist.base.exchanges import UNIT_ELEMENTS
from lightning_dist.profiling.capture.events import BurstRecord, LinkRecord
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import LEAST_TOLERANCE, local_scenarios, predict
from lightning_dist.profiling.whatif.scenarios import (
    FORMS,
    LABEL,
    LinkSpeed,
    Prediction,
    Scenario,
    elsewhere,
    remark,
    scenarios_of,
)

FP16 = {"codec": "fp16"}


def test_what_a_profile_says() -> None:
    found = observe(DDP.run())
    scenario = found.scenario
    assert (scenario.codec, scenario.form, scenario.counts) == ("ddp", "flat", (1, 1))
    assert [bucket.elements for bucket in found.buckets] == [1e6] * 4
    assert [bucket.ready for bucket in found.buckets] == pytest.approx([0.032, 0.042, 0.052, 0.062])
    assert found.tail == pytest.approx(0.005)
    assert scenario.link.rate == pytest.approx(1e8)
    assert found.step == pytest.approx(duration(DDP) / 1e3)
    assert (found.encode, found.decode) == (None, None)
    own = observe(INT8.run())
    assert (own.encode, own.decode) == (pytest.approx(0.004), pytest.approx(0.008))
    late = observe(replace(DDP, late={1: 50}).run())
    assert late.buckets[0].ready == pytest.approx(0.082)  # the last rank says when


def test_small_collectives_that_were_measured_count() -> None:
    without = observe(DDP.run())
    assert (without.scenario.link.latency, without.scenario.inside) == (None, None)
    assert "small collectives were not measured" in without.unavailable["latency"]
    assert "inside" in without.unavailable
    bursts = [
        BurstRecord("flat", "all_gather", 4096, count, seconds, cpu)
        for count, seconds, cpu in [(1, 0.003, 0.001), (16, 0.016, 0.008)]
    ]
    found = observe(replaced(DDP.run(), 1, bursts=bursts))
    link = found.scenario.link
    assert (link.latency, link.overhead, link.cpu) == (0.003, 0.001, 0.0005)
    assert "latency" not in found.unavailable
    fast = elsewhere(found.scenario, link_gbps=100.0)
    free = replace(fast, link=replace(fast.link, overhead=0.0))
    counted, without = (predict(found, [each], costs=COSTS).scenarios[0] for each in (fast, free))
    assert counted.step_ms == pytest.approx(without.step_ms + 1.0, abs=0.7)  # of the last one


def test_a_link_is_as_fast_as_the_collective_that_was_alone_on_it() -> None:
    run = DDP.run()
    for seconds, rate in ((0.01, 2e8), (1.0, 1e8)):  # in the steps it was 1e8
        for rank in run.ranks:
            links = [LinkRecord("flat", sent=2_000_000, seconds=seconds)]
            run = replaced(run, rank, links=links)
        assert observe(run).scenario.link.rate == pytest.approx(rate)


def test_a_codec_shares_the_core_of_a_run_that_had_one_for_each_rank() -> None:
    """What the run's own codec took has that in it already."""
    slow = {**COSTS, "fp16": replace(COSTS["int8"], name="fp16", encode=1e-8)}
    for cores, is_one in ((0, False), (1, True), (2, False)):
        one = observe(about(INT8.run(), cores=cores))
        assert one.one_core is is_one
        there = elsewhere(one.scenario, link_gbps=1.0)
        scenarios = [there, replace(there, codec="fp16")]
        shared, alone = (
            {each.codec: each.step_ms for each in predict(of, scenarios, costs=slow).scenarios}
            for of in (one, replace(one, one_core=False))
        )
        assert shared["int8"] == alone["int8"]
        assert (shared["fp16"] > alone["fp16"]) is is_one


@pytest.mark.parametrize(
    "planted", [DDP, replace(DDP, late={1: 50}), replace(DDP, nodes=("a",)), CHUNK]
)
def test_the_run_itself_is_predicted(planted: Planted) -> None:
    found = asked(planted)
    assert found.measured_ms == pytest.approx(duration(planted))
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert (found.tolerance, found.label) == (LEAST_TOLERANCE, LABEL)


def test_a_slower_link_is_predicted() -> None:
    rate = asked(DDP).link["gbps"]
    assert rate is not None
    half = only(DDP, link_gbps=rate / 2)
    assert half.step_ms == pytest.approx(duration(replace(DDP, transfer=80)))
    assert half.exposed_ms == pytest.approx(4 * 80 - 30)
    assert half.change == 0.0


def test_what_is_asked_of_another_link_is_compared_with_the_runs_own_setting_there() -> None:
    slow, near = asked(DDP, FP16, {}, link_gbps=0.1), asked(DDP, FP16)
    best, own = slow.scenarios
    assert slow.baseline.step_ms is not None
    assert best.step_ms > slow.baseline.step_ms  # the link is slow, and the codec helps there
    assert best.change == pytest.approx(best.step_ms / own.step_ms - 1)
    assert [(each.codec, each.position, slow.is_faster(each)) for each in slow.scenarios] == [
        ("fp16", 1, True),
        ("ddp", 2, False),
    ]
    change = near.scenarios[0].step_ms / near.baseline.step_ms - 1
    assert near.scenarios[0].change == pytest.approx(change)
    rounds = with_bursts(DDP.run(), latency_ms=0.2)
    late = {each.codec: each for each in asked(rounds, {}, FP16, latency_us=1e5).scenarios}
    assert (late["ddp"].change, late["fp16"].change < 0) == (0.0, True)


def test_another_codec_is_predicted() -> None:
    int8, ddp = only(DDP, {"codec": "int8"}), only(INT8, {"codec": "ddp"})
    assert int8.step_ms == pytest.approx(duration(INT8), rel=0.03)
    assert int8.sent_mb == pytest.approx(4.0)
    assert ddp.step_ms == pytest.approx(duration(DDP), rel=0.03)


def test_bytes_and_times_of_the_runs_own_codec_are_those_of_the_run() -> None:
    heavy = replace(CHUNK, encode=12, decode=7, sent=2 * UNIT_ELEMENTS)
    found = asked(heavy, {})
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.scenarios[0].sent_mb == pytest.approx(8 * UNIT_ELEMENTS / 1e6)
    assert found.scenarios[0].source == "as in this run, while training"


def test_other_numbers_of_nodes() -> None:
    observed = observe(DDP.run())
    for nodes in (64, 4):
        there = elsewhere(observed.scenario, nodes=nodes)
        scenarios = [replace(there, codec=codec) for codec in ("ddp", "fp16")]
        found = predict(observed, scenarios, costs=COSTS).scenarios
        assert [(each.nodes, each.codec, each.position) for each in found] == [
            (nodes, "fp16", 1),
            (nodes, "ddp", 2),
        ]
        fp16, ddp = found
        assert ddp.sent_mb == pytest.approx(16 * 2 * (nodes - 1) / nodes)
        assert ddp.change == 0.0
        assert fp16.change == pytest.approx(fp16.step_ms / ddp.step_ms - 1)


def test_nothing_is_ranked_closer_than_the_error() -> None:
    settles = (0, 1, 2, 10, 11, 30)
    costs = {f"c{i}": replace(COSTS["none"], name=f"c{i}", store=i * 2e-9) for i in settles}
    observed = observe(DDP.run())
    scenarios = [replace(observed.scenario, codec=name) for name in costs]
    found = predict(observed, scenarios, costs={**COSTS, **costs})
    assert found.tolerance == LEAST_TOLERANCE
    steps = [each.step_ms or 0 for each in found.scenarios]
    assert steps == sorted(steps)
    pairs = list(zip(found.scenarios, found.scenarios[1:], strict=False))
    for one, other in pairs:
        apart = (other.step_ms or 0) > (one.step_ms or 0) * (1 + found.tolerance)
        assert (one.position != other.position) is apart
    assert {one.position == other.position for one, other in pairs} == {True, False}
    remarks = [remark(each, found) for each in found.scenarios]
    assert (remarks[:2], remarks[-1]) == (["no difference from this run within the error"] * 2, "")


def test_a_large_error_joins_what_a_small_one_would_rank() -> None:
    # A third of the steps is slow, so that a median of rates is no rate of a median step.
    odd = replace(DDP, slow_steps={2: 3, 3: 3, 4: 3, 5: 1, 6: 1, 7: 1})
    found = asked(odd, {}, FP16)
    assert found.error is not None
    assert found.tolerance == pytest.approx(max(abs(found.error), LEAST_TOLERANCE))
    assert found.tolerance > LEAST_TOLERANCE


def test_what_is_not_known_is_none_and_says_why() -> None:
    first, *others = asked(
        DDP, FP16, {"codec": "topk"}, {"codec": "int8", "form": "hierarchical"}
    ).scenarios
    assert first.step_ms is not None
    reasons = {each.codec: each.reason for each in others}
    assert reasons["topk"] == "the cost of topk was not measured"
    assert reasons["int8"].startswith("one rank per node")
    for each in others:
        assert (each.step_ms, each.exposed_ms, each.sent_mb, each.change, each.position) == (
            None,
        ) * 5


def test_from_one_host_nothing_is_known_of_links_between_hosts() -> None:
    one = replace(DDP, nodes=("a",))
    with pytest.raises(ValueError, match="give the rate of a link between nodes with --link-gbps"):
        only(one, nodes=4)
    given = only(one, nodes=4, link_gbps=1.0)
    assert given.step_ms is not None
    assert given.world_size == 8
    run = with_bursts(one.run(), latency_ms=0.2)
    here, free, late = (
        asked(run, {}, nodes=64, link_gbps=10.0, latency_us=us) for us in (None, 0.0, 1e3)
    )
    assert here.scenarios[0].step_ms == free.scenarios[0].step_ms
    assert late.scenarios[0].step_ms > free.scenarios[0].step_ms
    assert "latency between nodes is 0" in here.unavailable["latency"]
    assert "latency" not in late.unavailable


def test_scenarios() -> None:
    def of(
        world_size: int, *codecs: str, forms: tuple[str, ...] = (), inside: float | None = None
    ) -> set[tuple[str, str]]:
        observed = observe(replace(DDP, world_size=world_size).run())
        there = elsewhere(observed.scenario, link_gbps=1.0, inside_gbps=inside)
        found = scenarios_of(observed.scenario, there, codecs=codecs, forms=forms)
        assert {each.link for each in found} == {there.link}
        assert len(set(found)) == len(found)
        return {(each.codec, each.form) for each in found}

    ddp, (flat, *by_hosts) = ("ddp", "flat"), [("int8", form) for form in FORMS]
    assert of(2, "ddp", "int8") == {ddp, flat}
    assert of(4, "ddp", "int8") == {ddp, flat, *by_hosts}
    with pytest.raises(ValueError, match="no exchange inside a node was measured"):
        of(4, "ddp", "int8", forms=("leader",))
    assert of(4, "ddp", "int8", forms=("leader",), inside=9.0) == {ddp, ("int8", "leader")}
    assert of(2, "int8") == {ddp, flat}, "with the run's own, which is what it is compared with"


def local(**asked: Any) -> list[Prediction]:
    observed = observe(DDP.run())
    found = local_scenarios(observed, observed.scenario, costs=COSTS, **asked)
    return list(predict(observed, [observed.scenario, *found], costs=COSTS).scenarios)[1:]


@pytest.mark.parametrize("sync_every", [1, 4, 16])
def test_local_steps_wait_for_one_exchange_in_a_window(sync_every: int) -> None:
    """By hand: 62 ms to the last gradient and 5 after; 4 million elements at 100 MB/s, once."""
    found = {each.codec: each for each in local(codecs=["none", "fp16"], sync_every=[sync_every])}
    for codec, nbytes in (("none", 16e6), ("fp16", 8e6)):
        exchange = nbytes / 1e8 * 1e3
        assert found[codec].exposed_ms == pytest.approx(exchange / sync_every)
        assert found[codec].step_ms == pytest.approx(67 + exchange / sync_every)
        assert found[codec].sent_mb == pytest.approx(nbytes / 1e6 / sync_every)
        assert found[codec].position is None  # a model trains differently with them


@pytest.mark.parametrize("below", [0.05, 0.2, 0.9])
def test_the_least_number_of_local_steps_that_keeps_waiting_below_a_share(below: float) -> None:
    for each in local(below=below):
        fewer = local(codecs=[each.codec], sync_every=[max(each.sync_every - 1, 1)])[0]
        assert each.exposed_share <= below
        assert each.sync_every == 1 or fewer.exposed_share > below
    counts = {each.codec: each.sync_every for each in local(below=0.05)}
    assert counts["none"] == 46  # 160 ms * 0.95 / (0.05 * 67 ms) = 45.4
    assert counts["fp16"] == 23
    assert counts["int8"] < 23


@pytest.mark.parametrize(
    ("fragments", "overlap_steps", "exposed_ms"),
    [
        (1, 1, (160 - 67) / 16),
        (1, 2, (160 - 2 * 67) / 16),
        (1, 3, 0.0),
        (4, 0, 40 / 4),
        (4, 1, 0.0),
        (2, 1, (80 - 67) / 8),
    ],
)
def test_fragments_and_overlap_by_hand(
    fragments: int, overlap_steps: int, exposed_ms: float
) -> None:
    """Of 160 ms in 16 steps of 67 ms, a fragment's share, less what the overlap hides."""
    settings = {"fragments": fragments, "overlap_steps": overlap_steps}
    (found,) = local(codecs=["none"], sync_every=[16], **settings)
    assert (found.fragments, found.overlap_steps) == (fragments, overlap_steps)
    assert found.exposed_ms == pytest.approx(exposed_ms, abs=1e-9)
    assert found.step_ms == pytest.approx(67 + exposed_ms)
    assert found.sent_mb == pytest.approx(1.0)


def test_on_a_shared_core_no_overlap_hides_the_codec() -> None:
    observed = replace(observe(DDP.run()), one_core=True)
    settings = {"codecs": ["int8"], "sync_every": [4], "overlap_steps": 3}
    scenarios = local_scenarios(observed, observed.scenario, costs=COSTS, **settings)
    (found,) = predict(observed, scenarios, costs=COSTS).scenarios
    cost = COSTS["int8"]
    codec_ms = 4e6 * (cost.encode + cost.decoding(2)) * 1e3
    assert found.exposed_ms == pytest.approx(codec_ms / 4)


def test_the_least_number_of_local_steps_of_fragments() -> None:
    def counts(**settings: int) -> int:
        return local(codecs=["none"], below=0.05, **settings)[0].sync_every

    assert counts(fragments=4) == 48  # 40 ms * 0.95 / (0.05 * 67 ms) = 11.3 for each
    assert counts(overlap_steps=2) == 8  # 26 ms * 0.95 / (0.05 * 67 ms) = 7.4
    assert counts(fragments=4, overlap_steps=1) == 8  # all hidden; more than the overlap


PLACE = Scenario("ddp", "flat", (1, 1), LinkSpeed(1e6))
LOCAL_STEPS = about(bare(DDP.run(), buckets=(), detailed=False), sync_every=16)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: only(replace(DDP, world_size=1)), "one rank exchanges nothing"),
        (lambda: only(replace(DDP, steps=0)), "no step was recorded on any rank"),
        (lambda: only(replace(DDP, buckets=0)), "no gradient bucket was observed"),
        (lambda: observe(LOCAL_STEPS), r"profile some steps of DDP.*--local-steps 16"),
        (
            lambda: asked(replace(INT8, codec="sign"), {"codec": "ddp"}, FP16),
            "cannot be simulated: the cost of sign was not measured",
        ),
        (lambda: replace(PLACE, form="ring"), "form must be one of flat, hierarchical, leader"),
        (lambda: elsewhere(PLACE, nodes=1), "nodes must be 2 or more"),
        (lambda: elsewhere(PLACE, link_gbps=0.0), "link_gbps must be above 0"),
        (lambda: elsewhere(PLACE, inside_gbps=nan), "inside_gbps must be above 0"),
        (lambda: elsewhere(PLACE, latency_us=-1.0), "latency_us must be 0 or more"),
        (lambda: elsewhere(PLACE, latency_us=nan), "latency_us must be 0 or more"),
        (lambda: elsewhere(PLACE, latency_us=inf), "latency_us must be 0 or more"),
        (lambda: local(sync_every=[4, 0]), "1 or more, got 0"),
        (lambda: local(below=1.0), "between 0 and 100 %, got 100%"),
        (lambda: local(sync_every=[6], fragments=4), "multiple of fragments"),
        (
            lambda: local(sync_every=[8], fragments=4, overlap_steps=2),
            r"less than local steps / fragments.* 8 / 4 = 2",
        ),
        (lambda: local(below=0.05, fragments=0), "fragments must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        call()


def test_local_steps_cross_hosts_by_levels_where_those_have_several_ranks() -> None:
    observed = observe(DDP.run())
    nodes = replace(observed.scenario, counts=(2, 2), inside=LinkSpeed(1e9))
    found = local_scenarios(observed, nodes, costs=COSTS, sync_every=[8])
    assert {each.form for each in found} == {"hierarchical"}
    assert {each.codec for each in found} == {"none", "fp16", "int8"}
