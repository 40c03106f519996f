"""Predictions from planted runs: what such a run would have taken is known."""

from __future__ import annotations

import pytest
from planted import Planted, replace
from whatif_runs import CHUNK, COSTS, DDP, INT8, asked, duration, with_small_exchanges

from lightning_dist.profiling.whatif.answer import LABEL, NO_DIFFERENCE, NO_ERROR, is_faster
from lightning_dist.profiling.whatif.candidates import SCALE, candidates, scaled, with_own
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import LEAST_MARGIN, Wish, predict
from lightning_dist.reducer.chunk_sizes import CHUNK_ELEMENTS


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
