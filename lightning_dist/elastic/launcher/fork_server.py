"""A process that has imported the modules of a training, and forks its newcomers.

    python -u fork_server.py SOCKET COMMAND...

``SOCKET`` is the descriptor of a socket of packets to the launcher, ``COMMAND`` the script, or
``-m`` and a module, and its arguments. The launcher sends names of modules, and then a request per
worker (:class:`~lightning_dist.elastic.launcher.forks.ForkServer`). The process is run by its path
and imports the standard library only, so that ``sys.path`` is that of the script before any other
module is imported.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
import warnings
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from typing import Any

READY = b"ready"
MESSAGE_BYTES = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux' call of that name.

    Raises:
        OSError: it has failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main() -> None:
    """Import modules, and fork a worker per request; a worker returns when its script ends."""
    channel, command = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forks do not inherit it
    if not sys.flags.safe_path:
        is_module = command[0] == "-m"
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    for name in json.loads(channel.recv(MESSAGE_BYTES) or "[]"):
        with suppress(Exception):  # the worker will raise it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to pages that workers share with this process
    atexit.register(gc.unfreeze)  # or extension modules report leaks at the end
    why = _reason_not_to_fork()
    with suppress(ConnectionError):  # the launcher has ended
        channel.send(why.encode() or READY)
    if why:
        return
    while (request := _receive(channel)) is not None:
        message, files = request
        if (worker := _fork()) == 0:
            channel.close()
            _run(**json.loads(message), files=files)
            return
        channel.send(str(worker).encode())
        for file in files:
            os.close(file)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]] | None:
    """A request and its files; None when the launcher has ended."""
    try:
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
    except ConnectionResetError:  # it has never looked whether this process is ready
        return None
    return (message, files) if message else None


def _reason_not_to_fork() -> str:
    """Why a fork of this process could hang or fail; empty if it could not."""
    with warnings.catch_warnings():  # Python 3.12 warns of the threads that end by this fork
        warnings.simplefilter("ignore", DeprecationWarning)
        if (fork := os.fork()) == 0:
            os._exit(0)
    os.waitpid(fork, 0)  # OpenBLAS ends its threads before a fork, and starts them when needed
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"its imports started {threads - 1} threads"
    torch = sys.modules.get("torch")
    return "its imports initialized CUDA" if torch and torch.cuda.is_initialized() else ""


def _fork() -> int:
    """Fork a worker with a session of its own; returns its id, and 0 in the worker.

    The worker's parent ends at once, so the launcher, a subreaper meanwhile, becomes its parent.
    """
    read_end, write_end = os.pipe()
    if (between := os.fork()) == 0:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()
        os.write(write_end, str(os.getpid()).encode())
        os.close(read_end)
        os.close(write_end)
        return 0
    os.close(write_end)
    os.waitpid(between, 0)
    with open(read_end) as pipe:
        return int(pipe.read())


def _run(*, command: list[str], environment: dict[str, str], files: list[int]) -> None:
    """Run ``command`` as Python does, in a fork."""
    stdout, stderr, start = files
    if not os.read(start, 1):  # the launcher has given this worker up
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    _renew_imported_state()
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, "-u", *command]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, path = command, os.path.abspath(command[0])
    loader = SourceFileLoader("__main__", path)
    values = {"__file__": path, "__loader__": loader, "__cached__": None, "__builtins__": builtins}
    main.__dict__.update(values)
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _renew_imported_state() -> None:
    """Set what modules draw or read at their import, and that differs between workers."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded in every fork
    if rank_zero := sys.modules.get("lightning_utilities.core.rank_zero"):
        rank_zero.rank_zero_only.rank = int(os.environ["RANK"])


if __name__ == "__main__":
    main()
