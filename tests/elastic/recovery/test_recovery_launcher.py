"""Workers that die are replaced by the launcher, one by one: real processes and signals."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from processes import environment_of, kill_tree
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported silently

WORKER = Path(__file__).parent / "recovering.py"
LIMIT = 100.0
FAR = "1000"
"""Seconds of a timeout that is not to come."""
THREE = ("0.0.0", "0.1.0", "0.2.0")
STANDALONE = ("--standalone", "--nproc-per-node=3")

T = TypeVar("T")
Generations = dict[str, Any]


def wait_for(found: Callable[[], T | None], what: str) -> T:
    end = time.monotonic() + LIMIT
    while (thing := found()) is None:
        assert time.monotonic() < end, f"{what} has not come"
        time.sleep(0.01)
    return thing


class Job:
    """A launcher of the worker."""

    def __init__(
        self,
        python: Sequence[str],
        folder: Path,
        *options: str,
        launcher: Sequence[str] = (),
        without_python: bool = True,
        also: Mapping[str, str] | None = None,
        **environment: str,
    ) -> None:
        self.folder = folder
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        settings = {f"LIGHTNING_DIST_{name}": value for name, value in environment.items()}
        words = ["-m", "lightning_dist.elastic.launcher", "--monitor-interval=0.05", *options]
        worker = ["--no-python", *python, str(WORKER)] if without_python else [str(WORKER)]
        self._process = subprocess.Popen(
            [*(launcher or python), *words, *worker, str(folder)],
            env=environment_of({"LIGHTNING_DIST_BEAT_TIMEOUT": FAR, **settings, **(also or {})}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the launcher, where it is no fork."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def workers(self) -> dict[str, int]:
        """Processes of all workers that have come, by name; of a name the last to come."""
        found = sorted(self.folder.glob("*.*.*.*"), key=lambda path: path.stat().st_ctime)
        return {path.stem: int(path.suffix[1:]) for path in found}

    def generations(self, name: str) -> list[Generations]:
        """In which the last process of that name has been."""
        lines = (self.folder / f"{name}.{self.workers()[name]}").read_text().splitlines(True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, *members: str, number: int | None = None) -> Generations:
        """The generation that all members, and only they, are in; None: of any number."""
        return wait_for_all([self], members, number=number)

    def wait_for_restart(self, before: dict[str, int]) -> None:
        """Wait until all three are other processes than ``before``, in a first generation."""
        wait_for(lambda: not {*self.workers().values()} & {*before.values()} or None, "a restart")
        self.wait_for(*THREE, number=0)

    def tell(self, what: str, name: str, value: str = "") -> None:
        """Leave a word for a worker, as `recovering.py` says."""
        new = self.folder / "new"
        new.write_text(value)
        new.rename(self.folder / f"{what}-{name}")

    def let_come(self, name: str) -> None:
        """Let a worker that was told to be late be ready."""
        (self.folder / f"late-{name}").unlink()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.workers()[name], number)

    def wait(self) -> int:
        return self._process.wait(LIMIT)

    def end(self) -> None:
        """Let all workers end, and the launcher after them."""
        (self.folder / "end").touch()
        assert self.wait() == 0, self.output

    def close(self) -> None:
        if self._process.poll() is None:
            kill_tree(self._process.pid)
        self._process.wait()
        self._log.close()


def wait_for_all(
    jobs: Sequence[Job], members: Sequence[str], *, number: int | None = None
) -> Generations:
    """The generation that all members, of several launchers, and only they are in."""

    def found() -> Generations | None:
        last: dict[str, Generations] = {}
        for job in jobs:
            assert job.is_alive, "a launcher has ended"
            last |= {name: lines[-1] for name in job.workers() if (lines := job.generations(name))}
        made = [last.get(name, {}) for name in members]
        if any(each.get("members") != [*members] for each in made):
            return None
        numbers = {each["number"] for each in made}
        return made[0] if len(numbers) == 1 and number in (None, *numbers) else None

    try:
        return wait_for(found, f"a generation of {members}")
    except AssertionError as error:
        outputs = "\n".join(job.output[-3000:] for job in jobs)
        raise AssertionError(f"{error}\n{outputs}") from None


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Launchers that have been started."""
    found: list[Job] = []
    yield found
    for job in found:
        job.close()


