"""A worker whose imports are recorded, and a process that has imported the same and forks workers.

    python -u fork_server.py record JOURNAL COMMAND...
    python -u fork_server.py serve JOURNAL SOCKET COMMAND...

``COMMAND`` is the script, or ``-m`` and a module, and its arguments. ``JOURNAL`` is the descriptor
of a file of JSON lines, which workers append and the server reads; ``SOCKET`` that of a socket of
packets to the launcher (:class:`~lightning_dist.elastic.launcher.forks.ForkServer`). The file is
run by its path and imports the standard library only, so that ``sys.path`` is that of the script
before any other module is imported.

Only modules of installed packages are imported ahead. What packages read while they are imported
is recorded with them (variables that the script has set, the folder, whether the root logger has
handlers), and the server has the same when it imports them.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import site
import socket
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

READY = b"ready"
MESSAGE_BYTES = 1 << 17
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OF_ONE_WORKER = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME", "LIGHTNING_DIST_WORKER"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables that differ between workers, or between starts."""
_RANK_ZERO = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules whose ``rank_zero_only`` keeps a rank from their import on, and the variable that it is.
"""
_READS_RANK = (
    *("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"),
    "torchmetrics.utilities.prints",
)
"""Modules that read it."""
_MAPPINGS = ("os", "collections.abc", "_collections_abc")
"""Modules through which variables are read."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs")
_PACKAGE = "lightning_dist"


def main() -> None:
    """Run a command, and record its imports; or serve forks that do."""
    kind, journal, *words = sys.argv[1:]
    if kind == "record":
        command = words
        _set_path(command)
        _record(int(journal))
        _run(command)
        return
    channel, command = socket.socket(fileno=int(words[0])), words[1:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forks do not inherit it
    _set_path(command)
    _serve(channel, Imports(int(journal)))


def prctl(option: int, value: int) -> None:
    """Linux' call of that name.

    Raises:
        OSError: it has failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _set_path(command: Sequence[str]) -> None:
    if not sys.flags.safe_path:
        is_module = command[0] == "-m"
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = [*(command[1:] if command[0] == "-m" else command)]


# In a worker.


def _run(command: Sequence[str]) -> None:
    """Run ``command`` as Python does."""
    # Python looks for garbage at its end, which takes a second with all that torch imports, and the
    # launcher waits for that second before it starts the workers that follow.
    atexit.register(gc.freeze)
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, "-u", *command]
    if command[0] == "-m":
        with _failures_left():
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(command[0])
    with _failures_left():
        _run_path(path)


@contextmanager
def _failures_left() -> Iterator[None]:
    """Leave exceptions of a script that restarts to the launcher, if nobody has done it."""
    try:
        yield
    except Exception as error:
        outcomes = sys.modules.get(f"{_PACKAGE}.elastic.process.outcome")
        if outcomes is not None:
            outcomes.Outcome.of(error, step=None).write(error)
        raise


def _run_path(path: str) -> None:
    main = sys.modules["__main__"]
    loader = SourceFileLoader("__main__", path)
    values = {"__file__": path, "__loader__": loader, "__cached__": None, "__builtins__": builtins}
    main.__dict__.update(values)
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)


def _record(journal: int) -> None:
    os.set_inheritable(journal, False)
    sys.meta_path.insert(0, Recorder(journal))


class Recorder:
    """A finder that finds nothing, and records which installed modules have been imported.

    Args:
        journal: descriptor of the file to append to.
    """

    def __init__(self, journal: int) -> None:
        self._journal, self._worker = journal, os.getpid()
        self._folders = (*site.getsitepackages(), site.getusersitepackages())
        self._known, self._packages = {*sys.modules}, set[str]()
        self._begun: list[str] = []  # installed modules that are being imported
        self._environment, self._facts = dict(os.environ), facts()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Note what was imported since the last call, and the state in which ``name`` will be."""
        if os.getpid() != self._worker:  # a child, such as a worker of a DataLoader
            return
        # Nobody's import fails because it cannot be recorded: the server imports less then.
        with suppress(Exception):
            lines = [{"name": name, "origin": origin} for name, origin in self._ended_imports()]
            if (package := name.partition(".")[0]) not in self._packages:
                self._packages.add(package)
                lines += self._changes()
            if lines:
                text = "".join(f"{json.dumps(line)}\n" for line in lines)
                os.write(self._journal, text.encode())

    def _ended_imports(self) -> list[tuple[str, str]]:
        """Names and files of installed modules whose imports have ended since the last call."""
        names = []
        for name in reversed(sys.modules):
            if name in self._known:
                break
            names.append(name)
        self._known.update(names)
        begun, self._begun = [*self._begun, *reversed(names)], []
        ended = []
        for name in begun:
            spec = spec_of(sys.modules.get(name))  # None where its import has failed
            origin = str(getattr(spec, "origin", ""))
            if not self._is_installed(name, origin):
                continue
            if getattr(spec, "_initializing", False):
                self._begun.append(name)
            else:
                ended.append((name, origin))
        return ended

    def _is_installed(self, name: str, origin: str) -> bool:
        is_ours = name.partition(".")[0] == _PACKAGE  # installed or not
        return origin.startswith(self._folders) or (is_ours and origin.startswith(os.sep))

    def _changes(self) -> list[dict[str, Any]]:
        """What the script has changed of the state that packages read when they are imported."""
        if self._begun:  # what packages change themselves they change in the server too
            return []
        before, self._environment = self._environment, dict(os.environ)
        known, self._facts = self._facts, facts()
        variables = differences(before, self._environment)
        if not variables and self._facts == known:
            return []
        return [{"environment": variables, **self._facts}]


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that have changed, with their values; None: it was removed."""
    keys = before.keys() | after.keys()
    return {key: after.get(key) for key in keys if before.get(key) != after.get(key)}


def spec_of(module: Any) -> ModuleSpec | None:
    """The specification of a module, if it has one.

    Without the module's own access to attributes, which may import what it has left out.
    """
    try:
        spec: ModuleSpec | None = object.__getattribute__(module, "__dict__").get("__spec__")
    except AttributeError:
        return None
    return spec


def facts() -> dict[str, Any]:
    """State of a process that packages read when they are imported, beside its environment."""
    return {"folder": os.getcwd(), "logs": bool(logging.root.handlers)}


# In the server.


def _serve(channel: socket.socket, imports: Imports) -> None:
    """Import what the journal has, and fork a worker per request, which runs its command."""
    while (request := _receive(channel)) is not None:
        message, files = request
        if "until" in message:
            answer = (imports.read(**message) or reason_not_to_fork()).encode() or READY
        elif (worker := _fork()) == 0:
            channel.close()
            imports.close()
            _run_fork(**message, files=files, imported=imports.environment)
            return
        else:
            answer = str(worker).encode()
        for file in files:
            os.close(file)
        with suppress(ConnectionError):  # the launcher has ended
            channel.send(answer)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its files; None when the launcher has ended."""
    try:
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 4)
    except ConnectionResetError:  # it has never looked whether this process is ready
        return None
    return (json.loads(message), files) if message else None


