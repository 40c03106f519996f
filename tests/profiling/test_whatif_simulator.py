"""One step, simulated: against times worked out by hand, and against laws that any link obeys."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.exchange import traffic
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.whatif.scenarios import Bucket, Link, Scenario
from lightning_dist.profiling.whatif.simulator import SimulatedStep, collectives, simulate_step
from lightning_dist.reducer.units.sizes import UNIT_ELEMENTS
from lightning_dist.topology import Topology

SLOW = Link(rate=1e6)
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
    made = [Bucket(*each) for each in buckets]
    return simulate_step(made, of, cost=cost, inside_cost=PLAIN, one_core=one_core)


def done(of: Scenario, *buckets: tuple[float, float], cost: CodecCost | None = None) -> Any:
    return pytest.approx(simulated(of, *buckets, cost=cost).done)


def test_a_bucket_of_ddp_travels_when_it_is_ready_and_the_link_is_free() -> None:
    assert done(PAIR, (1, ONE_MB), (5, ONE_MB)) == 6.0
    assert done(PAIR, (1, ONE_MB), (1.5, ONE_MB)) == 3.0


def test_rounds_hold_up_one_of_two_threads_and_not_the_link() -> None:
    late, later = (replace(PAIR, link=Link(1e6, latency)) for latency in (0.1, 1.0))  # two rounds
    assert done(late, (1, ONE_MB)) == 2.2
    assert done(late, *3 * [(1, ONE_MB)]) == 4.2
    # 1..2 (4), 2..3 (5), and the third waits for a thread until 4
    assert done(later, *3 * [(1, ONE_MB)]) == 7.0
    assert done(replace(late, at_once=1), *3 * [(1, ONE_MB)]) == 4.6  # NCCL


def test_small_collectives_follow_one_another_by_the_overhead_of_each() -> None:
    busy = replace(PAIR, link=Link(1e6, overhead=0.5))
    assert done(busy, *3 * [(1, 250)]) == 2.5  # a millisecond each
    assert done(busy, *3 * [(1, ONE_MB)]) == 4.0  # lost in their bytes
    assert done(replace(PAIR, link=Link(1e6, 0.1, 0.5)), (1, 250)) == 1.7


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
    slow = replace(half, link=Link(rate=1e6 / 3))
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
    scenario = Scenario("fp16", "flat", (1, 1), Link(1e6, latency=0.1), at_once=1)
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
        hosts = tuple(f"h{host}" for host, count in enumerate(counts) for _ in range(count))
        for exchange in ("allreduce", "gather", "two_shot"):
            sent = dict.fromkeys(hosts, 0)
            for rank, host in enumerate(hosts):
                topology = Topology(hosts, rank)
                if exchange == "allreduce":
                    of_rank = traffic.ring_allreduce(size, topology)
                elif exchange == "gather" or len(hosts) == 2:
                    of_rank = traffic.ring_all_gather(size, topology)
                else:
                    of_rank = traffic.all_to_all(size, topology)
                    of_rank += traffic.ring_all_gather(size // len(hosts), topology)
                sent[host] += of_rank.inter
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
    st.builds(Bucket, st.floats(0, 1), st.integers(1, 2_000_000)), min_size=1, max_size=4
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
    st.builds(Link, st.floats(1e6, 1e9), st.sampled_from([None, 1e-4])),
    inside=st.just(Link(1e9)),
).filter(lambda scenario: not scenario.unsupported)


@given(BUCKETS, SCENARIOS, COSTS, st.floats(1, 100))
def test_a_faster_link_fewer_bytes_and_a_cheaper_codec_are_never_slower(
    buckets: list[Bucket], scenario: Scenario, cost: CodecCost, times: float
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
