"""One step, simulated: by hand, by laws of any link, and from planted runs of sharded models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from planted import Planted, changed, replace, replaced, write
from whatif_runs import (
    ALLREDUCE,
    COMPUTING,
    GATHER,
    NUMEL,
    ORDER,
    RATE,
    SCATTER,
    SQUARE,
    all_ranks,
    duration,
)
from whatif_runs import (
    COSTS as COSTS_OF_PASSES,
)

from lightning_dist.base.exchanges import UNIT_ELEMENTS
from lightning_dist.cli import app
from lightning_dist.measurement import CodecCost, calibration
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import local_scenarios, predict
from lightning_dist.profiling.whatif.scenarios import (
    LinkSpeed,
    Predictions,
    Scenario,
    ScenarioBucket,
    elsewhere,
    name_of,
    scenarios_of,
)
from lightning_dist.profiling.whatif.simulator import SimulatedStep, collectives, simulate_step
from lightning_dist.ranks import Topology, traffic

SLOW = LinkSpeed(rate=1e6)
PAIR = Scenario("ddp", "flat", (1, 1), SLOW)
PLAIN = CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, store=0.0)
FP16 = CodecCost("fp16", "allreduce", 2.0, encode=1e-6, decode=0.0, store=2e-6)
INT8 = CodecCost("int8", "two_shot", 1.0, encode=1e-6, decode=2e-6, store=3e-6)
LEAN = replace(INT8, decode=1e-6, store=0.0)
ONE_MB = 250_000
"""Elements: a second between two ranks."""


def simulated(
    of: Scenario,
    *buckets: tuple[float, float],
    cost: CodecCost | None = None,
    one_core: bool = False,
) -> SimulatedStep:
    made = [ScenarioBucket(*each) for each in buckets]
    return simulate_step(made, of, cost=cost, inside_cost=PLAIN, one_core=one_core)


def done(of: Scenario, *buckets: tuple[float, float], cost: CodecCost | None = None) -> Any:
    return pytest.approx(simulated(of, *buckets, cost=cost).done)


def test_a_bucket_of_ddp_travels_when_it_is_ready_and_the_link_is_free() -> None:
    assert done(PAIR, (1, ONE_MB), (5, ONE_MB)) == 6.0
    assert done(PAIR, (1, ONE_MB), (1.5, ONE_MB)) == 3.0


def test_rounds_hold_up_one_of_two_threads_and_not_the_link() -> None:
    late, later = (
        replace(PAIR, link=LinkSpeed(1e6, latency)) for latency in (0.1, 1.0)
    )  # two rounds
    assert done(late, (1, ONE_MB)) == 2.2
    assert done(late, *3 * [(1, ONE_MB)]) == 4.2
    # 1..2 (4), 2..3 (5), and the third waits for a thread until 4
    assert done(later, *3 * [(1, ONE_MB)]) == 7.0
    assert done(replace(late, at_once=1), *3 * [(1, ONE_MB)]) == 4.6  # NCCL


def test_small_collectives_follow_one_another_by_the_overhead_of_each() -> None:
    busy = replace(PAIR, link=LinkSpeed(1e6, overhead=0.5))
    assert done(busy, *3 * [(1, 250)]) == 2.5  # a millisecond each
    assert done(busy, *3 * [(1, ONE_MB)]) == 4.0  # lost in their bytes
    assert done(replace(PAIR, link=LinkSpeed(1e6, 0.1, 0.5)), (1, 250)) == 1.7


def test_a_codec_encodes_in_order_and_decodes_when_the_last_bucket_is_encoded() -> None:
    fp16, int8 = (replace(PAIR, codec=codec) for codec in ("fp16", "int8"))
    # encode until 1.1, 200 kB until 1.3, store until 1.5
    assert done(fp16, (1, 100_000), cost=FP16) == 1.5
    # the second: 4.1, 4.3; meanwhile the first is decoded until 4.3, then the second until 4.5
    assert done(fp16, (1, 100_000), (4, 100_000), cost=FP16) == 4.5
    # encode 0.1, scatter 0.075, decode four quarters and encode one 0.225, gather 0.075, store 0.5
    assert done(replace(int8, counts=(1,) * 4), (0, 100_000), cost=INT8) == 0.975
    # chunk by chunk: encode 1, 2; travel 2, 3; two payloads of each are decoded: 4, 6
    assert done(int8, (0, 2 * UNIT_ELEMENTS), cost=LEAN) == 6 * UNIT_ELEMENTS * 1e-6


def test_with_the_immediate_commit_a_bucket_is_decoded_while_the_next_one_travels() -> None:
    """Between two ranks fp16 travels 1 s, is encoded in 0.5 s and decoded in 1 s."""
    half = replace(PAIR, codec="fp16", immediate=True)
    buckets = [(ready, 2 * ONE_MB) for ready in (1.0, 4.0, 7.0)]
    # The last is encoded 7..7.5, the one before it decoded until 8.5, when the last has landed.
    assert done(half, *buckets, cost=FP16) == 9.5
    assert done(replace(half, immediate=False), *buckets, cost=FP16) == 10.5
    # Three seconds on the link: 1.5..4.5, 4.5..7.5, 7.5..10.5, and the last is left to decode.
    slow = replace(half, link=LinkSpeed(rate=1e6 / 3))
    assert done(slow, *buckets, cost=FP16) == 11.5


def test_by_hosts_inside_then_across_then_inside() -> None:
    by_hosts = Scenario("int8", "hierarchical", (2, 2), SLOW, inside=SLOW)
    # up 0.2; half a bucket: encode 0.05, two ranks send 50 kB each 0.1, two payloads 0.1; down 0.2
    assert done(by_hosts, (0, 100_000), cost=LEAN) == 0.65
    # up 0.4; encode 0.1, 100 kB 0.1, decode 0.2; down 0.4
    assert done(replace(by_hosts, form="leader"), (0, 100_000), cost=LEAN) == 1.2


def test_bytes_over_the_link_of_a_host() -> None:
    assert simulated(PAIR, (1, ONE_MB), (1.5, ONE_MB)).sent == 2e6
    for counts, form, sent in (((1,) * 4, "flat", 150_000), ((2, 2), "hierarchical", 100_000)):
        scenario = Scenario("int8", form, counts, SLOW, inside=SLOW)
        assert simulated(scenario, (0, 100_000), cost=INT8).sent == sent


def test_with_nccl_what_is_encoded_waits_too() -> None:
    scenario = Scenario("fp16", "flat", (1, 1), LinkSpeed(1e6, latency=0.1), at_once=1)
    buckets = [(1.0, 100_000.0), (1.0, 100_000.0)]
    # encode 1.1, 1.2; 1.1..1.5, 1.5..1.9, and the verdict; meanwhile the first is settled
    one, two = (
        simulated(replace(scenario, at_once=at_once), *buckets, cost=FP16) for at_once in (1, 2)
    )
    assert one.done - two.done == pytest.approx(0.2)


def test_with_one_core_the_codec_takes_time_from_the_backward_pass() -> None:
    scenario = replace(PAIR, codec="fp16")
    busy = replace(scenario, link=replace(SLOW, cpu=0.1))
    soon, later = (((1.0, 100_000.0), (ready, 100_000.0)) for ready in (1.15, 1.5))
    for of, buckets, own, shared in (
        # two cores: encode 1.1, 1.25; travel 1.3, 1.5; store 1.5, 1.7
        # one: encode 1.2; ready at 1.25, encode 1.35; travel 1.4, 1.6; store 1.6, 1.8
        (scenario, soon, 1.7, 1.8),
        # one: encode 1.2; ready at 1.6, encode 1.7; travel 1.9; store 2.1
        (scenario, later, 2.0, 2.1),
        # one: encode 1.2, gloo 1.4; ready at 1.7, encode 1.8; travel 2.0, gloo 1.9; store 2.3
        (busy, later, 2.0, 2.3),
    ):
        assert done(of, *buckets, cost=FP16) == own
        assert simulated(of, *buckets, cost=FP16, one_core=True).done == pytest.approx(shared)


def test_bytes_are_those_of_the_exchanges() -> None:
    size = 1200
    for counts in [(1, 1), (1, 1, 1), (2, 2), (3, 1), (3, 1, 1), (2, 2, 2)]:
        nodes = tuple(f"h{node}" for node, count in enumerate(counts) for _ in range(count))
        for exchange in ("allreduce", "gather", "two_shot"):
            sent = dict.fromkeys(nodes, 0)
            for rank, node in enumerate(nodes):
                topology = Topology(nodes, rank)
                if exchange == "allreduce":
                    of_rank = traffic.ring_allreduce(size, topology)
                elif exchange == "gather" or len(nodes) == 2:
                    of_rank = traffic.ring_all_gather(size, topology)
                else:
                    of_rank = traffic.all_to_all(size, topology)
                    of_rank += traffic.ring_all_gather(size // len(nodes), topology)
                sent[node] += of_rank.inter
            found = sum(each.nbytes for each in collectives(exchange, size, counts))
            assert found == pytest.approx(max(sent.values())), (exchange, counts)


def test_what_is_not_supported_says_why() -> None:
    pair, four = (Scenario("int8", "hierarchical", counts, SLOW) for counts in ((1, 1), (3, 1)))
    leader = replace(four, form="leader")
    for scenario, reason in (
        (pair, "one rank per node"),
        (four, "leader"),
        (leader, "inside"),
        (replace(four, codec="ddp"), "DDP itself is not hierarchical"),
        (replace(pair, counts=(2,)), "one node"),
    ):
        assert reason in scenario.unsupported
    assert replace(leader, inside=SLOW).unsupported == ""


BUCKETS = st.lists(
    st.builds(ScenarioBucket, st.floats(0, 1), st.integers(1, 2_000_000)), min_size=1, max_size=4
).map(lambda buckets: sorted(buckets, key=lambda each: each.ready))
COSTS = st.builds(
    CodecCost,
    st.just("any"),
    st.sampled_from(["allreduce", "gather", "two_shot"]),
    st.floats(0.01, 4),
    encode=st.floats(0, 1e-8),
    decode=st.floats(0, 1e-8),
    store=st.floats(0, 1e-8),
)
SCENARIOS = st.builds(
    Scenario,
    st.sampled_from(["ddp", "any"]),
    st.sampled_from(["flat", "hierarchical", "leader"]),
    st.sampled_from([(1, 1), (2, 2), (2, 2, 2), (1,) * 5]),
    st.builds(LinkSpeed, st.floats(1e6, 1e9), st.sampled_from([None, 1e-4])),
    inside=st.just(LinkSpeed(1e9)),
).filter(lambda scenario: not scenario.unsupported)


@given(BUCKETS, SCENARIOS, COSTS, st.floats(1, 100))
def test_a_faster_link_fewer_bytes_and_a_cheaper_codec_are_never_slower(
    buckets: list[ScenarioBucket], scenario: Scenario, cost: CodecCost, times: float
) -> None:
    def step(of: Scenario, cost: CodecCost):
        return simulate_step(buckets, of, cost=cost, inside_cost=PLAIN)

    before = step(scenario, cost)
    link = replace(scenario.link, rate=scenario.link.rate * times)
    faster = step(replace(scenario, link=link), cost)
    # Units that are gathered are cut by their payload: with fewer bytes they are larger and fewer,
    # and less of encoding and transfer overlaps.
    wire = cost.wire if cost.exchange == "gather" else cost.wire / times
    smaller = step(scenario, replace(cost, wire=wire))
    encode, decode, store = (each / times for each in (cost.encode, cost.decode, cost.store))
    cheaper = step(scenario, replace(cost, encode=encode, decode=decode, store=store))
    assert faster.sent == before.sent
    assert max(each.done for each in (faster, smaller, cheaper)) <= before.done * (1 + 1e-9)


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
    return predict(observed, found, costs=COSTS_OF_PASSES)


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
    of = Scenario("int8", "fsdp", (2, 2), LinkSpeed(rate=1e6))
    step = simulate_step([ScenarioBucket(1.0, 100_000)], of, cost=cost)
    assert step.done == pytest.approx(1.0 + 0.1 + 0.2 + 0.4)
    assert step.sent == 200_000
    # Three nodes: two thirds of it to the others, their part decoded and encoded, and on again.
    three = simulate_step([ScenarioBucket(1.0, 100_000)], replace(of, counts=(2, 2, 2)), cost=cost)
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
    # Eight ranks: 7/8 of a group of four shards of before, and 2 * 6/8 of it to other nodes. What
    # each encodes for the gather is half as much.
    wide = asked(all_ranks(), "int8", nodes=4).scenarios
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
ONE_REPLICA = "one replica on each node"
NO_LOCAL_STEPS = "leave --local-steps and --below out"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: observe(sharded(replicas=4)), ONE_REPLICA),
        (lambda: observe(sharded(replicas=1)), ONE_REPLICA),
        (lambda: observe(sharded(replace(SQUARE, nodes=("a",)))), ONE_REPLICA),
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
        (
            lambda: local_scenarios(OBSERVED, RUN, costs=COSTS_OF_PASSES, sync_every=[4]),
            NO_LOCAL_STEPS,
        ),
        (lambda: local_scenarios(OBSERVED, RUN, costs=COSTS_OF_PASSES, below=0.1), NO_LOCAL_STEPS),
        (
            lambda: local_scenarios(EVERY, ALL_RANKS, costs=COSTS_OF_PASSES, sync_every=[4]),
            NO_LOCAL_STEPS,
        ),
        (
            lambda: local_scenarios(EVERY, ALL_RANKS, costs=COSTS_OF_PASSES, below=0.1),
            NO_LOCAL_STEPS,
        ),
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