class Imports:
    """The modules that a journal has, imported here.

    Args:
        journal: descriptor of the file to read.
    """

    def __init__(self, journal: int) -> None:
        self.environment: dict[str, str | None] = {}
        """Variables that packages have set when they were imported; None: removed."""
        self._journal, self._done = journal, 0
        self._handler = logging.NullHandler()
        self._reads: dict[str, str] = {}

    def read(self, until: int, variables: list[str]) -> str:
        """Import what the journal has up to a position; why a fork would be wrong, or nothing.

        Args:
            variables: those that workers may have set, and that are set here too.
        """
        text = os.pread(self._journal, until - self._done, self._done)
        self._done = until
        with self._reads_noted():
            for line in map(json.loads, text.splitlines()):
                if "environment" in line:
                    changed = line.pop("environment")
                    self._put({key: changed[key] for key in variables if key in changed}, **line)
                elif line["name"] not in sys.modules and (why := self._import(**line)):
                    return why
        logging.root.removeHandler(self._handler)
        gc.collect()
        gc.freeze()  # the collector would write to pages that workers share with this process
        return "; ".join(
            f"{module} reads {key} at its import" for key, module in self._reads.items()
        )

    def close(self) -> None:
        """Read no more."""
        os.close(self._journal)

    def _put(self, environment: Mapping[str, str | None], *, folder: str, logs: bool) -> None:
        """Let this process have the state that the script had."""
        put(environment)
        os.chdir(folder)
        logging.root.removeHandler(self._handler)
        if logs:
            logging.root.addHandler(self._handler)

    def _import(self, name: str, origin: str) -> str:
        """Import a module; why that is not what a worker has imported, or nothing."""
        before = dict(os.environ)
        try:
            module = importlib.import_module(name)
        except BaseException as error:
            return f"the import of {name} raised {type(error).__name__}: {error}"
        self.environment |= differences(before, os.environ)
        found = getattr(spec_of(module), "origin", None)
        return "" if found in (None, origin) else f"{name} is {found}, and {origin} in the script"

    @contextmanager
    def _reads_noted(self) -> Iterator[None]:
        """Note who reads what differs between workers."""
        kind: Any = type(os.environ)
        usual, reads = kind.__getitem__, self._reads

        def read(environment: Any, key: str) -> Any:
            if key in OF_ONE_WORKER:
                frame: Any = sys._getframe(1)
                while frame.f_globals.get("__name__") in _MAPPINGS:
                    frame = frame.f_back
                if (module := str(frame.f_globals.get("__name__"))) not in _READS_RANK:
                    reads[key] = module
            return usual(environment, key)

        kind.__getitem__ = read
        try:
            yield
        finally:
            kind.__getitem__ = usual


def put(environment: Mapping[str, str | None]) -> None:
    """Set variables of this process; None: remove it."""
    for key, value in environment.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def reason_not_to_fork() -> str:
    """Why a fork of this process could hang or fail; empty if it could not."""
    with warnings.catch_warnings():  # Python 3.12 warns of the threads that end by this fork
        warnings.simplefilter("ignore", DeprecationWarning)
        if (fork := os.fork()) == 0:
            os._exit(0)
    os.waitpid(fork, 0)  # OpenBLAS ends its threads before a fork, and starts them when needed
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"the imports of the script started {threads - 1} threads"
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return "the imports of the script initialized CUDA"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (path := os.readlink(f"/proc/self/fd/{name}")).startswith(_DEVICES):
                return f"the imports of the script opened {path}"
    return ""


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


def _run_fork(
    *,
    command: list[str],
    environment: dict[str, str],
    folder: str,
    files: list[int],
    imported: Mapping[str, str | None],
) -> None:
    """Run ``command`` in a fork, whose imports are recorded from here on.

    Args:
        imported: variables that packages have set when they were imported.
    """
    journal, stdout, stderr, start = files
    if not os.read(start, 1):  # the launcher has given this worker up
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in (stdout, stderr, start):
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    put(imported)
    os.chdir(folder)
    _renew_imported_state()
    _record(journal)
    _run(command)


def _renew_imported_state() -> None:
    """Set what modules draw or read at their import, and that differs between workers."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded in every fork
    for name, variable in _RANK_ZERO.items():
        only: Any = getattr(sys.modules.get(name), "rank_zero_only", None)
        if hasattr(only, "rank"):
            only.rank = int(os.environ[variable])


if __name__ == "__main__":
    main()
