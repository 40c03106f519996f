"""A process that has imported what takes long, and forks.

    python fork_server.py DESCRIPTOR MODULE...

The descriptor is a socket that listens. A fork does what ``fork_client.py`` was told, as that
process would: with its words, variables, folder, parent, open files and namespaces. It ends as a
script does, but for modules that are taken apart only if TAKEN_APART is set: that takes longer than
most scripts. Its modules and its hash seed are those of this process. At the end of its input this
ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from processes import interpret_triton, kill_tree

REQUEST_BYTES = 1 << 20  # variables are most of it
FILES = ("stdin", "stdout", "stderr", "net", "mnt")


@dataclass(frozen=True)
class Request:
    """What a client wants to be done in its place.

    Args:
        words: what follows ``python`` in its command line: a script, ``-m module`` or ``-c code``,
            and arguments.
        client: its process, whose parent is that of the fork too.
        files: descriptors here of its `FILES`.
    """

    words: list[str]
    environment: dict[str, str]
    folder: str
    client: int
    files: tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """A process that does a request, and the client that waits for its end."""

    pid: int
    handle: int
    client: socket.socket

    def end(self) -> None:
        """Tell the client how it has ended, or end it if the client is gone."""
        if not select.select([self.handle], [], [], 0)[0]:
            kill_tree(self.pid)
            os.kill(self.pid, signal.SIGKILL)  # it may not lead a session yet
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it left behind, as processes.run does
        _, status = os.waitpid(self.pid, 0)
        with suppress(OSError):
            self.client.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.close()

    def close(self) -> None:
        os.close(self.handle)
        self.client.close()


def serve(listener: socket.socket) -> Request | None:
    """Returns a request in every process that is to do it, and None here, at the end."""
    forks: list[Fork] = []
    while True:
        waited_for = {key: fork for fork in forks for key in (fork.handle, fork.client)}
        ready, _, _ = select.select([listener, sys.stdin, *waited_for], [], [])
        is_last = sys.stdin in ready
        ended = [fork for fork in forks if is_last or {fork.handle, fork.client} & {*ready}]
        for fork in ended:
            fork.end()
        if is_last:
            return None
        forks = [fork for fork in forks if fork not in ended]
        if listener not in ready:
            continue
        client, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(client, REQUEST_BYTES, len(FILES))
        if not message:  # killed in between
            client.close()
            continue
        request = Request(**json.loads(message), files=tuple(files))
        assert len(os.listdir("/proc/self/task")) == 1, "a fork could find a lock that stays closed"
        if (pid := os.fork()) == 0:
            for other in forks:
                other.close()
            client.close()
            listener.close()
            return request
        for file in files:
            os.close(file)
        with suppress(OSError):
            client.send(str(pid).encode())
        forks.append(Fork(pid, os.pidfd_open(pid), client))


def do(request: Request) -> None:
    os.setsid()
    for number, file in enumerate(request.files[:3]):
        os.dup2(file, number)
    for name, file in zip(FILES[3:], request.files[3:], strict=True):
        _enter(f"/proc/self/ns/{name}", file)
    for file in request.files:
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # that of an import
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    _have_the_parent_of(request.client)
    _forget_what_was_drawn_or_read()
    _run(request.words)


def _enter(own: str, other: int) -> None:
    if os.stat(own).st_ino != os.fstat(other).st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(other, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {own} of the client")


def _have_the_parent_of(client: int) -> None:
    own, real = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != own:
            return real()  # of a worker of a DataLoader
        try:
            with open(f"/proc/{client}/stat") as stat:
                return int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return 1

    os.getppid = getppid


def _forget_what_was_drawn_or_read() -> None:
    """Of an import; the state of ``random`` is another one after every fork already."""
    import numpy as np

    np.random.seed()
    if rank_zero := sys.modules.get("lightning.fabric.utilities.rank_zero"):
        rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def _run(words: list[str]) -> None:
    first, *rest = words
    if first == "-u":  # of workers of tests, which open their files themselves
        _run(rest)
    elif first == "-m":
        sys.argv, sys.path = [rest[0], *rest[1:]], [os.getcwd(), *sys.path]
        sys.modules.pop(rest[0], None)  # or it is warned of a second one
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path = ["-c", *rest[1:]], ["", *sys.path]
        main: Any = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        folder = os.path.dirname(os.path.abspath(first))
        sys.argv, sys.path = words, [folder, *sys.path]
        runpy.run_path(first, run_name="__main__")


def _name_methods_quickly() -> None:
    """torch's agent asks `inspect.stack` who calls, at every step of a rendezvous.

    That looks for the modules of all frames, and there are thousands of modules here: most of what
    an agent has to compute.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def get_method_name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    assert callable(dynamic_rendezvous.get_method_name)
    dynamic_rendezvous.get_method_name = get_method_name


def _keep_the_folder_of_wandb() -> None:
    """One for all forks, removed with those of the tests: each fork that ends would remove it."""
    if private := sys.modules.get("wandb.sdk.data_types._private"):
        atexit.unregister(private.MEDIA_TMP.cleanup)
        private.MEDIA_TMP._finalizer.detach()


def end_now(code: int, imported: Iterable[weakref.finalize[..., Any]]) -> None:
    """End as a script does, without taking modules apart.

    Args:
        imported: finalizers that are left out, such as those of torch's operators: they write to
            many pages that are shared with the server, which takes as long as to fork.
    """
    for finalizer in imported:
        finalizer.atexit = False
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # None, or closed
            file.flush()
    os._exit(code)


def main() -> None:
    sys.path.pop(0)  # the folder of this script
    interpret_triton()
    for name in filter(find_spec, sys.argv[2:]):  # accelerate may be missing
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            getattr(module, public)  # some are imported when they are asked for
    _name_methods_quickly()
    _keep_the_folder_of_wandb()
    imported = [*weakref.finalize._registry]  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # pages that the collector does not write to are shared
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        os._exit(0)
    code = 0
    try:
        do(request)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if "TAKEN_APART" in os.environ:
        gc.unfreeze()  # or extension modules count what was never released, and tell
        sys.exit(code)
    end_now(code, imported)


if __name__ == "__main__":
    main()
