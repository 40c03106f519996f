"""The tests' own tools: slots, tiers, worlds of threads, forks."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from forks import with_seeds
from processes import environment_of, port, readable, run, torchrun
from slots import RANKS_PER_CORE, slots, taking
from tiers import COLLECTED, listed, naming_no_test
from worlds import Rank, run_threads


@pytest.fixture
def four(tmp_path: Path) -> str:
    for number in range(4):
        (tmp_path / str(number)).touch()
    return str(tmp_path)


def started(folder: str, count: int) -> tuple[Event, Event, Thread]:
    """A thread that takes slots: whether it has them, what lets it go on, and itself."""
    has, release = Event(), Event()

    def take() -> None:
        with taking(folder, count):
            has.set()
            assert release.wait(60)

    thread = Thread(target=take)
    thread.start()
    return has, release, thread


def wait_for_its_turn(folder: str) -> None:
    """Until somebody waits for slots."""
    turn = os.open(folder, os.O_RDONLY)
    with suppress(BlockingIOError):
        while True:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(turn, fcntl.LOCK_UN)
    os.close(turn)


def test_as_many_as_there_are(four: str) -> None:
    with taking(four, 3):
        has_one, release_one, first = started(four, 1)
        assert has_one.wait(60)
        has_two, release_two, second = started(four, 2)
        wait_for_its_turn(four)
        has_last, release_last, third = started(four, 1)
        release_one.set()
        first.join(60)
        assert not has_two.wait(0.2), "one is free"
        assert not has_last.is_set(), "whoever came first is first"
    assert has_two.wait(60)
    assert has_last.wait(60)
    release_two.set()
    release_last.set()
    second.join(60)
    third.join(60)


def test_whoever_wants_more_than_there_are_has_all(four: str) -> None:
    with taking(four, 9):
        has, release, thread = started(four, 1)
        assert not has.wait(0.2)
    assert has.wait(60)
    release.set()
    thread.join(60)


def test_a_process_that_is_killed_gives_its_slots_back(four: str) -> None:
    code = (
        "import sys, slots\nwith slots.taking(sys.argv[1], 4): print(flush=True), sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, four],
        env=environment_of({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        has, release, thread = started(four, 1)
        assert not has.wait(0.2)
        process.send_signal(signal.SIGKILL)
    assert has.wait(60)
    release.set()
    thread.join(60)


def test_as_many_for_each_core() -> None:
    with slots() as folder:
        assert len(os.listdir(folder)) == RANKS_PER_CORE * len(os.sched_getaffinity(0))


def test_every_line_of_the_list_names_a_test(pytestconfig: pytest.Config) -> None:
    """With the parameters that it has; files that need what is not installed have none."""
    tests = pytestconfig.stash.get(COLLECTED, None)
    if tests is None:  # this run has some of them only
        files = sorted({test.partition("::")[0] for test in listed()})
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *files]
        tests = run(words, limit=200).require_success().output.splitlines()
    assert naming_no_test(listed(), (test for test in tests if "::" in test)) == []


def test_lines_of_tiers_that_name_no_test() -> None:
    tests = ["a.py::test_one[x]", "a.py::test_two"]
    lines = ["a.py::test_one", "a.py::test_one[x]", "a.py::test_two", "not-installed.py::test"]
    assert naming_no_test(lines, tests) == []
    wrong = ["a.py::test_one[y]", "a.py::test_three", "a.py::test_two[x]"]
    assert naming_no_test([*lines, *wrong], tests) == wrong


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_world_whose_ranks_left_a_collective_keeps_no_connection() -> None:
    """The rank that waits fails when the next world has run, before the timeout of its group."""
    before, waits = descriptors(), []

    def body(rank: Rank) -> None:
        group = rank.group("some")
        group.allreduce([torch.ones(1)]).wait()
        if rank.rank:
            waits.append(group.allreduce([torch.ones(1)]))

    run_threads(body, 3)
    run_threads(lambda rank: None, 1)
    for work in waits:
        with pytest.raises(RuntimeError, match=r"Connection closed by peer|Socket closed"):
            work.wait()
    of_devices, end = 8, time.monotonic() + 60
    while descriptors() > before + of_devices:  # a thread of gloo closes them
        assert time.monotonic() < end


def test_a_port_costs_no_descriptor() -> None:
    port()
    before = descriptors()
    found = {port() for _ in range(50)}
    assert len(found) == 50
    with socket.socket() as mine:
        mine.bind(("", port()))
    assert descriptors() <= before + 1


SCRIPT = """
import atexit, json, os, sys
atexit.register(print, "at exit")
facts = {"argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "main": __name__}
facts |= {"set": os.environ.get("SET"), "home": os.environ.get("HOME"), "leads": os.getsid(0)}
print(json.dumps(facts | {"pid": os.getpid()}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def said(output: str) -> dict[str, object]:
    first, last = output.splitlines()
    assert last == "at exit"
    return json.loads(first)


def test_a_script(quick_python: list[str], script: Path) -> None:
    done = run([*quick_python, script, "a", "b c"], limit=60, SET="here").require_success()
    facts = said(done.output)
    assert facts["argv"] == [str(script), "a", "b c"]
    assert facts["path"] == str(script.parent)
    assert facts["folder"] == os.getcwd()
    assert facts["main"] == "__main__"
    assert facts["set"] == "here"
    assert facts["home"] == os.environ.get("HOME")
    assert facts["leads"] == facts["pid"]


def test_code_and_module(quick_python: list[str], tmp_path: Path) -> None:
    facts = said(run([*quick_python, "-c", SCRIPT, "x"], limit=60).require_success().output)
    assert facts["argv"] == ["-c", "x"]
    made = run([*quick_python, "-m", "json.tool", "--help"], limit=60).require_success().output
    assert made.startswith("usage: ")
    told = run([*quick_python, "-c", "import sys; sys.stderr.write('x'); 1 / 0"], limit=60)
    assert told.returncode == 1
    assert told.output.startswith("x")
    assert told.output.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('why')", 1),
        ("import os; os.environ['TAKEN_APART'] = '1'; exit(7)", 7),
        ("import os; os._exit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_how_it_ends(quick_python: list[str], code: str, ends: int) -> None:
    assert run([*quick_python, "-c", code], limit=60).returncode == ends


def test_who_kills_the_client_ends_the_fork(quick_python: list[str]) -> None:
    code = "import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    with subprocess.Popen([*quick_python, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        fork = os.pidfd_open(int(client.stdout.readline()))
        client.kill()
        assert readable(fork, 30), "it is still there"
        os.close(fork)


def test_signals_are_passed_on(quick_python: list[str]) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5));"
        "os.write(1, b'waits\\n'); signal.pause()"
    )
    with subprocess.Popen([*quick_python, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        client.terminate()
        assert client.wait(30) == 5


def test_its_parent_is_that_of_the_client(quick_python: list[str]) -> None:
    code = (
        "import os; own = os.getpid(); print(os.getppid(), flush=True)\n"
        "if os.fork(): os.wait()\n"
        "else: print(os.getppid() == own, flush=True)"
    )
    with subprocess.Popen([*quick_python, "-c", code], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.read().decode().split() == [str(os.getpid()), "True"]


def test_what_it_starts_is_a_fork_too(quick_executable: str) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', CODE])".replace(
        "CODE", repr("import sys; print(len(sys.modules), sys.executable)")
    )
    for words in (["-c", code], ["-P", "-c", code]):
        done = run([quick_executable, *words], limit=60)
        many, executable = done.require_success().output.split()
        assert (int(many) > 2000, executable == quick_executable) == (words == ["-c", code],) * 2


def test_forks_draw_random_numbers_of_their_own(quick_python: list[str]) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, other = (run([*quick_python, "-c", code], limit=60).require_success() for _ in range(2))
    assert {*one.output.split()}.isdisjoint(other.output.split())


def test_ranks_of_torchrun(quick_python: list[str], tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nfrom lightning.fabric.utilities.rank_zero import rank_zero_only\n"
        "facts = [rank_zero_only.rank, os.environ['WORLD_SIZE'], sys.argv[1:]]\n"
        "os.write(1, f'{facts}\\n'.encode())\n"
    )
    done = torchrun(script, "x", ranks=2, limit=60, python=quick_python).require_success()
    assert sorted(done.output.splitlines()) == ["[0, '2', ['x']]", "[1, '2', ['x']]"]


def test_ranks_have_hash_seeds_of_their_own(
    quick_python: list[str], torch_python: list[str]
) -> None:
    command = [*with_seeds(quick_python, torch_python), "-c", "print(hash('seed'))"]
    found = [run(command, limit=60, RANK=rank).require_success().output for rank in "0123"]
    assert found[0] == found[2] != found[1] == found[3]
    assert int(found[0])


def test_nothing_but_torch_is_imported(torch_python: list[str]) -> None:
    code = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run([*torch_python, "-c", code], limit=60).require_success().output.split())
    assert "torchmetrics" in loaded
    assert not loaded & {"lightning", "accelerate", "wandb"}
    assert "lightning_dist" not in loaded


def test_threads_and_exit_functions_are_waited_for(quick_python: list[str]) -> None:
    code = "import atexit, threading; atexit.register(print, 'at exit', end='')\n"
    code += "end = threading.main_thread().join\n"  # returns when Python begins to end
    code += "threading.Thread(target=lambda: (end(), print('thread'))).start()"
    assert run([*quick_python, "-c", code], limit=60).output == "thread\nat exit"
