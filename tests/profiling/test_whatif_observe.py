"""What a prediction reads from a run: planted links, times and cores, and what is not known."""

from __future__ import annotations

import pytest
from planted import Planted, replace, replaced
from whatif_runs import COSTS, DDP, INT8, duration, with_small_exchanges

from lightning_dist.profiling.capture.events import BurstRecord, LinkRecord
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import Wish, predict


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
