"""One step, played: against times worked out by hand, and against laws that any link obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.exchange import traffic
from lightning_dist.profiling.whatif.formulas import collectives, total
from lightning_dist.profiling.whatif.setting import Link, Setting, impossible
from lightning_dist.profiling.whatif.simulate import Bucket, play
from lightning_dist.reducer.chunk_sizes import CHUNK_ELEMENTS
from lightning_dist.reducer.costs import CodecCost
from lightning_dist.topology import Topology

SLOW = Link(rate=1e6)
PAIR = Setting("ddp", "flat", (1, 1), SLOW)
PLAIN = CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, settle=0.0)
FP16 = CodecCost("fp16", "allreduce", 2.0, encode=1e-6, decode=0.0, settle=2e-6)
INT8 = CodecCost("int8", "two_shot", 1.0, encode=1e-6, decode=2e-6, settle=3e-6)


def quarter(ready: float) -> Bucket:
    """A megabyte: a second between two ranks."""
    return Bucket(ready, 250_000)


def test_a_bucket_of_ddp_travels_when_it_is_ready_and_the_link_is_free() -> None:
    assert play([quarter(1.0), quarter(5.0)], PAIR).done == 6.0
    assert play([quarter(1.0), quarter(1.5)], PAIR).done == 3.0
    assert play([quarter(1.0), quarter(1.5)], PAIR).sent == 2e6


def test_rounds_hold_up_one_of_two_threads_and_not_the_link() -> None:
    slow = replace(PAIR, link=Link(1e6, latency=0.1))  # two rounds, 0.2 s
    assert play([quarter(1.0)], slow).done == pytest.approx(2.2)
    assert play([quarter(1.0)] * 3, slow).done == pytest.approx(4.2)
    slower = replace(PAIR, link=Link(1e6, latency=1.0))
    # 1..2 (4), 2..3 (5), and the third waits for a thread until 4.
    assert play([quarter(1.0)] * 3, slower).done == pytest.approx(7.0)


def test_with_nccl_one_collective_follows_the_other() -> None:
    slow = replace(PAIR, link=Link(1e6, latency=0.1), at_once=1)  # two rounds, 0.2 s
    assert play([quarter(1.0)] * 3, slow).done == pytest.approx(4.6)
    setting = replace(slow, codec="fp16")
    buckets = [Bucket(1.0, 100_000), Bucket(1.0, 100_000)]
    # encode 1.1, 1.2; 1.1..1.5, 1.5..1.9, and the verdict; meanwhile the first is settled
    played = play(buckets, setting, cost=FP16)
    two = play(buckets, replace(setting, at_once=2), cost=FP16)
    assert played.done - two.done == pytest.approx(0.2)


def test_small_collectives_follow_one_another_by_the_overhead_of_each() -> None:
    setting = replace(PAIR, link=Link(1e6, overhead=0.5))
    small = [Bucket(1.0, 250)] * 3  # a millisecond each
    assert play(small, setting).done == pytest.approx(2.5)
    assert play([quarter(1.0)] * 3, setting).done == pytest.approx(4.0)  # lost in their bytes
    late = replace(setting, link=Link(1e6, latency=0.1, overhead=0.5))  # two rounds
    assert play(small[:1], late).done == pytest.approx(1.7)


def test_one_collective_then_decode() -> None:
    setting = replace(PAIR, codec="fp16")
    # encode until 1.1, 200 kB until 1.3, settle until 1.5
    assert play([Bucket(1.0, 100_000)], setting, cost=FP16).done == pytest.approx(1.5)


def test_two_shots_between_more_than_two() -> None:
    setting = Setting("int8", "flat", (1, 1, 1, 1), SLOW)
    # encode 0.1, scatter 0.075, decode four quarters and encode one 0.225, gather 0.075, settle 0.5
    played = play([Bucket(0.0, 100_000)], setting, cost=INT8)
    assert played.done == pytest.approx(0.975)
    assert played.sent == 150_000


def test_one_chunk_is_encoded_while_another_travels() -> None:
    cost = CodecCost("int8", "two_shot", 1.0, encode=1e-6, decode=1e-6, settle=0.0)
    unit = CHUNK_ELEMENTS * 1e-6
    # encode 1, 2; travel 2, 3; two payloads of each are decoded: 4, 6
    played = play([Bucket(0.0, 2 * CHUNK_ELEMENTS)], replace(PAIR, codec="int8"), cost=cost)
    assert played.done == pytest.approx(6 * unit)


def test_nothing_is_decoded_before_the_last_bucket_is_encoded() -> None:
    setting = replace(PAIR, codec="fp16")
    buckets = [Bucket(1.0, 100_000), Bucket(4.0, 100_000)]
    # the second: 4.1, 4.3; meanwhile the first is decoded until 4.3, then the second until 4.5
    assert play(buckets, setting, cost=FP16).done == pytest.approx(4.5)


def test_by_hosts_inside_then_across_then_inside() -> None:
    setting = Setting("int8", "sharded", (2, 2), SLOW, inside=SLOW)
    cost = CodecCost("int8", "two_shot", 1.0, encode=1e-6, decode=1e-6, settle=0.0)
    # up 0.2; half a bucket: encode 0.05, two ranks of a host send 50 kB each 0.1, two payloads
    # 0.1; down 0.2
    played = play([Bucket(0.0, 100_000)], setting, cost=cost, plain=PLAIN)
    assert played.done == pytest.approx(0.65)
    assert played.sent == 100_000
    leader = replace(setting, form="leader")
    # up 0.4; encode 0.1, 100 kB 0.1, decode 0.2; down 0.4
    played = play([Bucket(0.0, 100_000)], leader, cost=cost, plain=PLAIN)
    assert played.done == pytest.approx(1.2)


def test_with_one_core_the_codec_takes_time_from_the_backward_pass() -> None:
    setting = replace(PAIR, codec="fp16")
    buckets = [Bucket(1.0, 100_000), Bucket(1.15, 100_000)]
    # two cores: encode 1.1, 1.25; travel 1.3, 1.5; settle 1.5, 1.7
    assert play(buckets, setting, cost=FP16).done == pytest.approx(1.7)
    # one: encode 1.2; ready at 1.25, encode 1.35; travel 1.4, 1.6; settle 1.6, 1.8
    assert play(buckets, setting, cost=FP16, one_core=True).done == pytest.approx(1.8)
    later = [Bucket(1.0, 100_000), Bucket(1.5, 100_000)]
    # encode 1.2; ready at 1.6, encode 1.7; travel 1.9; settle 2.1
    assert play(later, setting, cost=FP16, one_core=True).done == pytest.approx(2.1)
    busy = replace(setting, link=replace(SLOW, cpu=0.1))
    assert play(later, busy, cost=FP16).done == pytest.approx(2.0)
    # encode 1.2, gloo 1.4; ready at 1.7, encode 1.8; travel 2.0, gloo 1.9; settle 2.1, 2.3
    assert play(later, busy, cost=FP16, one_core=True).done == pytest.approx(2.3)


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (2, 2), (3, 1), (3, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("exchange", ["allreduce", "gather", "two_shot"])
def test_bytes_are_those_of_the_exchanges(exchange: str, counts: tuple[int, ...]) -> None:
    hosts = tuple(f"h{host}" for host, count in enumerate(counts) for _ in range(count))
    world, size = len(hosts), 1200
    sent = dict.fromkeys(hosts, 0)
    for rank, host in enumerate(hosts):
        topology = Topology(hosts, rank)
        if exchange == "allreduce":
            of_rank = traffic.ring_allreduce(size, topology)
        elif exchange == "gather" or world == 2:
            of_rank = traffic.ring_all_gather(size, topology)
        else:
            of_rank = traffic.all_to_all(size, topology)
            of_rank += traffic.ring_all_gather(size // world, topology)
        sent[host] += of_rank.inter
    assert total(collectives(exchange, size, counts)).nbytes == pytest.approx(max(sent.values()))


def test_what_is_impossible_says_why() -> None:
    pair, four = Setting("int8", "sharded", (1, 1), SLOW), Setting("int8", "sharded", (3, 1), SLOW)
    assert impossible(pair).startswith("one rank per host")
    assert "leader" in impossible(four)
    assert "inside" in impossible(replace(four, form="leader"))
    assert impossible(replace(four, form="leader", inside=SLOW)) == ""
    assert impossible(replace(four, codec="ddp")) == "DDP itself knows no hosts"
    assert impossible(replace(pair, counts=(2,))).startswith("one host")


SIZES = st.lists(
    st.builds(Bucket, st.floats(0, 1), st.integers(1, 2_000_000)), min_size=1, max_size=4
).map(lambda buckets: sorted(buckets, key=lambda each: each.ready))
COSTS = st.builds(
    CodecCost,
    st.just("any"),
    st.sampled_from(["allreduce", "gather", "two_shot"]),
    st.floats(0.01, 4),
    encode=st.floats(0, 1e-8),
    decode=st.floats(0, 1e-8),
    settle=st.floats(0, 1e-8),
)
SETTINGS = st.builds(
    Setting,
    st.sampled_from(["ddp", "any"]),
    st.sampled_from(["flat", "sharded", "leader"]),
    st.sampled_from([(1, 1), (2, 2), (2, 2, 2), (1,) * 5]),
    st.builds(Link, st.floats(1e6, 1e9), st.sampled_from([None, 1e-4])),
    inside=st.just(Link(1e9)),
).filter(lambda setting: not impossible(setting))


@given(SIZES, SETTINGS, COSTS, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(
    buckets: list[Bucket], setting: Setting, cost: CodecCost, times: float
) -> None:
    faster = replace(setting, link=replace(setting.link, rate=setting.link.rate * times))
    slow, fast = (play(buckets, each, cost=cost, plain=PLAIN) for each in (setting, faster))
    assert fast.done <= slow.done * (1 + 1e-9)
    assert fast.sent == slow.sent


@given(SIZES, SETTINGS, COSTS, st.floats(0.01, 1))
def test_fewer_bytes_at_the_same_cost_are_never_slower(
    buckets: list[Bucket], setting: Setting, cost: CodecCost, share: float
) -> None:
    smaller = replace(cost, wire=cost.wire * share)
    one, other = (play(buckets, setting, cost=each, plain=PLAIN) for each in (cost, smaller))
    assert other.done <= one.done * (1 + 1e-9)


@given(SIZES, SETTINGS, COSTS, st.floats(1, 10))
def test_a_cheaper_codec_is_never_slower(
    buckets: list[Bucket], setting: Setting, cost: CodecCost, times: float
) -> None:
    dearer = replace(
        cost, encode=cost.encode * times, decode=cost.decode * times, settle=cost.settle * times
    )
    one, other = (play(buckets, setting, cost=each, plain=PLAIN) for each in (cost, dearer))
    assert one.done <= other.done * (1 + 1e-9)
