"""Predictions from a planted run of a sharded model: two hosts, a replica of two shards on each."""

from __future__ import annotations

from typing import Any

import pytest
from planted import Planted, replace, replaced
from whatif_runs import CHUNK, COSTS, duration

from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import local_scenarios, predict
from lightning_dist.profiling.whatif.predictions import Predictions
from lightning_dist.profiling.whatif.scenarios import (
    Bucket,
    Link,
    Scenario,
    elsewhere,
    scenarios_of,
)
from lightning_dist.profiling.whatif.simulator import simulate_step
from lightning_dist.profiling.whatif.words import name_of

SQUARE = replace(CHUNK, world_size=4, hosts=("a", "a", "b", "b"))
"""Each rank sends 1 byte of every element of its shard, to the same shard on the other host."""


def sharded(planted: Planted = SQUARE, *, kind: str = "replicas", replicas: int = 2) -> Run:
    """The run, with groups of a sharded model of so many replicas."""
    run = planted.run()
    shards = planted.world_size // replicas
    for rank, each in run.ranks.items():
        first = rank // shards * shards
        groups = {
            "intra": [*range(first, first + shards)],
            "inter": [*range(rank % shards, planted.world_size, shards)],
        }
        steps = {
            number: replace(
                step,
                spans=tuple(
                    replace(span, group="inter") if span.phase == "exchange" else span
                    for span in step.spans
                ),
            )
            for number, step in each.steps.items()
        }
        metadata = replace(each.metadata, groups=groups, fsdp=kind)
        run = replaced(run, rank, metadata=metadata, steps=steps)
    return run


def asked(run: Run, *codecs: str, **place: Any) -> Predictions:
    observed = observe(run)
    there = elsewhere(observed.scenario, **place)
    found = scenarios_of(observed.scenario, there, codecs=codecs)
    return predict(observed, found, costs=COSTS)


def test_what_a_profile_says() -> None:
    found = observe(sharded())
    scenario = found.scenario
    assert (scenario.codec, scenario.form, scenario.counts) == ("int8", "fsdp", (2, 2))
    assert found.elements == pytest.approx(4 * SQUARE.raw / 4), "of the shard of one rank"
    assert scenario.link.rate == pytest.approx(2 * SQUARE.sent / SQUARE.transfer * 1e3)
    assert (found.encode, found.decode) == (pytest.approx(0.004), pytest.approx(0.008))


def test_the_run_itself_and_a_slower_link_are_predicted() -> None:
    found = asked(sharded())
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.baseline.sent_mb == pytest.approx(8 * SQUARE.sent / 1e6)
    gbps = found.link["gbps"]
    assert gbps is not None
    slower = asked(sharded(), "int8", link_gbps=gbps / 4).scenarios[0]
    planted = duration(replace(SQUARE, transfer=4 * SQUARE.transfer))
    assert slower.step_ms == pytest.approx(planted)


def test_every_codec_has_one_form_and_native_ddp_none() -> None:
    found = asked(sharded(), link_gbps=0.1)
    assert {each.form for each in found.scenarios} == {"fsdp"}
    names = [name_of(each, found.baseline) for each in found.scenarios if each.step_ms]
    assert names == ["int8", "fp16", "none"]
    fp16 = next(each for each in found.scenarios if each.codec == "fp16")
    assert fp16.sent_mb == pytest.approx(2 * 8 * SQUARE.sent / 1e6), "half of fp32, all to all of 2"


def test_shards_cross_a_link_side_by_side() -> None:
    """By hand: two ranks encode 100,000 elements each in 0.1 s, send 200 kB and decode in 0.4 s."""
    cost = CodecCost("int8", "two_shot", 1.0, encode=1e-6, decode=2e-6, store=0.0)
    of = Scenario("int8", "fsdp", (2, 2), Link(rate=1e6))
    step = simulate_step([Bucket(1.0, 100_000)], of, cost=cost)
    assert step.done == pytest.approx(1.0 + 0.1 + 0.2 + 0.4)
    assert step.sent == 200_000
    # Three hosts: two thirds of it to the others, their part decoded and encoded, and on again.
    three = simulate_step([Bucket(1.0, 100_000)], replace(of, counts=(2, 2, 2)), cost=cost)
    assert three.sent == pytest.approx(2 * 100_000 * (2 / 3 + 2 / 3))


def test_what_cannot_be_predicted_says_why() -> None:
    for run, reason in (
        (sharded(kind="all_ranks"), "sharded over all ranks"),
        (sharded(replicas=4), "one replica on each host"),
        (sharded(replicas=1), "one replica on each host"),
        (sharded(replace(SQUARE, hosts=("a",))), "one replica on each host"),
    ):
        with pytest.raises(ValueError, match=reason):
            observe(run)
    observed = observe(sharded())
    run = observed.scenario
    for forms, codecs, reason in (
        (["flat"], [], "form must be 'fsdp' for a profile of FSDP2"),
        ([], ["ddp"], "DDP does not shard"),
    ):
        with pytest.raises(ValueError, match=reason):
            scenarios_of(run, run, forms=forms, codecs=codecs)
    with pytest.raises(ValueError, match="and not for one of DDP"):
        scenarios_of(replace(run, form="flat"), run, forms=["fsdp"])
    with pytest.raises(ValueError, match="inside_gbps is of an exchange of DDP"):
        elsewhere(run, inside_gbps=1.0)
    for asked_for in ({"sync_every": [4]}, {"below": 0.1}):
        with pytest.raises(ValueError, match="leave --local-steps and --below out"):
            local_scenarios(observed, run, costs=COSTS, **asked_for)
