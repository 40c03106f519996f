"""A worker whose imports are recorded, and a process that makes the same and forks workers.

    python -u fork_server.py record JOURNAL COMMAND...
    python -u fork_server.py serve PLAN SOCKET COMMAND...

``COMMAND`` is the script, or ``-m`` and a module, and its arguments. ``JOURNAL`` is the path of a
file of JSON lines that a worker appends to, ``PLAN`` that of one that the launcher makes of the
journals of all workers (:class:`~lightning_dist.elastic.launcher.forks.WorkerStarts`); ``SOCKET``
is the descriptor of a socket of packets to the launcher. This file is run by its path and imports
the standard library only, so that ``sys.path`` is that of the script before any other module is
imported.

Only modules of installed packages are imported ahead. Some of what packages may read while they
are imported is recorded with them, and the server has the same when it imports them: variables that
the script has set, the folder, and whether the root logger has handlers.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import signal
import site
import socket
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "LIGHTNING_DIST_RECOVERY_STORE",
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
_ONCE_MORE = 30
"""Modules in a row that were imported again, after which no new one is looked for."""


def main() -> None:
    """Run a command, and record its imports; or serve forks that do."""
    kind, path, *words = sys.argv[1:]
    command = words if kind == "record" else words[1:]
    _set_path(command)
    if kind == "record":
        _record(path)
        _run(command)
        return
    channel = socket.socket(fileno=int(words[0]))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forks do not inherit it
    _serve(channel, Imports(path))


def prctl(option: int, value: int) -> None:
    """Linux' call of that name.

    Raises:
        OSError: it has failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _set_path(command: Sequence[str]) -> None:
    """Let this process look as if it ran ``command``."""
    is_module = command[0] == "-m"
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    sys.argv = [*(command[1:] if is_module else command)]
    sys.orig_argv = [sys.executable, "-u", *command]
    if not is_module:
        sys.modules["__main__"].__file__ = os.path.abspath(command[0])


# In a worker.


