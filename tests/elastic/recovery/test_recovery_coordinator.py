"""The coordinator, by a clock of the test; with real workers in `test_recovery_launcher`."""

import threading

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    HashStore,
    PrefixStore,
)

from lightning_dist.elastic.recovery.coordinator import (
    Coordinator,
    CoordinatorSettings,
    describe,
)
from lightning_dist.elastic.recovery.protocol import (
    ROOT,
    Generation,
    Keys,
    WorkerReport,
    decode_generation,
    encode,
)

SETTINGS = CoordinatorSettings(min_workers=1, max_workers=8, beat_timeout=5, report_timeout=20)


class Job:
    """A coordinator, its clock, and what agents and workers write."""

    def __init__(self, places: int, settings: CoordinatorSettings = SETTINGS) -> None:
        self.store = PrefixStore(ROOT, HashStore())
        self.coordinator = Coordinator(self.store, settings, places=places)
        self.now, self.beats = 100.0, 0
        self.names: list[str] = []
        for place in range(places):
            self.start(f"0.{place}.0")

    def start(self, name: str) -> None:
        self.store.set(Keys.worker(len(self.names)), name)
        self.store.add(Keys.workers, 1)
        self.names.append(name)

    def be_ready(self, *names: str, model: str = "") -> None:
        for name in names:
            report = WorkerReport(name, facts={"model": model} if model else {})
            self.store.set(Keys.report(-1, name), encode(report))

    def report(self, *names: str, step: int = 0, failed: bool = True) -> None:
        number = self.newest.number
        for name in names:
            report = WorkerReport(name, number, step, failed=failed)
            self.store.set(Keys.report(number, name), encode(report))

    def pass_time(self, seconds: float, *, silent: tuple[str, ...] = ()) -> Generation:
        """Let all but some beat ten times a second."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now += 0.1
            self.beats += 1
            for name in self.names:
                if name not in silent:
                    self.store.set(Keys.beat(name), str(self.beats))
            self.coordinator.poll(self.now)
        return self.newest

    def look(self) -> Generation:
        self.now += 0.6
        self.coordinator.poll(self.now)
        return self.newest

    @property
    def newest(self) -> Generation:
        """By the store, as all others see it."""
        if not self.store.check([Keys.newest]):
            return Generation(-1)
        number = int(self.store.get(Keys.newest))
        made = decode_generation(self.store.get(Keys.generation(number)))
        assert made == self.coordinator.newest
        return made


@pytest.fixture
def three() -> Job:
    """Three workers that train in generation 0."""
    job = Job(3)
    job.be_ready(*job.names)
    assert job.look().members == ("0.0.0", "0.1.0", "0.2.0")
    return job


def test_the_first_generation_waits_for_all_places_and_the_fewest_workers() -> None:
    """Until another node comes, at which the launchers start all again."""
    job = Job(2, CoordinatorSettings(min_workers=3, max_workers=4))
    job.be_ready(*job.names)
    assert job.pass_time(60).number == -1
    job = Job(2)
    job.be_ready("0.0.0")
    assert job.pass_time(600).number == -1
    job.be_ready("0.1.0")
    assert job.look().number == 0


@pytest.mark.parametrize("victim", ["0.0.0", "0.1.0", "0.2.0"])
def test_a_death_breaks_the_generation_at_once(three: Job, victim: str) -> None:
    three.store.set(Keys.dead(victim), "SIGKILL")
    assert three.look().number == 0
    assert three.store.get(Keys.broken(0)) == f"worker {victim}: SIGKILL".encode()
    left = [name for name in three.names if name != victim]
    three.report(*left)
    after = three.look()
    assert (after.number, list(after.members)) == (1, left)
    assert after.reason == f"worker {victim} was lost: SIGKILL"


def test_who_does_not_beat_is_dead(three: Job) -> None:
    three.pass_time(2)
    assert three.pass_time(5, silent=("0.1.0",)).number == 0
    assert not three.store.check([Keys.broken(0)])
    three.pass_time(1.2, silent=("0.1.0",))
    assert b"no heartbeat for 5" in three.store.get(Keys.dead("0.1.0"))
    three.report("0.0.0", "0.2.0")
    assert three.look().members == ("0.0.0", "0.2.0")


def test_who_is_busy_without_a_beat_is_not_dead(three: Job) -> None:
    """It holds the interpreter's lock, which its agent sees in its CPU time; not for ever."""
    three.pass_time(2)
    for tick in range(12):
        three.store.set(Keys.cpu("0.1.0"), str(tick))
        three.pass_time(1, silent=("0.1.0",))
    assert not three.store.check([Keys.broken(0)])
    three.pass_time(5.5, silent=("0.1.0",))
    assert b"no heartbeat for " in three.store.get(Keys.dead("0.1.0"))


