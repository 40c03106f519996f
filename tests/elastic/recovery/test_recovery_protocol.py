"""Who is in the next generation: every small script of deaths, late ones and newcomers."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dist.elastic.recovery.protocol import (
    Generation,
    Worker,
    WorkerReport,
    decode_generation,
    decode_report,
    encode,
    next_generation,
)

STEP = 7


@dataclass(frozen=True)
class Facts:
    """What the coordinator knows when it asks."""

    now: Generation
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    ready: Mapping[str, WorkerReport] = field(default_factory=dict)
    dead: Mapping[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()
    min_workers: int = 1
    max_workers: int = 4

    @property
    def next(self) -> Generation | None:
        return next_generation(
            self.now,
            self.reports,
            ready=self.ready,
            dead=self.dead,
            late=self.late,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
        )

    @property
    def made(self) -> Generation:
        """The next one, which there must be."""
        made = self.next
        assert made is not None
        return made

    @property
    def left(self) -> list[str]:
        return [each for each in self.now.members if each not in {*self.dead, *self.late}]


def name(place: int, incarnation: int = 0) -> str:
    return str(Worker(place // 2, place % 2, incarnation))


def generation(members: int, number: int = 3) -> Generation:
    return Generation(number, members=tuple(map(name, range(members))), step=STEP)


# What a member may be when it is asked for: training, or stopped, with what it has.
STATES: dict[str, WorkerReport | None] = {
    "trains": None,
    "failed": WorkerReport("", 3, STEP, failed=True),
    "holds": WorkerReport("", 3, STEP, holds=True, failed=True),
    "applied": WorkerReport("", 3, STEP + 1, finite=False),
    "paused": WorkerReport("", 3, STEP),
    "not healed": WorkerReport("", 3, -1, failed=True),
}
ENDS = ("lives", "dead", "late")


def stop(now: Generation, *states: str) -> dict[str, WorkerReport]:
    """Reports of the members of ``now``, which are in these states."""
    return {
        who: replace(report, worker=who)
        for who, state in zip(now.members, states, strict=True)
        if (report := STATES[state]) is not None
    }


def scripts() -> Iterator[Facts]:
    """Of up to three members, every state and end of each, and up to two newcomers."""
    for size in (1, 2, 3):
        now = generation(size)
        for states in itertools.product(STATES, repeat=size):
            reports = stop(now, *states)
            for ends in itertools.product(ENDS, repeat=size):
                of = {
                    end: [who for who, each in zip(now.members, ends, strict=True) if each == end]
                    for end in ENDS
                }
                late = tuple(who for who in of["late"] if who not in reports)
                dead = dict.fromkeys(of["dead"], "was killed")
                for newcomers in ((), (name(0, 1),), (name(0, 1), name(5))):
                    ready = {who: WorkerReport(who) for who in newcomers}
                    for fewest in (1, 2):
                        yield Facts(now, reports, ready, dead, late, fewest)


def verify(facts: Facts) -> None:
    """The rules that every next generation keeps."""
    after = facts.next
    assert after == facts.next
    stopped = [each for each in facts.left if each in facts.reports]
    if after is None:
        assert stopped != facts.left or not stopped
        assert facts.left
        return
    assert after.number == facts.now.number + 1
    assert stopped == facts.left, "it has not waited for all who live"
    members = [*after.members]
    if after.ends:
        with_state = any(facts.reports[who].step >= 0 for who in stopped)
        room = len(stopped) + len(facts.ready.keys() - after.refused - facts.dead.keys())
        assert not members
        assert not stopped or not with_state or room < facts.min_workers
        return
    assert facts.min_workers <= len(members) <= max(facts.max_workers, len(stopped))
    assert members == sorted(set(members), key=Worker.parse)
    assert {*members} == {*stopped, *after.newcomers}
    assert not {*members} & {*facts.dead, *facts.late}
    steps = {who: facts.reports[who].step for who in stopped}
    newest = [who for who in stopped if steps[who] == after.step]
    assert after.step == max(steps.values()) >= 0
    assert after.source in newest
    assert after.finite == facts.reports[newest[0]].finite
    parts = [*newest, *after.applies, *after.heals]
    assert sorted(parts) == sorted(members), "each is newest, applies or is healed, and only one"
    assert {*after.newcomers} <= {*after.heals}
    for who in after.applies:
        assert facts.reports[who].holds
        assert steps[who] + 1 == after.step


def test_every_script_of_three_members() -> None:
    count = 0
    for facts in scripts():
        verify(facts)
        count += 1
    assert count > 30_000


names = st.builds(name, st.integers(0, 7), st.integers(0, 2))
reports = st.builds(
    WorkerReport,
    worker=st.just(""),
    step=st.integers(-1, 2),
    holds=st.booleans(),
    finite=st.booleans(),
    failed=st.booleans(),
    facts=st.just({"model": "a"}),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    members = sorted(draw(st.sets(names, min_size=1, max_size=6)), key=Worker.parse)
    fewest = draw(st.integers(1, 4))
    return Facts(
        Generation(draw(st.integers(0, 9)), members=tuple(members)),
        draw(st.dictionaries(st.sampled_from(members), reports)),
        draw(st.dictionaries(names, reports, max_size=4)),
        draw(st.dictionaries(names, st.just("was killed"), max_size=4)),
        tuple(draw(st.sets(st.sampled_from(members), max_size=2))),
        fewest,
        fewest + draw(st.integers(0, 4)),
    )


@given(any_facts())
@example(Facts(generation(2), {name(1): WorkerReport("", 3, -1)}, dead={name(0): ""}))
@example(Facts(generation(1), {name(0): WorkerReport("", 3, 1)}, {name(0): WorkerReport("")}))
def test_the_rules_hold(facts: Facts) -> None:
    verify(facts)


@given(any_facts(), names)
def test_more_dead_are_never_members(facts: Facts, victim: str) -> None:
    """Two faults: whoever dies before the generation is made is not in it."""
    after = replace(facts, dead={**facts.dead, victim: "too"}).next
    assert after is None or victim not in [*after.members, *after.heals, after.source]


def start(*prints: str, **limits: int) -> Facts:
    ready = {name(k): WorkerReport(name(k), facts={"model": each}) for k, each in enumerate(prints)}
    return Facts(Generation(-1), ready=ready, **limits)  # type: ignore[arg-type]


def test_the_first_generation_waits_for_all() -> None:
    assert start("a", "a", min_workers=3).next is None
    after = start("a", "a", "a", min_workers=3).made
    all_of_them = ("0.0.0", "0.1.0", "1.0.0")
    assert after == Generation(0, members=all_of_them, newcomers=all_of_them, leader="0.0.0")


def test_the_first_generation_is_of_one_training() -> None:
    after = start("a", "b", min_workers=2).made
    assert after.ends == "the workers belong to different trainings"
    assert after.refused == {
        "0.1.0": "model is b here and a there",
        "0.0.0": "model is a here and b there",
    }


def test_the_first_generation_goes_on_from_a_checkpoint() -> None:
    facts = start("a", "a", min_workers=2)
    after = replace(facts, ready={k: replace(v, step=50) for k, v in facts.ready.items()}).made
    assert (after.step, after.heals, after.source) == (50, (), None)


def test_one_dies_and_the_others_take_the_step_again() -> None:
    now = generation(3)
    after = Facts(now, stop(now, "failed", "trains", "failed"), dead={name(1): "SIGKILL"}).next
    assert after == Generation(
        4,
        members=("0.0.0", "1.0.0"),
        step=STEP,
        source="0.0.0",
        leader="0.0.0",
        reason="worker 0.1.0 was lost: SIGKILL",
    )


def test_the_leader_stays_and_its_heir_has_the_state() -> None:
    """Also where whoever comes before it in rank order has not been healed yet."""
    now = replace(generation(3), leader=name(1))
    assert Facts(now, stop(now, "failed", "failed", "failed")).made.leader == name(1)
    after = Facts(now, stop(now, "not healed", "trains", "failed"), dead={name(1): ""}).made
    assert (after.leader, after.heals) == (name(2), (name(0),))


def test_one_has_applied_the_step() -> None:
    """Whoever holds all payloads applies, with the result of who has the answer; others heal."""
    now = generation(4)
    after = Facts(now, stop(now, "failed", "holds", "applied", "trains"), dead={name(3): ""}).made
    assert (after.applies, after.heals, after.source) == (("0.1.0",), ("0.0.0",), "1.0.0")
    assert (after.step, after.finite) == (STEP + 1, False)


def test_all_hold_and_nobody_has_the_answer() -> None:
    now = generation(2)
    after = Facts(now, stop(now, "holds", "holds")).made
    assert (after.step, after.applies, after.heals) == (STEP, (), ())


def test_newcomers_beyond_the_most_wait() -> None:
    now = generation(2)
    ready = {each: WorkerReport(each) for each in (name(3), name(2))}
    after = Facts(now, stop(now, "paused", "paused"), ready, max_workers=3).made
    assert after.newcomers == ("1.0.0",)


def test_a_source_that_dies_while_it_heals_the_only_other_ends_it() -> None:
    now = generation(2)
    after = Facts(now, stop(now, "trains", "not healed"), dead={name(0): "SIGKILL"}).made
    assert after.ends == (
        "worker 0.0.0 was lost: SIGKILL; no remaining worker has the state of training"
    )


def test_records_are_the_same_after_a_way_through_the_store() -> None:
    now = generation(2)
    assert decode_generation(encode(now)) == now
    report = WorkerReport("0.0.0", 3, 5, holds=True, reason="Verbindung getrennt …")
    assert decode_report(encode(report)) == report
    assert Worker.parse("1.10.2") > Worker.parse("1.9.3")