def _run(command: Sequence[str]) -> None:
    """Run ``command`` as Python does."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        code = _code_of(command, main)
        exec(code, main.__dict__)
    except Exception as error:
        _leave(error)
        raise


def _code_of(command: Sequence[str], main: types.ModuleType) -> types.CodeType:
    """Code to run in ``main``, which gets the attributes that Python gives it."""
    if command[0] == "-m":
        name = command[1]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or spec.loader is None or spec.origin is None:
            raise SystemExit(f"{sys.executable}: No module named {name}")
        loader: Any = spec.loader
        sys.argv[0] = path = spec.origin
        main.__spec__, main.__package__, cached = spec, spec.parent, spec.cached
        code: types.CodeType = loader.get_code(spec.name)
    else:
        path, cached = os.path.abspath(command[0]), None
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    values = {"__file__": path, "__loader__": loader, "__cached__": cached}
    main.__dict__.update(values, __builtins__=builtins)
    return code


def _leave(error: Exception) -> None:
    """Leave an exception of a script that restarts to the launcher, if nobody has done it."""
    outcomes = sys.modules.get(f"{_PACKAGE}.elastic.process.outcome")
    failures = sys.modules.get(f"{_PACKAGE}.ranks.failures")
    if outcomes is not None and failures is not None:
        is_echo = failures.is_of_collective(error)
        outcome = outcomes.Outcome.of(error, step=None, is_echo=is_echo)
        outcome.write(error, replaces=False)


def _record(path: str) -> None:
    with suppress(OSError):  # its launcher may have ended
        sys.meta_path.insert(0, Recorder(path))


class Recorder:
    """A finder that finds nothing, and records what has been imported.

    Args:
        path: of the file to append to.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._inode, self._worker = os.fstat(self._journal).st_ino, os.getpid()
        self._known = {*sys.modules}
        self._begun: list[str] = []  # modules that are being imported
        self._environment, self._facts = dict(os.environ), facts()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Note what was imported since the last call, and the state in which ``name`` will be."""
        if os.getpid() != self._worker:  # a child, such as a worker of a DataLoader
            return
        # Nobody's import fails because it cannot be recorded: the server imports less then.
        with suppress(Exception):
            lines: list[dict[str, Any]] = self._ended_imports()
            if not any(is_installed(each) for each in self._begun):
                # What packages change while they are imported they change in the server too.
                lines += self._changes()
            lines.append({"looked": name})
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            if os.fstat(self._journal).st_ino == self._inode:  # nobody has closed it
                os.write(self._journal, text.encode())

    def _ended_imports(self) -> list[dict[str, Any]]:
        """Names and files of modules whose imports have ended since the last call."""
        names, in_a_row = list[str](), 0
        for name in reversed(sys.modules):  # the newest first, but for those that came once more
            in_a_row = in_a_row + 1 if name in self._known else 0
            if in_a_row > _ONCE_MORE:
                break
            if not in_a_row:
                names.append(name)
        self._known.update(names)
        begun, self._begun = [*self._begun, *reversed(names)], []
        ended = []
        for name in begun:
            spec = spec_of(sys.modules.get(name))  # None where its import has failed
            if getattr(spec, "_initializing", False):
                self._begun.append(name)
            elif origin := file_of(name):
                line = {"module": name, "origin": origin, "installed": is_installed(name)}
                ended.append(line)
        return ended

    def _changes(self) -> list[dict[str, Any]]:
        """Changes that the script has made to state that packages read at their import."""
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


_FOLDERS = (*site.getsitepackages(), site.getusersitepackages())
_INSTALLED = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
# Others are on PYTHONPATH, as clusters have them, or are named by a file of another one.
_ELSEWHERE = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STANDARD = f"{os.path.dirname(os.__file__)}{os.sep}"


def file_of(name: str) -> str:
    """The file of a module that is not of the standard library; empty for others."""
    spec = spec_of(sys.modules.get(name))
    if not getattr(spec, "has_location", False):
        return ""
    assert spec is not None
    origin = os.path.abspath(str(spec.origin))
    return "" if origin.startswith(_STANDARD) and not _is_of_packages(origin) else origin


def _is_of_packages(origin: str) -> bool:
    return origin.startswith(_INSTALLED) or any(folder in origin for folder in _ELSEWHERE)


def is_installed(name: str) -> bool:
    """Whether a module belongs to an installed package, or to this one in a checkout."""
    return _is_of_packages(file_of(name)) or name.partition(".")[0] == _PACKAGE


def facts() -> dict[str, Any]:
    """State of a process that packages read when they are imported, beside its environment."""
    folder = ""
    with suppress(OSError):  # it has been removed
        folder = os.getcwd()
    return {"folder": folder, "logs": bool(logging.root.handlers)}


# In the server.


def _serve(channel: socket.socket, imports: Imports) -> None:
    """Import the modules of a plan, and fork a worker per request, which runs its command."""
    while (request := _receive(channel)) is not None:
        message, files = request
        if "until" in message:
            answer = (imports.read(**message) or reason_not_to_fork()).encode() or READY
        elif (worker := _fork()) == 0:
            channel.close()
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
        message, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
    except ConnectionResetError:  # it has never looked whether this process is ready
        return None
    return (json.loads(message), files) if message else None


class Imports:
    """The modules of a plan, imported here.

    Args:
        path: of the file with the plan.
    """

    def __init__(self, path: str) -> None:
        self.environment: dict[str, str | None] = {}
        """Variables that packages have set when they were imported; None: removed."""
        self._path, self._done = path, 0
        self._set: set[str] = set()  # variables that the script has set
        self._handler = logging.NullHandler()
        self._reads: dict[str, str] = {}

    def read(self, until: int) -> str:
        """Import what the plan has up to a position; why a fork would be wrong, or nothing.

        Its last line has what workers have imported (``known``: files by name) or looked for.
        """
        with open(self._path, "rb") as file:
            file.seek(self._done)
            *lines, recorded = map(json.loads, file.read(until - self._done).splitlines())
        self._done, before = until, {*sys.modules}
        why = self._follow(lines) or self._difference(before, **recorded)
        logging.root.removeHandler(self._handler)
        gc.collect()
        # The collector would write to pages that workers share with this process, and look for
        # garbage at the end of each, which takes a second with all that torch imports.
        gc.freeze()
        return why

    def _follow(self, lines: Iterable[dict[str, Any]]) -> str:
        failed: dict[str, BaseException] = {}
        with self._reads_noted():
            for line in lines:
                what = line.get("module", "the folder of the script")
                try:
                    if "environment" in line:
                        self._put(**line)
                    elif what not in sys.modules:
                        self._import(what)
                except BaseException as error:
                    failed[what] = error
                    # One that is not found by itself may be by the module that has imported it,
                    # which extends the path before and comes later, as setuptools does.
                    if not isinstance(error, ModuleNotFoundError):
                        break
        for what, why in failed.items():
            if what not in sys.modules:
                return f"{what} raised {type(why).__name__} when it was imported: {why}"
        return ""

    def _put(self, *, environment: Mapping[str, str | None], folder: str, logs: bool) -> None:
        """Let this process have the state that the script had."""
        self._set |= {key for key, value in environment.items() if os.environ.get(key) != value}
        put(environment)
        os.chdir(folder)
        logging.root.removeHandler(self._handler)
        if logs:
            logging.root.addHandler(self._handler)

    def _import(self, name: str) -> None:
        before = dict(os.environ)
        importlib.import_module(name)
        self.environment |= differences(before, os.environ)

    def _difference(
        self, before: set[str], *, known: Mapping[str, str], looked: Sequence[str]
    ) -> str:
        """Reason why these imports may differ from those of a worker; empty if there is none."""
        for name in [*sys.modules]:
            if name in before or not (origin := file_of(name)):
                continue
            if not is_installed(name):
                return f"an installed package imports {name}, which is not installed"
            if known.get(name, origin) != origin:
                return f"{name} is {origin}, and {known[name]} in the script"
            if name not in known and name not in looked:
                return f"{name} is imported here, and not in the script"
        if both := sorted(self._set & self.environment.keys()):
            return f"the script and a package that it imports set {', '.join(both)}"
        return "; ".join(
            f"{module} reads {key} at its import" for key, module in self._reads.items()
        )

    @contextmanager
    def _reads_noted(self) -> Iterator[None]:
        """Note who reads what differs between workers."""
        kind: Any = type(os.environ)
        usual, reads = kind.__getitem__, self._reads

        def read(environment: Any, key: str) -> Any:
            if key in OF_ONE_WORKER:
                frame: Any = inspect.currentframe()
                frame = frame.f_back
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
    journal: str,
    files: list[int],
    imported: Mapping[str, str | None],
) -> None:
    """Run ``command`` in a fork, whose imports are recorded from here on.

    Args:
        imported: variables that packages have set when they were imported.
    """
    stdout, stderr, start = files
    if not os.read(start, 1):  # the launcher has given this worker up
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    put(imported)
    os.chdir(folder)
    importlib.invalidate_caches()
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