def test_who_is_busy_without_a_beat_for_very_long_is_dead(three: Job) -> None:
    three.pass_time(2)
    for tick in range(22):
        three.store.set(Keys.cpu("0.1.0"), str(tick))
        three.pass_time(1, silent=("0.1.0",))
    assert three.store.get(Keys.dead("0.1.0")).endswith(b", but busy")


def test_who_never_beat_is_not_missed(three: Job) -> None:
    """It imports, which may take minutes."""
    three.start("0.3.0")
    three.pass_time(60, silent=("0.3.0",))
    assert not three.store.check([Keys.dead("0.3.0")])


def test_silence_does_not_count_while_the_coordinator_did_not_look(three: Job) -> None:
    """The machine was suspended, or the launcher stopped."""
    three.pass_time(2)
    three.now += 3600
    three.coordinator.poll(three.now)
    assert three.pass_time(2).number == 0
    assert not three.store.check([Keys.broken(0)])


def test_who_does_not_report_is_left_out_and_killed(three: Job) -> None:
    three.report("0.0.0", "0.2.0")
    assert three.pass_time(19.5).number == 0
    assert three.pass_time(1.5).members == ("0.0.0", "0.2.0")
    assert b"excluded from generation 1" in three.store.get(Keys.dead("0.1.0"))


def test_time_to_report_counts_from_the_first_report(three: Job) -> None:
    """All others validate, each by itself, when one is lost: nobody may be missed for that."""
    three.store.set(Keys.dead("0.1.0"), "SIGKILL")
    assert three.pass_time(300).number == 0
    three.report("0.0.0")
    assert three.pass_time(19.5).number == 0
    three.report("0.2.0")
    assert three.pass_time(1).members == ("0.0.0", "0.2.0")


def test_a_zombie_cannot_come_back(three: Job) -> None:
    three.store.set(Keys.dead("0.1.0"), "no sign of life")
    three.report("0.0.0", "0.2.0")
    assert three.look().number == 1
    three.store.set(Keys.report(0, "0.1.0"), encode(WorkerReport("0.1.0", 0, 5)))
    three.store.set(Keys.report(1, "0.1.0"), encode(WorkerReport("0.1.0", 1, 5)))
    three.be_ready("0.1.0")
    assert three.pass_time(30).number == 1
    three.report("0.0.0", "0.2.0", step=1)
    assert three.look().members == ("0.0.0", "0.2.0")


def test_a_replacement_joins_at_the_next_pause(three: Job) -> None:
    three.store.set(Keys.dead("0.1.0"), "SIGKILL")
    three.report("0.0.0", "0.2.0", step=3)
    assert three.look().number == 1
    three.start("0.1.1")
    three.be_ready("0.1.1")
    assert three.pass_time(30).number == 1
    three.report("0.0.0", step=4, failed=False)
    assert three.look().number == 1
    three.report("0.2.0", step=4, failed=False)
    after = three.look()
    assert after.members == ("0.0.0", "0.1.1", "0.2.0")
    assert (after.newcomers, after.heals, after.step) == (("0.1.1",), ("0.1.1",), 4)
    assert three.pass_time(30).number == 2