@pytest.fixture
def start(jobs: list[Job], tmp_path: Path, quick_python: list[str]) -> Callable[..., Job]:
    """Start a launcher of one node with three workers, or with the given options."""

    def start(*options: str, workers: Sequence[str] = THREE, **others: Any) -> Job:
        folder = tmp_path / "workers"
        folder.mkdir(exist_ok=True)
        options = options or (*STANDALONE, "--max-restarts=3")
        jobs.append(Job(quick_python, folder, *options, **others))
        jobs[-1].wait_for(*workers)
        return jobs[-1]

    return start


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    ("victim", "told"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP)],
)
def test_a_worker_that_is_killed_or_stopped_is_replaced(
    victim: int, told: signal.Signals, start: Callable[..., Job]
) -> None:
    """The others are not touched, and have a generation before that; nobody goes on later."""
    is_stopped = told == signal.SIGSTOP
    job = start(BEAT_TIMEOUT="4" if is_stopped else FAR)
    before = job.workers()
    killed, again = THREE[victim], f"0.{victim}.1"
    left = [name for name in THREE if name != killed]
    job.tell("late", again)
    job.signal(killed, told)
    job.wait_for(*left, number=1)
    job.let_come(again)
    job.wait_for(*sorted([again, *left]), number=2)
    with suppress(ProcessLookupError):
        os.kill(before[killed], signal.SIGCONT)
    wait_for(lambda: not Path(f"/proc/{before[killed]}").exists() or None, "the end of the victim")
    assert {name: job.workers()[name] for name in before} == before
    job.end()
    assert f"worker {killed} exited: SIGKILL" in job.output
    assert f"started worker {again}; 2 restarts left" in job.output
    assert ("no heartbeat for " in job.output) == is_stopped


@pytest.mark.parametrize(
    ("exits", "killed", "after"),
    [
        pytest.param({"0.1.0": "1"}, (), ("0.0.0", "0.1.1", "0.2.0"), id="an exit code"),
        pytest.param({"0.1.0": "78"}, (), ("0.0.0", "0.1.1", "0.2.0"), id="another"),
        pytest.param({}, THREE[:2], ("0.0.1", "0.1.1", "0.2.0"), id="two at once"),
        pytest.param({"0.1.1": "1"}, ("0.1.0",), ("0.0.0", "0.1.2", "0.2.0"), id="a replacement"),
    ],
)
def test_workers_that_end_are_replaced(
    exits: dict[str, str], killed: Sequence[str], after: Sequence[str], start: Callable[..., Job]
) -> None:
    job = start()
    for name, code in exits.items():
        job.tell("exit", name, code)
    for name in killed:
        job.signal(name, signal.SIGKILL)
    job.wait_for(*after)
    job.end()


