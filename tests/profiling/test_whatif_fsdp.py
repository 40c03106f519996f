"""Predictions from planted runs of sharded models, on two hosts of two ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from changed_runs import changed, write
from click.testing import CliRunner
from planted import Planted, replace, replaced
from whatif_runs import (
    ALLREDUCE,
    COMPUTING,
    COSTS,
    GATHER,
    NUMEL,
    ORDER,
    RATE,
    SCATTER,
    SQUARE,
    all_ranks,
    duration,
)

from lightning_dist.cli import app
from lightning_dist.measurement import calibration
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import local_scenarios, predict
from lightning_dist.profiling.whatif.predictions import Predictions, name_of
from lightning_dist.profiling.whatif.scenarios import (
    Bucket,
    Link,
    Scenario,
    elsewhere,
    scenarios_of,
)
from lightning_dist.profiling.whatif.simulator import simulate_step


def sharded(planted: Planted = SQUARE, *, replicas: int = 2) -> Run:
    """The run, with groups of a sharded model of so many replicas."""

    def between(step: StepRecord) -> StepRecord:
        spans = [replace(s, group="inter") if s.op else s for s in step.spans]
        return replace(step, spans=spans)

    run = planted.run()
    shards = planted.world_size // replicas
    for rank, each in run.ranks.items():
        first = rank // shards * shards
        groups = {
            "intra": [*range(first, first + shards)],
            "inter": [*range(rank % shards, planted.world_size, shards)],
        }
        run = replaced(run, rank, metadata=replace(each.metadata, groups=groups, fsdp="replicas"))
    return changed(run, between)


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


def by_hand(gather: float, scatter: float, *, codec_ms: float, rate: float = RATE) -> float:
    """Milliseconds of a step whose collectives send so many bytes."""
    return COMPUTING + (4 * gather + 2 * scatter) / rate + codec_ms


def test_shards_of_all_ranks_are_simulated() -> None:
    observed, found = observe(all_ranks()), asked(all_ranks())
    scenario = observed.scenario
    named = scenario.codec, scenario.parameters, scenario.form, scenario.counts
    assert named == ("int8", "int8", "all_ranks", (2, 2))
    assert scenario.link.rate == pytest.approx(RATE * 1e3)
    assert observed.elements == 2 * NUMEL
    assert found.error == pytest.approx(0.0, abs=1e-6)
    step_ms = {name_of(each, found.baseline): each.step_ms for each in found.scenarios}
    own_ms = 4 * (1 + 2) + 2 * (4 + 3)
    # int4 has no cost here; what `none` takes is nothing.
    assert step_ms == {
        "fsdp": pytest.approx(by_hand(4 * GATHER, 4 * ALLREDUCE, codec_ms=0)),
        "int8 gradients, int8 parameters": pytest.approx(by_hand(GATHER, SCATTER, codec_ms=own_ms)),
        "int8 gradients, none parameters": pytest.approx(by_hand(4 * GATHER, SCATTER, codec_ms=14)),
        "none gradients, int8 parameters": pytest.approx(by_hand(GATHER, 4 * SCATTER, codec_ms=12)),
        "none gradients, none parameters": pytest.approx(
            by_hand(4 * GATHER, 4 * SCATTER, codec_ms=0)
        ),
        "int4 gradients, int8 parameters": None,
        "int4 gradients, none parameters": None,
    }
    sent = next(each.sent_mb for each in found.scenarios if each.codec == "ddp")
    assert sent == pytest.approx(4 * (4 * GATHER + 2 * ALLREDUCE) / 1e6)


def test_shards_of_all_ranks_elsewhere() -> None:
    gbps = observe(all_ranks()).scenario.link.gbps
    slow = asked(all_ranks(), "int8", link_gbps=gbps / 4, latency_us=1000.0).scenarios
    own = next(each for each in slow if each.parameters == "int8")
    three_rounds = len(ORDER) * 3
    assert own.step_ms == pytest.approx(
        by_hand(GATHER, SCATTER, codec_ms=26 + three_rounds, rate=RATE / 4)
    )
    # Eight ranks: 7/8 of a group of four shards of before, and 2 * 6/8 of it to other hosts. What
    # each encodes for the gather is half as much.
    wide = asked(all_ranks(), "int8", hosts=4).scenarios
    own = next(each for each in wide if each.parameters == "int8")
    assert own.step_ms == pytest.approx(by_hand(3.5 * NUMEL, 6 * NUMEL, codec_ms=26 - 4 / 2))


def test_a_codec_shares_the_cores_of_all_ranks() -> None:
    cost = CodecCost("int8", "two_shot", 1.0, encode=1e-9, decode=2e-9, store=3e-9)
    of = replace(observe(all_ranks()).scenario, parameters="fp8")
    observed = replace(observe(all_ranks()), crowded=2.0)
    (found,) = predict(observed, [of], costs={"fp8": cost}).scenarios
    # A rank encodes its shard and decodes those of four.
    took = 2 * 4 * (NUMEL * 1e-6 + 4 * NUMEL * 5e-6)
    assert found.step_ms == pytest.approx(by_hand(GATHER, SCATTER, codec_ms=14 + took))


OBSERVED, EVERY = observe(sharded()), observe(all_ranks())
RUN, ALL_RANKS = OBSERVED.scenario, EVERY.scenario
ONE_REPLICA = "one replica on each host"
NO_LOCAL_STEPS = "leave --local-steps and --below out"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: observe(sharded(replicas=4)), ONE_REPLICA),
        (lambda: observe(sharded(replicas=1)), ONE_REPLICA),
        (lambda: observe(sharded(replace(SQUARE, hosts=("a",)))), ONE_REPLICA),
        (lambda: observe(all_ranks(blocks=False)), "what an accelerator computes meanwhile"),
        (lambda: observe(all_ranks(numel=0)), "profile it again with this version"),
        (
            lambda: scenarios_of(RUN, RUN, forms=["flat"]),
            "form must be 'fsdp' for a profile of FSDP2",
        ),
        (lambda: scenarios_of(RUN, RUN, codecs=["ddp"]), "DDP does not shard"),
        (
            lambda: scenarios_of(replace(RUN, form="flat"), RUN, forms=["fsdp"]),
            "and not for one of DDP",
        ),
        (lambda: scenarios_of(ALL_RANKS, ALL_RANKS, forms=["fsdp"]), "form must be 'all_ranks'"),
        (
            lambda: scenarios_of(replace(ALL_RANKS, form="fsdp"), ALL_RANKS, parameters=["int8"]),
            "leave --parameters out",
        ),
        (lambda: elsewhere(RUN, inside_gbps=1.0), "inside_gbps is of an exchange of DDP"),
        (lambda: local_scenarios(OBSERVED, RUN, costs=COSTS, sync_every=[4]), NO_LOCAL_STEPS),
        (lambda: local_scenarios(OBSERVED, RUN, costs=COSTS, below=0.1), NO_LOCAL_STEPS),
        (lambda: local_scenarios(EVERY, ALL_RANKS, costs=COSTS, sync_every=[4]), NO_LOCAL_STEPS),
        (lambda: local_scenarios(EVERY, ALL_RANKS, costs=COSTS, below=0.1), NO_LOCAL_STEPS),
    ],
)
def test_what_cannot_be_predicted_says_why(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


def test_the_command_predicts_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_UNITS", 1)  # what codecs cost is no matter here
    write(tmp_path, all_ranks().ranks.values())
    asked = ["--codec", "ddp", "--codec", "int8", "--parameters", "int8", "--parameters", "bf16"]
    command, program = ["profile", "whatif", str(tmp_path), "--json"], typer.main.get_command(app)
    for option, codec, what in (
        ("--codec", "topk", "gradients"),
        ("--parameters", "qsgd", "parameters"),
    ):
        refused = CliRunner().invoke(program, [*command, option, codec])
        assert f"codec {codec} does not work for the {what}" in refused.stderr
    result = CliRunner().invoke(program, [*command, *asked])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["error"] == pytest.approx(0.0, abs=1e-6)
    pairs = [(each["codec"], each["parameters"]) for each in found["scenarios"]]
    assert pairs == [("int8", "int8"), ("int8", "bf16"), ("ddp", "")]
