"""Runs of tests: failures are repeated, leftovers fail, and some run on the ranks of worlds."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from left_behind import EXIT_CODE
from on_ranks import SPARE, START_LIMIT
from processes import HELPERS, ROOT, environment_of, run

pytestmark = pytest.mark.slow

SUITE = """
import os, pathlib, pytest

def fails(name, times, end=None):
    path = pathlib.Path(__file__).with_name(name)
    before = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (before + 1))
    if before < times and end is not None:
        os._exit(end)
    assert before >= times, f"failure {before + 1} of {name}"

def test_passes():
    fails("passes", 0)
"""
BY_CHANCE = """
@pytest.mark.parametrize("case", ["a b", "c"])
def test_by_chance(case):
    fails(case, 1)
"""
TWICE = """
def test_wrong():
    fails("wrong", 2)
"""
TORN_DOWN = """
@pytest.fixture
def left():
    yield
    fails("left", 2)

def test_torn_down(left):
    pass
"""
ENDED = """
def test_ended():
    fails("ended", 2, 1)
"""

CONFTEST = f"""
import sys
sys.path[:0] = {list(map(str, HELPERS))!r}
from left_behind import LeftBehind

def pytest_configure(config):
    config.pluginmanager.register(LeftBehind())
"""
FAILING = """
import subprocess
kept = []

def test_left():
    path = pathlib.Path(__file__).with_name("again")
    if not path.exists():
        path.touch() if {by_chance} else None
        kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
