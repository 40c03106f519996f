"""Runs of several processes: started, waited for with a limit, and none left behind."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

Command = Sequence[str | Path]
ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
HELPERS = (Path(__file__).parent, SUPPORT)
"""Folders of what scripts of tests import; beside the one that a script lies in."""


@dataclass(frozen=True)
class Finished:
    """What is left of a process. ``returncode`` is None where it ran into the limit."""

    returncode: int | None
    output: str
    seconds: float

    def require_success(self) -> Finished:
        assert self.returncode == 0, (
            f"exit code {self.returncode} after {self.seconds:.0f} s (None: killed at the limit)\n"
            + self.output[-6000:]
        )
        return self


def run(command: Command, *, limit: float, **environment: str) -> Finished:
    """Run one process, and whatever it starts, for at most ``limit`` seconds."""
    (finished,) = run_together([command], [environment], limit=limit)
    return finished


def run_together(
    commands: Sequence[Command], environments: Sequence[Mapping[str, str]], *, limit: float
) -> list[Finished]:
    """Run processes side by side; at the limit all of them are killed.

    The output of each has what its children have written until the last process ended.
    """
    start, ended = time.monotonic(), []
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = []
        for command, environment, log in zip(commands, environments, logs, strict=True):
            processes.append(_start(command, environment, log))
            stack.callback(kill_process, processes[-1])
        for process in processes:
            code = _code_of(process, limit=start + limit - time.monotonic())
            ended.append((code, time.monotonic() - start))
        finished = []
        for (code, seconds), log in zip(ended, logs, strict=True):
            log.seek(0)
            finished.append(Finished(code, log.read().decode(errors="replace"), seconds))
    return finished


def torchrun(
    script: Path,
    *arguments: str | Path,
    ranks: int,
    limit: float,
    python: Sequence[str] | None = None,
) -> Finished:
    """``torchrun --nproc-per-node=ranks script arguments``.

    python: words that start it and the ranks, such as those of `forks.fork_server`; None: Python.
    """
    options = [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port()}"]
    launcher = [*(python or [sys.executable]), "-m", "torch.distributed.run", *options]
    starts = ["--no-python", *python] if python else []
    return run([*launcher, *starts, script, *arguments], limit=limit)


_BLOCKS = range(10_000, 29_000, 100)
_reserved: list[socket.socket] = []


def port() -> int:
    """A free port that no other process of the tests is given while this one lives.

    Below those that the kernel gives to whoever connects.
    """
    return next(_ports)


def _free_ports() -> Iterator[int]:
    """Blocks of ports are reserved: a descriptor for each port would be too many."""
    first = os.getpid() * 97  # processes side by side begin apart
    for number in itertools.count(first):
        block = _BLOCKS[number % len(_BLOCKS)]
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0lightning_dist-tests-{block}")  # an abstract name: no file
        except OSError:
            reservation.close()
            continue
        _reserved.append(reservation)
        yield from filter(_is_free, range(block, block + _BLOCKS.step))


def _is_free(number: int) -> bool:
    with socket.socket() as found, suppress(OSError):
        found.bind(("", number))
        return True
    return False


_ports = _free_ports()


def interpret_triton() -> None:
    """Run Triton's kernels in its interpreter unless GPUs are tested; before Triton is imported."""
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _start(
    command: Command, environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment_of(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, one thread, loopback, and where the package and helpers are."""
    found = find_spec("lightning_dist")  # it imports much, and a caller may be without
    assert found is not None
    assert found.origin is not None
    paths = [Path(found.origin).parents[1], *HELPERS, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
    }


def _code_of(process: subprocess.Popen[bytes], *, limit: float) -> int | None:
    """Exit code of a process once it has ended; None after ``limit`` seconds.

    It is not waited for: its number, and that of its session, could be another's soon.
    """
    handle = os.pidfd_open(process.pid)
    try:
        if not readable(handle, max(0.0, limit)):
            return None
    finally:
        os.close(handle)
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it has started."""
    if _code_of(process, limit=0.0) is None:
        kill_tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process, its descendants in other sessions (torchrun's), and its own session.

    All of them are stopped first: a launcher that sees one of its workers end starts another.
    """
    for descendant in _stop_tree(pid):
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(descendant)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            readable(handle, 10)  # once it is gone
            os.close(handle)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def readable(descriptor: int, limit: float) -> bool:
    """Whether there is something to read, or the end, within ``limit`` seconds.

    (``select.select`` takes no descriptor above 1023, which a process of many tests may have.)
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * limit))


def _stop_tree(pid: int) -> list[int]:
    """Stop a process and its descendants; those."""
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
        return [found for child in children for found in (child, *_stop_tree(child))]
    return []