def test_a_newcomer_that_is_not_seen_yet_is_not_counted_as_seen() -> None:
    """Or members would not pause for it: it came while the generation was being made."""
    job = Job(1)
    job.be_ready("0.0.0")
    assert job.look().waiting == 1
    job.start("0.1.0")
    store = job.store

    class Late:
        """The store, into which somebody writes just after newcomers were looked for."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            if keys == [Keys.broken(0)]:
                job.be_ready("0.1.0")
            return store.check(keys)

    job.coordinator._store = Late()
    job.report("0.0.0", failed=False)
    job.look()
    assert job.newest.waiting == job.store.add(Keys.waiting, 0) == 1
    job.look()
    assert job.store.add(Keys.waiting, 0) == 2


def test_a_newcomer_that_is_admitted_is_counted_in_the_same_generation(three: Job) -> None:
    """Or all would pause once more, for nobody."""
    three.start("0.3.0")
    three.be_ready("0.3.0")
    three.report("0.0.0", "0.1.0", "0.2.0", failed=False)
    assert "0.3.0" in three.look().members
    three.look()
    assert three.store.add(Keys.waiting, 0) == three.newest.waiting == 4


def test_nobody_pauses_for_a_newcomer_without_a_place() -> None:
    """It waits until somebody is lost."""
    job = Job(2, CoordinatorSettings(max_workers=2))
    job.be_ready("0.0.0", "0.1.0")
    now = job.look()
    job.start("0.2.0")
    job.be_ready("0.2.0")
    assert job.look() == now
    assert job.store.add(Keys.waiting, 0) == now.waiting
    job.store.set(Keys.dead("0.1.0"), "SIGKILL")
    job.look()
    job.report("0.0.0")
    assert job.look().members == ("0.0.0", "0.2.0")


def test_a_second_fault_while_the_first_is_recovered(three: Job) -> None:
    three.store.set(Keys.dead("0.1.0"), "SIGKILL")
    three.report("0.0.0")
    assert three.look().number == 0
    three.store.set(Keys.dead("0.2.0"), "SIGKILL")
    assert three.look().members == ("0.0.0",)


def test_below_the_minimum_all_end() -> None:
    job = Job(2, CoordinatorSettings(min_workers=2, max_workers=2))
    job.be_ready(*job.names)
    job.look()
    job.store.set(Keys.dead("0.0.0"), "SIGKILL")
    job.report("0.1.0")
    assert job.look().ends == ("worker 0.0.0 was lost: SIGKILL; 1 workers are left, fewer than 2")


def test_workers_that_end_with_0_are_not_missed(three: Job) -> None:
    three.pass_time(1)
    three.store.set(Keys.done("0.1.0"), "")
    assert three.pass_time(60, silent=("0.1.0",)).number == 0
    assert not three.coordinator.is_over
    for name in three.names:
        three.store.set(Keys.done(name), "")
    three.look()
    assert three.coordinator.is_over
    assert three.store.check([Keys.over])


def test_a_failure_after_some_have_ended_is_that_of_the_others(three: Job) -> None:
    three.store.set(Keys.done("0.1.0"), "")
    three.store.set(Keys.dead("0.2.0"), "SIGKILL")
    three.report("0.0.0")
    after = three.look()
    assert after.members == ("0.0.0",)
    assert "worker 0.1.0 was lost: has ended" in after.reason


def test_a_refused_newcomer_is_refused_once(three: Job) -> None:
    three.start("1.0.0")
    three.be_ready("1.0.0", model="another")
    three.report(*three.names[:3], failed=False)
    assert three.look().refused == {"1.0.0": "model is another here and None there"}
    assert three.pass_time(30).number == 1
    assert describe(three.newest).endswith("refused: 1.0.0")


def test_settings_of_the_environment() -> None:
    values = {"MIN_WORKERS": "3", "BEAT_TIMEOUT": "0.5", "REPORT_TIMEOUT": "7"}
    environ = {f"LIGHTNING_DIST_{name}": value for name, value in values.items()}
    settings = CoordinatorSettings.from_env(nodes=(1, 4), ranks=2, environ=environ)
    assert settings == CoordinatorSettings(3, 8, 0.5, 7.0)
    usual = CoordinatorSettings.from_env(nodes=(2, 4), ranks=2, environ={})
    assert usual == CoordinatorSettings(2, 8, 5.0, 600.0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("BEAT_TIMEOUT", "soon", "BEAT_TIMEOUT must be a number, got 'soon'"),
        ("BEAT_TIMEOUT", "0", "got 0 s without a heartbeat"),
        ("MIN_WORKERS", "3", "got 3 and 2"),
    ],
)
def test_settings_that_cannot_be(name: str, value: str, told: str) -> None:
    environ = {f"LIGHTNING_DIST_{name}": value}
    with pytest.raises(ValueError, match=told):
        CoordinatorSettings.from_env(nodes=(1, 1), ranks=2, environ=environ)


def test_an_error_of_the_store_ends_it_with_a_reason() -> None:
    store = PrefixStore(ROOT, HashStore())
    store.set(Keys.workers, "not a number")
    coordinator = Coordinator(store, SETTINGS, places=1)
    thread = threading.Thread(target=coordinator.run, args=[threading.Event()], daemon=True)
    thread.start()
    thread.join(60)
    assert "in the coordinator" in coordinator.ended
    told = decode_generation(store.get(Keys.generation(0)))
    assert told.ends == coordinator.ended