"""


def lines_of(folder: Path, suite: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and output of a run of a file of tests."""
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")
    command = [sys.executable, "-m", "tests.runner.rerun_failed", "out", *arguments]
    environment = environment_of({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_run_without_a_failure_repeats_nothing(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE)
    assert code == 0
    assert lines[-1].startswith("1 passed")
    assert (tmp_path / "passes").read_text() == "x"


def test_what_passes_when_it_is_repeated_is_named_and_the_run_passes(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + BY_CHANCE)
    assert code == 0
    assert [line for line in lines[-4:] if line.startswith("FLAKY")] == [
        "FLAKY test_suite.py::test_by_chance[a b]",
        "FLAKY test_suite.py::test_by_chance[c]",
    ]
    assert (tmp_path / "passes").read_text() == "x"  # what has passed is not repeated
    kept = [file.read_text() for file in sorted((tmp_path / "out").glob("[!s]*.txt"))]
    assert ["failure 1 of c" in text for text in kept] == [True, False]
    assert ["2 passed" in text for text in kept] == [False, True]


def test_a_worker_that_crashes_costs_one_test(tmp_path: Path) -> None:
    """Each test runs once, and the run ends; the one that has crashed runs again, alone."""
    hook = "from scheduling import pytest_xdist_make_scheduler\n"
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path[:0] = {list(map(str, HELPERS))!r}\n{hook}"
    )
    for number in range(12):
        suite = "\ndef test_own():\n    fails('{}', 1 if {} else 0, 1 if {} else None)\n"
        crashes = number == 8
        (tmp_path / f"test_{number}.py").write_text(SUITE + suite.format(number, crashes, crashes))
    code, lines = lines_of(tmp_path, SUITE, "-n", "2", "--dist", "loadfile")
    assert code == 0
    assert [line for line in lines[-2:] if line.startswith("FLAKY")] == [
        "FLAKY test_8.py::test_own"
    ]
    runs = {number: (tmp_path / str(number)).read_text() for number in range(12)}
    assert runs == {number: "xx" if number == 8 else "x" for number in range(12)}


@pytest.mark.parametrize("suite", [TWICE, TORN_DOWN, ENDED], ids=["call", "teardown", "process"])
def test_what_fails_twice_fails_the_run_and_says_how_to_repeat_it(
    tmp_path: Path, suite: str
) -> None:
    name = suite.partition("def test_")[2].partition("(")[0]
    code, lines = lines_of(tmp_path, SUITE + suite, "-n", "1")
    assert code == 1
    assert lines[-2] == f"FAILED test_suite.py::test_{name}"
    assert lines[-1].endswith(f'/bin/python -m pytest -m "" test_suite.py::test_{name}')
    assert (tmp_path / "out/summary.txt").read_text().splitlines() == lines[-2:]
    assert (tmp_path / "passes").read_text() == "x"


def test_one_of_two_that_fail_twice(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + BY_CHANCE + TWICE)
    assert code == 1
    kinds = [line.partition(" ")[0] for line in lines[-6:]]
    assert [kind for kind in kinds if kind] == ["FLAKY", "FLAKY", "FAILED"]


def test_a_run_that_pytest_could_not_finish_fails(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + "raise RuntimeError('at import')\n")
    assert code == pytest.ExitCode.INTERRUPTED
    assert not any("once more" in line for line in lines)
    code, _ = lines_of(tmp_path, SUITE, "-k", "nothing")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_file_that_a_worker_cannot_import_fails_twice(tmp_path: Path) -> None:
    code, lines = lines_of(tmp_path, SUITE + "raise RuntimeError('at import')\n", "-n", "1")
    assert code == 1
    assert lines[-2] == "FAILED test_suite.py"


@pytest.mark.parametrize("by_chance", [True, False])
def test_what_leaves_something_behind_has_failed(tmp_path: Path, by_chance: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    code, lines = lines_of(tmp_path, SUITE + TWICE + FAILING.format(by_chance=by_chance))
    assert code == 1
    kind = "FLAKY" if by_chance else "FAILED"
    assert [line for line in lines[-4:] if line.startswith(("F", "f"))] == [
        f"{kind} test_suite.py::test_left",
        "FAILED test_suite.py::test_wrong",
    ]


GUARDED = f"""
import sys
sys.path[:0] = {list(map(str, HELPERS))!r}
import left_behind, pathlib

left_behind.NAMESPACES = pathlib.Path(__file__).with_name("namespaces")
left_behind.NAMESPACES.mkdir(exist_ok=True)

def pytest_configure(config):
    left_behind.own_temporary_folder(config)
    config.pluginmanager.register(left_behind.LeftBehind(descriptors=80))
"""
LEAVING = """
import os, subprocess, tempfile, left_behind, pytest
kept = []

def test_nothing(tmp_path):
    with tempfile.TemporaryDirectory(), open(os.devnull):
        (tmp_path / "mine").touch()
        subprocess.run(["true"])
        kept.append(tempfile.TemporaryDirectory())  # removed at the end
        [os.close(each) for each in [os.dup(0) for _ in range(100)]]
"""
LEFTOVERS = {
    "a_process": ('kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))', "cat"),
    "one_that_ended": ('kept.append(os.posix_spawnp("true", ["true"], {}))', "it has ended"),
    "a_file": ("kept.append(tempfile.mkdtemp(prefix='mine-'))", "temporary files mine-"),
    "a_namespace": (
        'name = f"bed-{os.getpid()}-h0"; (left_behind.NAMESPACES / name).touch()',
        "the namespace bed-",
    ),
    "descriptors": ("kept.extend(os.pipe() for _ in range(50))", " pipe)"),
}
LAST = """
def test_last():
    pass
"""


def leftovers_of(folder: Path, suite: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code of a run of a file of tests, and its lines about what was left."""
    (folder / "conftest.py").write_text(GUARDED)
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=environment_of({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    output = done.stdout + done.stderr
    start = output.find("left behind by tests")
    return done.returncode, output[start:].splitlines()[1:] if start >= 0 else []


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_a_run_that_leaves_nothing_passes(tmp_path: Path, arguments: list[str]) -> None:
    assert leftovers_of(tmp_path, LEAVING + LAST, *arguments) == (0, [])


@pytest.mark.parametrize("arguments", [[], ["-n", "1"]], ids=["alone", "worker"])
@pytest.mark.parametrize("what", LEFTOVERS)
def test_what_a_test_leaves_fails_the_run(tmp_path: Path, what: str, arguments: list[str]) -> None:
    body, says = LEFTOVERS[what]
    suite = f"{LEAVING}\ndef test_{what}():\n    {body}\n{LAST}"
    code, lines = leftovers_of(tmp_path, suite, *arguments)
    assert code == EXIT_CODE
    (line,) = [line for line in lines if says in line]
    assert f"test_suite.py::test_{what}" in line
    assert not any("test_nothing" in line or "test_last" in line for line in lines), lines


def test_what_a_failed_test_leaves_is_not_said(tmp_path: Path) -> None:
    body, _ = LEFTOVERS["a_process"]
    suite = f"{LEAVING}\ndef test_fails():\n    {body}\n    assert False\n{LAST}"
    assert leftovers_of(tmp_path, suite) == (pytest.ExitCode.TESTS_FAILED, [])


def test_a_run_that_did_not_come_to_its_end_keeps_its_code(tmp_path: Path) -> None:
    body, _ = LEFTOVERS["a_process"]
    suite = f"{LEAVING}\ndef test_ends():\n    {body}\n    pytest.exit('now')\n"
    code, _ = leftovers_of(tmp_path, suite)
    assert code == pytest.ExitCode.INTERRUPTED


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("factor", [2, 3])
def test_every_rank_has_the_arguments_and_one_group(factor: int, tmp_path: Path) -> None:
    found = torch.tensor([float(factor * dist.get_rank())])
    dist.all_reduce(found)
    assert found.item() == factor
    assert dist.get_world_size() == 2
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.on_ranks(2, hash_seeds=True)
def test_neighbours_have_different_hash_seeds() -> None:
    hashes = [0, 0]
    dist.all_gather_object(hashes, hash("a name"))
    assert hashes[0] != hashes[1]


@pytest.mark.on_ranks(2, hosts=2)
def test_each_rank_is_on_a_host_of_its_own() -> None:
    assert os.environ["LIGHTNING_DIST_HOSTNAME"] == f"host{dist.get_rank()}"


@pytest.mark.on_ranks(2)
def test_nothing_of_another_test_is_left() -> None:
    assert not {"LEFT_BY_A_TEST", "LIGHTNING_DIST_HOSTNAME"} & os.environ.keys()
    assert torch.rand(1, generator=None).item() == torch.rand(1, generator=torch.manual_seed(0))
    os.environ["LEFT_BY_A_TEST"] = "1"
    torch.set_default_dtype(torch.float64)


@pytest.mark.on_ranks(2)
def test_nothing_of_another_test_is_left_here_either() -> None:
    test_nothing_of_another_test_is_left()


LEFT: list[dist.ProcessGroup] = []


@pytest.mark.on_ranks(2)
def test_groups_that_are_left() -> None:
    assert not LEFT
    LEFT.extend(dist.new_group() for _ in range(12))


@pytest.mark.on_ranks(2)
def test_groups_that_are_left_end_with_their_world() -> None:
    assert not LEFT


@pytest.mark.on_ranks(2, limit=300)
def test_limits_of_a_world_come_first(limit_of_pytest: float) -> None:
    assert limit_of_pytest > START_LIMIT + 300 + SPARE


@pytest.fixture
def limit_of_pytest(request: pytest.FixtureRequest) -> float:
    (limit,) = request.node.get_closest_marker("timeout").args
    return float(limit)


CASES = """
    import os, signal, time
    import pytest, torch.distributed as dist

    @pytest.mark.on_ranks(2)
    def test_one_rank():
        assert dist.get_rank() * 2 == 0

    @pytest.mark.on_ranks(2)
    def test_others_wait():
        if dist.get_rank() == 1:
            raise KeyError("planted")
        dist.barrier()

    @pytest.mark.on_ranks(2)
    def test_skips():
        pytest.skip("for a reason")

    @pytest.mark.on_ranks(2)
    def test_ends():
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.on_ranks(2, limit=3)
    def test_hangs():
        time.sleep(1000 * dist.get_rank())

    @pytest.mark.on_ranks(2)
    def test_passes():
        dist.barrier()
"""


def test_failures_name_the_ranks_and_the_next_test_has_a_new_world(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(textwrap.dedent(CASES))
    words = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "conftest", "-n", "0"]
    words += [
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=" + " ".join(map(str, (ROOT, ROOT / "tests", *HELPERS))),
        "-rs",
    ]
    found = run([sys.executable, "-m", "pytest", *words, tmp_path], limit=150)
    assert found.returncode == 1, found.output
    assert "4 failed, 1 passed, 1 skipped" in found.output
    assert "LEFT" not in found.output
    for says in (
        "assert (1 * 2) == 0",
        "on rank 1: Traceback",
        "KeyError: 'planted'",
        "for a reason",
        "this rank has ended",
        "about to end",
        "in test_hangs",
    ):
        assert says in found.output, (says, found.output)
