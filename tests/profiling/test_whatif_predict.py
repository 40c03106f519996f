"""Predictions from planted runs: what such a run would have taken is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import MS, Planted, replaced

from lightning_dist.profiling.folder import Run
from lightning_dist.profiling.records import BurstRecord, LinkRecord, Span
from lightning_dist.profiling.whatif.answer import LABEL, NO_DIFFERENCE, NO_ERROR, WhatIf, is_faster
from lightning_dist.profiling.whatif.candidates import SCALE, candidates, scaled, with_own
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import LEAST_MARGIN, Wish, predict
from lightning_dist.reducer.chunk_sizes import CHUNK_ELEMENTS
from lightning_dist.reducer.costs import CodecCost

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)
INT8 = replace(DDP, codec="int8", encode=1, decode=2, sent=1_000_000, transfer=10)
CHUNK = replace(INT8, raw=4 * CHUNK_ELEMENTS, sent=CHUNK_ELEMENTS)
"""Buckets of one chunk each, as planted ones are; larger ones overlap with themselves."""

COSTS = {
    # of a bucket of a million elements 1 ms and, with two payloads, 2 ms
    "int8": CodecCost("int8", "two_shot", 1.0, encode=1e-9, decode=5e-10, settle=1e-9),
    "fp16": CodecCost("fp16", "allreduce", 2.0, encode=0.0, decode=0.0, settle=0.0, source="here"),
    "none": CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, settle=0.0),
}


def asked(planted: Planted, *wishes: Wish) -> WhatIf:
    return predict(observe(planted.run()), wishes, costs=COSTS)


def duration(planted: Planted) -> float:
    return planted.run().ranks[0].steps[4].duration / MS


def with_small_exchanges(run: Run, took: float) -> Run:
    """Each step has a vote of a few bytes, too."""
    ranks = {}
    for rank, each in run.ranks.items():
        steps = {}
        for number, step in each.steps.items():
            begin = round(1 * MS)
            vote = Span(
                "exchange", -1, begin, begin + round(took * MS), "all_reduce", "control", 8, order=0
            )
            steps[number] = replace(step, spans=(vote, *step.spans))
        about = replace(each.about, groups={**each.about.groups, "control": [0, 1]})
        ranks[rank] = replace(each, about=about, steps=steps)
    return Run(ranks)


def test_what_a_profile_says() -> None:
    found = observe(DDP.run())
    assert (found.setting.codec, found.setting.form, found.setting.counts) == (
        "ddp",
        "flat",
        [1, 1],
    )
    assert [bucket.elements for bucket in found.buckets] == [1e6] * 4
    assert [bucket.ready for bucket in found.buckets] == pytest.approx([0.032, 0.042, 0.052, 0.062])
    assert found.tail == pytest.approx(0.005)
    assert found.setting.link.rate == pytest.approx(1e8)
    assert found.step == pytest.approx(duration(DDP) / 1e3)
    assert (found.encode, found.decode) == (None, None)
    own = observe(INT8.run())
    assert (own.encode, own.decode) == (pytest.approx(0.004), pytest.approx(0.008))


def test_the_last_rank_says_when_a_bucket_is_ready() -> None:
    found = observe(replace(DDP, late={1: 50}).run())
    assert found.buckets[0].ready == pytest.approx(0.082)


def test_a_small_exchange_tells_the_latency_and_without_one_there_is_a_reason() -> None:
    found = observe(with_small_exchanges(DDP.run(), took=0.4))
    assert found.setting.link.latency == pytest.approx(0.0002)  # of two rounds
    assert "latency" not in found.reasons
    without = observe(DDP.run())
    assert without.setting.link.latency is None
    assert "no small exchange" in without.reasons["latency"]
    assert without.setting.inside is None
    assert "inside" in without.reasons


def test_small_collectives_that_were_measured_count() -> None:
    bursts = [
        BurstRecord("flat", "all_gather", 4096, count, seconds, cpu)
        for count, seconds, cpu in [(1, 0.003, 0.001), (16, 0.016, 0.008)]
    ]
    run = with_small_exchanges(replace(DDP, steps=8).run(), took=0.4)
    found = observe(replaced(run, 1, bursts=bursts))
    link = found.setting.link
    assert (link.latency, link.overhead, link.cpu) == (0.003, 0.001, 0.0005)
    assert not {"latency", "overhead"} & found.reasons.keys()
    assert "overhead" in observe(run).reasons
    (faster,) = predict(found, [Wish(gbps=100.0)], costs=COSTS).others
    plain = replace(found, setting=replace(found.setting, link=replace(link, overhead=0.0)))
    (free,) = predict(plain, [Wish(gbps=100.0)], costs=COSTS).others
    assert free.step_ms is not None
    assert faster.step_ms == pytest.approx(free.step_ms + 1.0, abs=0.7)  # of the last one


def test_a_link_is_as_fast_as_the_collective_that_was_alone_on_it() -> None:
    fast = [LinkRecord("flat", sent=2_000_000, seconds=0.01)]
    run = DDP.run()
    for rank in run.ranks:
        run = replaced(run, rank, links=fast)
    assert observe(run).setting.link.rate == pytest.approx(2e8)  # in the steps it was 1e8
    slow = [replace(fast[0], seconds=1.0)]
    for rank in run.ranks:
        run = replaced(run, rank, links=slow)
    assert observe(run).setting.link.rate == pytest.approx(1e8)


@pytest.mark.parametrize(("cores", "one"), [(0, False), (1, True), (2, False)])
def test_the_cores_of_the_run_count_unless_something_else_is_asked(cores: int, one: bool) -> None:
    run = DDP.run()
    for rank, each in run.ranks.items():
        run = replaced(run, rank, about=replace(each.about, cores=cores))
    found = observe(run)
    assert found.one_core is one
    slow = {**COSTS, "int8": replace(COSTS["int8"], encode=1e-8)}
    wishes = [Wish(codec="int8", one_core=one_core) for one_core in (None, True, False)]
    usual, shared, own = (predict(found, [wish], costs=slow).others[0].step_ms for wish in wishes)
    assert shared != own
    assert usual == (shared if one else own)


def test_what_the_codec_of_the_run_took_has_its_core_in_it() -> None:
    run = INT8.run()
    for rank, each in run.ranks.items():
        run = replaced(run, rank, about=replace(each.about, cores=1))
    one = observe(run)
    own = replace(one, one_core=False)
    slow = {**COSTS, "fp16": replace(COSTS["int8"], name="fp16", encode=1e-8)}
    wishes = [Wish(gbps=1.0), Wish(codec="fp16")]
    shared, alone = (predict(each, wishes, costs=slow).others for each in (one, own))
    steps = [{each.codec: each.step_ms for each in of} for of in (shared, alone)]
    assert steps[0]["int8"] == steps[1]["int8"]
    assert steps[0]["fp16"] > steps[1]["fp16"]


def test_the_latency_of_one_host_says_nothing_of_others() -> None:
    run = with_small_exchanges(replace(DDP, hosts=("a",)).run(), took=0.4)
    wish = Wish(hosts=64, gbps=10.0)
    found = predict(observe(run), [wish, replace(wish, latency=0.0)], costs=COSTS)
    first, second = found.others
    assert first.step_ms == second.step_ms
    assert "rounds between hosts count nothing" in found.reasons["latency"]
    given = predict(observe(run), [replace(wish, latency=1e-3)], costs=COSTS)
    assert given.others[0].step_ms > first.step_ms
    assert "latency" not in given.reasons


@pytest.mark.parametrize(
    "planted", [DDP, replace(DDP, late={1: 50}), replace(DDP, hosts=("a",)), CHUNK]
)
def test_the_run_itself_is_predicted(planted: Planted) -> None:
    found = asked(planted)
    assert found.measured_ms == pytest.approx(duration(planted))
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.margin == LEAST_MARGIN


def test_a_slower_link_is_predicted() -> None:
    rate = asked(DDP).link["gbps"]
    assert rate is not None
    (half,) = asked(DDP, Wish(gbps=rate / 2)).others
    assert half.step_ms == pytest.approx(duration(replace(DDP, transfer=80)))
    assert half.exposed_ms == pytest.approx(4 * 80 - 30)
    assert (half.change, half.verdict) == (0.0, NO_DIFFERENCE)


def test_what_is_asked_of_another_link_is_compared_with_the_runs_own_setting_there() -> None:
    fp16, ddp, near = Wish(codec="fp16", gbps=0.1), Wish(gbps=0.1), Wish(codec="fp16")
    found = asked(DDP, fp16, near, ddp)
    best, own, as_it_was = found.others
    assert found.current.step_ms is not None
    assert best.step_ms > found.current.step_ms  # the link is slow, and the codec helps there
    assert best.change == pytest.approx(best.step_ms / own.step_ms - 1)
    assert [(each.codec, each.place, is_faster(each)) for each in found.others] == [
        ("fp16", 1, True),
        ("ddp", 2, False),
        ("fp16", 1, True),
    ]
    assert as_it_was.change == pytest.approx(as_it_was.step_ms / found.current.step_ms - 1)
    assert found.as_dict()["against"] == "ddp flat, as in this run, with the same link and hosts"
    assert asked(DDP, near).against == "this run"
    rounds = with_small_exchanges(DDP.run(), took=0.4)
    wishes = [Wish(latency=0.1, codec=codec) for codec in ("ddp", "fp16")]
    slow = {each.codec: each for each in predict(observe(rounds), wishes, costs=COSTS).others}
    assert (slow["ddp"].change, slow["fp16"].change < 0) == (0.0, True)


def test_the_runs_own_setting_is_among_what_is_asked_of_other_links_and_hosts() -> None:
    observed = observe(INT8.run())
    int8, fp16, large = Wish(codec="int8"), Wish(codec="fp16"), Wish(codec="int8", bucket_mb=100.0)
    assert with_own(observed, [fp16]) == [fp16]  # the run itself is told of anyway
    slow = replace(fp16, gbps=0.1)
    assert with_own(observed, [slow]) == [Wish(gbps=0.1), slow]
    assert with_own(observed, scaled([large], [4, 8])) == [
        Wish(hosts=4),
        replace(large, hosts=4),
        Wish(hosts=8),
        replace(large, hosts=8),
    ]
    for own in (int8, Wish(form="flat")):
        there = scaled([own, fp16], [4])
        assert with_own(observed, there) == there


def test_what_was_lost_of_one_link_is_lost_of_another() -> None:
    (half,) = asked(DDP, Wish(gbps=0.5, was_gbps=1.0)).others
    assert half.step_ms == pytest.approx(duration(replace(DDP, transfer=80)))


def test_another_codec_is_predicted() -> None:
    (int8,) = asked(DDP, Wish(codec="int8")).others
    assert int8.step_ms == pytest.approx(duration(INT8), rel=0.03)
    assert int8.sent_mb == pytest.approx(4.0)
    (ddp,) = asked(INT8, Wish(codec="ddp")).others
    assert ddp.step_ms == pytest.approx(duration(DDP), rel=0.03)


def test_bytes_and_times_of_the_runs_own_codec_are_those_of_the_run() -> None:
    heavy = replace(CHUNK, encode=12, decode=7, sent=2 * CHUNK_ELEMENTS)
    found = asked(heavy, Wish())
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.others[0].sent_mb == pytest.approx(8 * CHUNK_ELEMENTS / 1e6)
    assert found.others[0].source == "this run"


def test_more_hosts_send_more() -> None:
    found = asked(DDP, *scaled([Wish()]))
    assert [each.hosts for each in found.others] == list(SCALE)
    sent = [each.sent_mb for each in found.others]
    assert sent == pytest.approx([16 * 2 * (hosts - 1) / hosts for hosts in SCALE])
    # Each is the run's own setting on as many hosts, with which it is compared.
    assert {(each.place, each.change, each.verdict) for each in found.others} == {
        (1, 0.0, NO_DIFFERENCE)
    }
    assert found.label == LABEL


def test_hosts_are_ranked_among_as_many() -> None:
    wishes = scaled([Wish(codec="ddp"), Wish(codec="fp16")], [64, 4])
    found = asked(DDP, *wishes)
    assert [(each.hosts, each.codec, each.place) for each in found.others] == [
        *((64, codec, place) for place, codec in enumerate(("fp16", "ddp"), start=1)),
        *((4, codec, place) for place, codec in enumerate(("fp16", "ddp"), start=1)),
    ]
    for fp16, ddp in (found.others[:2], found.others[2:]):
        assert ddp.change == 0
        assert fp16.change == pytest.approx(fp16.step_ms / ddp.step_ms - 1)


def test_nothing_is_ranked_closer_than_the_error() -> None:
    costs = {
        f"c{i}": replace(COSTS["none"], name=f"c{i}", settle=i * 2e-9)
        for i in (0, 1, 2, 10, 11, 30)
    }
    wishes = [Wish(codec=name) for name in costs]
    found = predict(observe(DDP.run()), wishes, costs={**COSTS, **costs})
    assert found.margin == LEAST_MARGIN
    steps = [each.step_ms or 0 for each in found.others]
    assert steps == sorted(steps)
    pairs = list(zip(found.others, found.others[1:], strict=False))
    for one, other in pairs:
        apart = (other.step_ms or 0) > (one.step_ms or 0) * (1 + found.margin)
        assert (one.place != other.place) is apart
    assert {one.place == other.place for one, other in pairs} == {True, False}
    verdicts = [each.verdict for each in found.others]
    assert verdicts[:2] == [NO_DIFFERENCE] * 2
    assert verdicts[-1] == ""


def test_a_large_error_joins_what_a_small_one_would_rank() -> None:
    # A third of the steps is slow, so that a median of rates is no rate of a median step.
    odd = replace(DDP, slow_steps={2: 3, 3: 3, 4: 3, 5: 1, 6: 1, 7: 1})
    found = asked(odd, Wish(codec="ddp"), Wish(codec="fp16"))
    assert found.error is not None
    assert found.margin == pytest.approx(max(abs(found.error), LEAST_MARGIN))


def test_what_is_not_known_is_none_and_says_why() -> None:
    found = asked(DDP, Wish(codec="fp16"), Wish(codec="topk"), Wish(codec="int8", form="sharded"))
    assert found.others[0].step_ms is not None
    reasons = {each.codec: each for each in found.others[1:]}
    assert reasons["topk"].reason == "what topk costs was not measured"
    assert reasons["int8"].reason.startswith("one rank per host")
    for each in reasons.values():
        assert (each.step_ms, each.exposed_ms, each.sent_mb, each.change, each.place) == (None,) * 5


def test_without_a_prediction_of_the_run_nothing_is_ranked() -> None:
    found = asked(replace(INT8, codec="sign"), Wish(codec="ddp"), Wish(codec="fp16"))
    assert (found.current.step_ms, found.error, found.margin) == (None, None, None)
    assert found.current.reason == "what sign costs was not measured"
    assert [(each.place, each.change, each.verdict) for each in found.others] == [
        (None, None, NO_ERROR)
    ] * 2


def test_from_one_host_nothing_is_known_of_a_link_between_hosts() -> None:
    one = replace(DDP, hosts=("a",))
    unknown, given = (asked(one, wish).others[0] for wish in (Wish(hosts=4), Wish(hosts=4, gbps=1)))
    assert unknown.step_ms is None
    assert unknown.reason.endswith("give the rate of a link between hosts with --bandwidth")
    assert given.step_ms is not None
    assert given.world_size == 8


def test_candidates() -> None:
    flat = candidates(observe(DDP.run()), ["int8"], like=Wish(gbps=1.0))
    assert [(each.codec, each.form, each.gbps) for each in flat] == [
        ("ddp", "flat", 1.0),
        ("int8", "flat", 1.0),
    ]
    four = observe(replace(DDP, world_size=4).run())
    forms = {(each.codec, each.form) for each in candidates(four, ["int8"], like=Wish())}
    assert forms == {("ddp", "flat"), *(("int8", form) for form in ("flat", "sharded", "leader"))}
    only = candidates(four, ["int8"], like=Wish(), forms=["leader"], ddp=False)
    assert [each.form for each in only] == ["leader"]


@pytest.mark.parametrize(
    ("planted", "what"),
    [
        (replace(DDP, world_size=1), "one rank exchanges nothing"),
        (replace(DDP, steps=0), "no rank has recorded a step"),
        (replace(DDP, buckets=0), "no bucket of gradients was seen"),
    ],
)
def test_a_profile_that_says_too_little_is_refused(planted: Planted, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        observe(planted.run())


@pytest.mark.parametrize(
    ("wish", "rule"),
    [
        ({"form": "ring"}, "form must be one of flat, sharded, leader"),
        ({"hosts": 1}, "hosts must be 2 or more"),
        ({"gbps": 0.0}, "gbps must be above 0"),
        ({"was_gbps": 1.0}, "give gbps too"),
        ({"latency": -1.0}, "latency must not be negative"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(wish: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Wish(**wish)
