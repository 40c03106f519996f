"""A rank that hangs beside stopped processes, with its launcher or after that one's death.

Usage: orphaned.py WAY, which is ``orphaned``, ``launched`` or ``forked``; it prints JSON: the exit
code of the rank, and the names of the stopped processes that were killed. ``listens``: the rank
does not hang, and its exit code is that of a process that was asked to stop.

The first process is a subreaper: children of a launcher that dies become its own.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

JOB, OTHER = {"TORCHELASTIC_RUN_ID": "job"}, {"TORCHELASTIC_RUN_ID": "another job"}
_PR_SET_CHILD_SUBREAPER = 36
EXIT_ASKED = 5


def stopped(environment: dict[str, str], **arguments: Any) -> subprocess.Popen[bytes]:
    """A process that has stopped."""
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    process = subprocess.Popen(command, env={**os.environ, **environment}, **arguments)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    return process


def was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Whether somebody has killed it: if not, it goes on and ends by itself."""
    process.send_signal(signal.SIGCONT)
    return process.wait() == -signal.SIGKILL


def rank(go: int) -> None:
    """Hang as soon as ``go`` has something to read."""
    from lightning_dist.elastic.process.watchdog import Watchdog

    os.environ.update(JOB)  # as a fork does, whose first environment is that of its parent
    watchdog = Watchdog(0.2)
    print("watches", flush=True)
    os.read(go, 1)
    watchdog.start()
    ctypes.CDLL(None).pause()


def listener(go: int) -> None:
    """Stop when asked to."""
    from lightning_dist.elastic.history import RunHistory
    from lightning_dist.elastic.process.lifecycle import ProcessLifecycle
    from lightning_dist.settings.run import RunSettings

    os.environ.update(JOB)
    lifecycle, asked = ProcessLifecycle(RunSettings("nowhere"), RunHistory()), threading.Event()
    lifecycle.open()
    lifecycle.note((), asks=False, on_notice=asked.set)
    print("watches", flush=True)
    os.read(go, 1)
    asked.wait()
    os._exit(EXIT_ASKED if "launcher" in lifecycle.reason else 1)


def start_rank(
    go: int, environment: dict[str, str] = JOB, *, role: str = "rank"
) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, role, str(go)]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, pass_fds=[go], stdout=subprocess.PIPE
    )


def launcher(go: int, role: str = "rank") -> None:
    """Start a rank and die when it watches."""
    process = start_rank(go, role=role)
    assert process.stdout is not None
    process.stdout.readline()
    print(process.pid, flush=True)
    os._exit(0)


def listens() -> dict[str, Any]:
    return orphaned("listener")


def orphaned(role: str = "rank") -> dict[str, Any]:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stranger = stopped(JOB)  # of a job of the same name, as torchrun's default is one
    go, say = os.pipe()
    command = [sys.executable, __file__, "launcher", str(go), role]
    died = subprocess.run(command, pass_fds=[go], stdout=subprocess.PIPE, check=True)
    os.write(say, b"x")
    _, status = os.waitpid(int(died.stdout), 0)
    killed = ["stranger"] if was_killed(stranger) else []
    return {"code": os.waitstatus_to_exitcode(status), "killed": killed}


def launched() -> dict[str, Any]:
    others = {"rank": stopped(JOB), "of another job": stopped(OTHER), "of none": stopped({})}
    return hang_beside(others, JOB)


def forked() -> dict[str, Any]:
    """No environment shows a job. The parent of all may fork ranks of several."""
    others = {"rank": stopped({}), "of another job": stopped({}, start_new_session=True)}
    return hang_beside(others, {})


def hang_beside(
    others: dict[str, subprocess.Popen[bytes]], environment: dict[str, str]
) -> dict[str, Any]:
    go, say = os.pipe()
    process = start_rank(go, environment)
    os.write(say, b"x")
    process.wait()
    return {"code": process.returncode, "killed": [n for n, p in others.items() if was_killed(p)]}


if __name__ == "__main__":
    way, *rest = sys.argv[1:]
    roles: dict[str, Callable[..., Any]] = {
        "rank": rank,
        "listener": listener,
        "launcher": launcher,
    }
    ways = {"orphaned": orphaned, "launched": launched, "forked": forked, "listens": listens}
    if way in roles:
        go, *more = rest
        roles[way](int(go), *more)
    else:
        print(json.dumps(ways[way]()))
