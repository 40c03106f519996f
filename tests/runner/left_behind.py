"""What tests leave behind fails the run, with the test's name.

These are processes that a worker of pytest has started and that are still there at its end, network
namespaces of its test-beds, files beside pytest's own in the folder for temporary ones, and more
descriptors than `DESCRIPTORS`. A worker looks after every test, so that it knows since which one
something is there, and judges at its end, when fixtures are torn down. What is there since a test
that has failed is no fault of its own.
"""

import gc
import getpass
import os
import re
import shutil
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

EXIT_CODE = 8
"""Of a run whose tests have left something behind; pytest's own are less."""
_FINISHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
"""Codes of runs that went to their end; the others say more than that something was left."""
DESCRIPTORS = 250
"""The most that a worker may have after a test, beside connections of the last world of threads."""
NAMESPACES = Path("/run/netns")
_OF_SESSION = ("fork_server.py", "multiprocessing.resource_tracker")
"""In the command lines of processes that end with the worker."""
_OF_OTHERS = re.compile(
    r"gw\d+$|pytest-of-|torchinductor_|pymp-|.*wandb-|"
    r"torchelastic_|pytorch-errorfile-|torch-shm-dir-|tmp\w{8}$"
)
"""In the folder for temporary files: folders of workers, pytest's, and that of compiled kernels,
what Python and wandb remove when the worker ends, what torch's launcher and shared memory leave
with every job, and folders without a name of their own, which Lightning's launcher leaves, and
wandb's in a rank that is killed."""

PROCESS, FILE = "the process", "in the folder for temporary files"

Thing = tuple[str, str]
"""Its kind, and its name."""


def own_temporary_folder(config: pytest.Config) -> None:
    """Have a folder for temporary files that nobody else uses, until the end of the run.

    A worker has one in that of the run. pytest's own folders and compiled kernels, which are kept
    from run to run, stay where they are.
    """
    root = tempfile.gettempdir()
    if hasattr(config, "workerinput"):
        folder = Path(root, config.workerinput["workerid"])
        folder.mkdir(exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="tests-"))
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    kernels = f"torchinductor_{getpass.getuser()}"
    Path(root, kernels).mkdir(exist_ok=True)
    with suppress(FileExistsError):
        Path(folder, kernels).symlink_to(Path(root, kernels))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


class LeftBehind:
    """A plugin of pytest, in its workers and in the process that has them."""

    def __init__(self, *, descriptors: int = DESCRIPTORS) -> None:
        self.lines: list[str] = []
        """What was left, of all workers."""
        self._limit = descriptors
        self._failed: set[str] = set()
        self._since: dict[Thing, str] = {}  # the test after which it was there; "" before the first
        self._descriptors: dict[str, str] = {}  # the same of their numbers
        self._is_over_limit = False

    def pytest_sessionstart(self) -> None:
        self._look("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        found = yield
        self._look(item.nodeid)
        if len(self._descriptors) > self._limit and not self._is_over_limit:
            gc.collect()
            if worlds := sys.modules.get("worlds"):
                worlds.shut_down_past_worlds()
            end = time.monotonic() + 5  # threads of gloo close what is shut down
            while len(self._descriptors) > self._limit and time.monotonic() < end:
                self._look(item.nodeid)
            if len(self._descriptors) > self._limit:
                self._is_over_limit = True
                self.lines += self._too_many(item.nodeid)
        return found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.getoption("tx", None):  # not the process that has workers
            gc.collect()
            self._look("a fixture or a thread", is_last=True)
            self.lines += self._left()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_behind"] = self.lines
        elif self.lines and session.exitstatus in _FINISHED:
            session.exitstatus = EXIT_CODE

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.lines += getattr(node, "workeroutput", {}).get("left_behind", [])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.lines:
            terminalreporter.section("left behind by tests")
            for line in self.lines:
                terminalreporter.line(f"LEFT {line}")

    def _left(self) -> Iterator[str]:
        removed = _removed_at_the_end()
        for (kind, name), test in self._since.items():
            if not test or test in self._failed or (kind == FILE and name in removed):
                continue
            if kind == PROCESS:
                command = _command(name)
                if any(each in command for each in _OF_SESSION):
                    continue
                name += f": {command[:200]}"
            yield f"{test} left {kind} {name}"

    def _look(self, test: str, *, is_last: bool = False) -> None:
        found = things(of_all_threads=is_last)
        self._since = {each: self._since.get(each, test) for each in found}
        numbers = os.listdir("/proc/self/fd")
        self._descriptors = {each: self._descriptors.get(each, test) for each in numbers}

    def _too_many(self, test: str) -> Iterator[str]:
        """The tests that have left most of them."""
        counts = Counter(since for since in self._descriptors.values() if since)
        found = len(self._descriptors)
        yield f"{test} ends with {found} descriptors, more than {self._limit}; most are there since"
        for since, count in counts.most_common(5):
            of_it = (number for number, at in self._descriptors.items() if at == since)
            kinds = Counter(filter(None, map(_kind, of_it))).items()
            yield f"  {since}: {count} ({', '.join(f'{n} {kind}' for kind, n in kinds)})"


def things(*, of_all_threads: bool = False) -> set[Thing]:
    """What is there now that a test could have left."""
    found = {(PROCESS, pid) for pid in _processes(of_all_threads=of_all_threads)}
    with suppress(FileNotFoundError):
        names = os.listdir(tempfile.gettempdir())
        own = (name for name in names if not _OF_OTHERS.match(name))
        found |= {(FILE, name) for name in own}
    with suppress(FileNotFoundError):
        of_this = f"-{os.getpid()}-"
        found |= {("the namespace", n) for n in os.listdir(NAMESPACES) if of_this in n}
    return found


def _kind(descriptor: str) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]
    return ""  # it was for the list itself


def _processes(*, of_all_threads: bool) -> Iterator[str]:
    """Ids of the children of this process; after a test those of the main thread.

    Which has those of threads that have ended too: there may be hundreds of threads.
    """
    with suppress(ChildProcessError):  # there are none, which is known at once
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        for task in os.listdir("/proc/self/task") if of_all_threads else [os.getpid()]:
            with suppress(OSError):
                yield from Path(f"/proc/self/task/{task}/children").read_text().split()


def _removed_at_the_end() -> set[str]:
    """Names of folders of `TemporaryDirectory` objects that still live, such as wandb's."""
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    ready = [found for each in registry if (found := each.peek()) is not None]
    cleanup = tempfile.TemporaryDirectory._cleanup  # type: ignore[attr-defined]
    return {os.path.basename(arguments[0]) for _, call, arguments, _ in ready if call == cleanup}


def _command(pid: str) -> str:
    with suppress(OSError):
        if words := Path(f"/proc/{pid}/cmdline").read_text():
            return words.replace("\0", " ")
    return "it has ended, and nobody has waited for it"