@pytest.mark.parametrize(
    ("restarts", "fewest", "killed"),
    [(1, "3", ["0.1.0"]), (1, "1", THREE), (0, "1", [])],
    ids=["below the minimum", "nobody is left", "a worker asks for it"],
)
def test_all_are_restarted(
    restarts: int, fewest: str, killed: Sequence[str], start: Callable[..., Job]
) -> None:
    """For the price of one restart, but for nothing where a worker asks for it."""
    job = start(*STANDALONE, f"--max-restarts={restarts}", MIN_WORKERS=fewest)
    before = job.workers()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none is replaced before the last is dead
        for name in killed:
            job.signal(name, number)
    if not killed:
        job.tell("exit", "0.2.0", "75")
    job.wait_for_restart(before)
    if fewest == "1":
        job.end()
        return
    assert "2 workers are left, fewer than 3" in job.output
    job.signal("0.1.0", signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL, "not that of those that ask for a restart"
    assert "SIGKILL" in job.output


def test_a_replacement_costs_a_restart_and_its_output_follows_that_of_the_dead(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    job = start(*STANDALONE, "--max-restarts=1", f"--log-dir={logs}", "--tee=3")
    job.signal("0.1.0", signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1", "0.2.0")
    (log,) = logs.glob("*/attempt_0/1/stdout.log")
    assert log.read_text() == "worker 0.1.0 has come\nworker 0.1.1 has come\n"
    job.signal("0.0.0", signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    assert "max_restarts is reached; worker 0.0.0 is not replaced" in job.output
    assert "[default1]:worker 0.1.1 has come" in job.output


def test_a_replacement_of_another_training_is_refused(start: Callable[..., Job]) -> None:
    """Its place stays empty, also when the others go on to further generations."""
    job = start()
    job.tell("other", "0.1.1")
    job.tell("late", "0.1.1")
    job.signal("0.1.0", signal.SIGKILL)
    job.wait_for("0.0.0", "0.2.0", number=1)
    job.let_come("0.1.1")
    job.wait_for("0.0.0", "0.2.0", number=2)  # without the refused
    job.signal("0.2.0", signal.SIGKILL)
    job.wait_for("0.0.0", "0.2.1")
    job.end()
    assert "worker 0.1.2" not in job.output


@SLOW
def test_newcomers_are_forks(start: Callable[..., Job], tmp_path: Path) -> None:
    """As any other worker to the launcher; without the server they are started as usual."""
    options = ("--max-restarts=9", f"--log-dir={tmp_path / 'logs'}", "--tee=3")
    job = start(
        *("--standalone", "--nproc-per-node=2", *options),
        workers=THREE[:2],
        launcher=[sys.executable],
        without_python=False,
    )
    wait_for(lambda: forks_of(job) or None, "the server")  # which the next one waits for
    job.signal("0.1.0", signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1")
    job.tell("exit", "0.1.1", "1")
    job.wait_for("0.0.0", "0.1.2")
    job.signal("0.1.2", signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.3")
    workers = job.workers()
    (server,) = {*forks_of(job)} - {*workers.values()}
    assert workers["0.1.3"] in forks_of(job)
    os.kill(server, signal.SIGKILL)
    job.signal("0.0.0", signal.SIGKILL)
    job.wait_for("0.0.1", "0.1.3")
    assert forks_of(job) == [workers["0.1.3"]]
    assert job.workers()["0.1.3"] == workers["0.1.3"]
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 1
    assert not [pid for pid in job.workers().values() if Path(f"/proc/{pid}").exists()]
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert log.read_text().splitlines() == [f"worker 0.1.{n} has come" for n in range(4)]
    for line in (
        "[default1]:worker 0.1.1 has come",
        "worker 0.1.1 exited: exit code 1",
        "worker 0.1.2 exited: SIGKILL",
        "workers cannot be forks of one process: it has ended",
    ):
        assert job.output.count(line) == 1, job.output


def forks_of(job: Job) -> list[int]:
    """Children of the launcher that are its fork server or forks of that."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    commands = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return [pid for pid, command in commands.items() if "fork_server.py\0serve" in command]


@SLOW
def test_the_launcher_grows_by_nothing(start: Callable[..., Job]) -> None:
    """After twenty deaths in a row it has as many threads and open files as after five."""
    job = start(*STANDALONE, "--max-restarts=20", launcher=[sys.executable])
    names, sizes = list(THREE), []
    for count in range(20):
        place = count % 3
        job.signal(names[place], signal.SIGKILL)
        names[place] = f"0.{place}.{count // 3 + 1}"
        job.wait_for(*names)
        sizes.append([len(os.listdir(f"/proc/{job.pid}/{what}")) for what in ("fd", "task")])
    assert sizes[4] == sizes[-1]
    job.end()


@pytest.fixture
def rendezvous_store() -> TCPStore:
    """Where launchers meet, so that none is needed by the others for that."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def start_node(
    jobs: list[Job], rendezvous_store: TCPStore, tmp_path: Path, quick_python: list[str]
) -> Callable[..., Job]:
    """Start the launcher of another node with two workers."""
    options = (
        *(
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{rendezvous_store.port}",
            "--rdzv-id=job",
        ),
        "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=9",
        *("--local-addr=localhost", "--nproc-per-node=2", "--max-restarts=3"),
    )

    def start(*others: str, **settings: Any) -> Job:
        folder = tmp_path / f"workers-{len(jobs)}"
        folder.mkdir()
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        jobs.append(Job(quick_python, folder, *options, *others, also=environment, **settings))
        return jobs[-1]

    return start


def by_node(jobs: Sequence[Job]) -> list[Job]:
    """Launchers in the order of their nodes."""
    return sorted(jobs, key=lambda job: min(job.workers()))


@SLOW
def test_a_node_that_joins_does_not_restart_the_others(start_node: Callable[..., Job]) -> None:
    first = start_node("--nnodes=1:3")
    first.wait_for("0.0.0", "0.1.0")
    before = first.workers()
    second = start_node("--nnodes=1:3")
    four = ("0.0.0", "0.1.0", "1.0.0", "1.1.0")
    wait_for_all([first, second], four)
    second.signal("1.0.0", signal.SIGKILL)
    wait_for_all([first, second], ("0.0.0", "0.1.0", "1.0.1", "1.1.0"))
    assert first.workers() == before
    for job in (first, second):
        (job.folder / "end").touch()
    assert [first.wait(), second.wait()] == [0, 0], first.output + second.output
    assert "node 1 joins a job" in second.output


@SLOW
@pytest.mark.parametrize("victim", [1, 2])
def test_a_node_that_dies_is_left_out(victim: int, start_node: Callable[..., Job]) -> None:
    """With its launcher, which tells nobody; one that comes takes its place."""
    jobs = [start_node("--nnodes=3", BEAT_TIMEOUT="4", MIN_WORKERS="2") for _ in range(3)]
    names = [f"{node}.{rank}.0" for node in range(3) for rank in range(2)]
    wait_for_all(jobs, names)
    jobs = by_node(jobs)
    before = [job.workers() for job in jobs]
    jobs[victim].close()
    left = [job for job in jobs if job is not jobs[victim]]
    wait_for_all(left, [name for name in names if not name.startswith(f"{victim}.")])
    left.append(start_node("--nnodes=3", BEAT_TIMEOUT="4", MIN_WORKERS="2"))
    names = [name for name in names if not name.startswith(f"{victim}.")] + ["3.0.0", "3.1.0"]
    wait_for_all(left, names)
    assert [job.workers() for job in left[:2]] == [
        workers for node, workers in enumerate(before) if node != victim
    ]
    for job in left:
        (job.folder / "end").touch()
    assert [job.wait() for job in left] == [0, 0, 0]


@SLOW
def test_without_the_coordinator_all_are_restarted(start_node: Callable[..., Job]) -> None:
    jobs = [start_node("--nnodes=1:2", "--max-restarts=1") for _ in range(2)]
    wait_for_all(jobs, [f"{node}.{rank}.0" for node in range(2) for rank in range(2)])
    first, second = by_node(jobs)
    second.signal("1.0.0", signal.SIGKILL)
    wait_for_all(jobs, ["0.0.0", "0.1.0", "1.0.1", "1.1.0"])
    first.close()
    second.wait_for("0.0.0", "0.1.0", number=0)  # it was node 1
    second.end()
    assert "the store is lost; restarting all workers" in second.output
