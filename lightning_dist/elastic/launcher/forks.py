"""Starts of the workers of a launcher: forks of one process, which has imported their modules."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.launcher import PRELOAD, fork_server
from lightning_dist.elastic.launcher.fork_server import (
    MESSAGE_BYTES,
    OF_ONE_WORKER,
    PR_SET_CHILD_SUBREAPER,
    READY,
    prctl,
)

log = get_logger(__name__)

IMPORT_SECONDS, FORK_SECONDS = 60.0, 5.0
"""Time limits of the server: to import, and to fork."""
QUIET_SECONDS = 3.0
"""Time without an import in any worker, after which the server imports what they have imported."""
_ENDED = "it has ended"
_DEVICES = "_VISIBLE_DEVICES"


def reason_for_usual_starts(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Why workers with ``command`` cannot be forks; empty if they can."""
    if environ.get(PRELOAD) == "0":
        return f"{PRELOAD}=0"
    if sys.platform != "linux":
        return f"forks need Linux, and this is {sys.platform}"
    if tuple(command[:2]) != (sys.executable, "-u"):
        return f"they run `{shlex.join(command[:2])}`, not a script in {sys.executable}"
    script = command[2]
    if script != "-m" and (not os.path.isfile(script) or _is_archive(script)):
        return f"{script} is no source file"
    return ""


def _is_archive(path: str) -> bool:
    return path.endswith(".pyc") or zipfile.is_zipfile(path)


class WorkerStarts:
    """Starts of the workers of one launcher.

    First workers are processes of their own, whose imports are recorded. When they import nothing
    any more a server imports the same, and all that are started later are its forks.
    """

    _last: tuple[Sequence[str], Mapping[str, str]]

    def __init__(self) -> None:
        self._usual: str | None = None  # the reason for usual starts; None: not known yet
        # They lie in no folder, so that nothing is left of them where this process is killed.
        # Others open them by their paths in /proc.
        self._files: list[IO[bytes]] = []
        self._journals: dict[int, str] = {}  # paths by local rank
        self._plan_file = ""
        self._server: ForkServer | None = None
        self._sizes: dict[int, int] = {}  # bytes of each journal
        self._changed = 0.0  # the last time that one of them grew
        self._planned: dict[int, int] = {}  # bytes of which the server knows
        self._plan = Plan()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        local_rank: int,
        outputs: Sequence[int],
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """A worker.

        Args:
            outputs: descriptors of its stdout and stderr.
        """
        if self._usual is None:
            self._usual = reason_for_usual_starts(command) or self._reason_without_plan()
            if self._usual and os.environ.get(PRELOAD) != "0":
                log.warning("launch: workers cannot be forks: %s", self._usual)
        self._last = command, environment
        words = [*command]
        if not self._usual and (journal := self._journal_of(local_rank)):
            if self._server is not None and (
                forked := self._server.start(command, environment, journal, outputs=outputs)
            ):
                return forked
            python, unbuffered, *script = command
            words = [python, unbuffered, fork_server.__file__, "record", journal, *script]
        stdout, stderr = outputs
        return subprocess.Popen(
            words, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )

    def _new_file(self) -> str:
        self._files.append(tempfile.TemporaryFile())  # noqa: SIM115
        return f"/proc/{os.getpid()}/fd/{self._files[-1].fileno()}"

    def _reason_without_plan(self) -> str:
        try:
            self._plan_file = self._new_file()
        except OSError as error:
            return f"the launcher has no place for temporary files: {error}"
        return ""

    def _journal_of(self, local_rank: int) -> str:
        with suppress(OSError):  # a worker that is not recorded is started as usual
            if local_rank not in self._journals:
                self._journals[local_rank] = self._new_file()
        return self._journals.get(local_rank, "")

    def look(self) -> None:
        """Let the server import what workers have imported, if that is more and they are quiet.

        To be called again and again while they run.
        """
        if self._usual or (self._server and self._server.is_closed):
            return
        sizes = {rank: _size_of(path) for rank, path in self._journals.items()}
        now = time.monotonic()
        if sizes != self._sizes:
            self._sizes, self._changed = sizes, now
        if now - self._changed < QUIET_SECONDS or sizes == self._planned or not any(sizes.values()):
            return
        if self._server is None:
            self._server = ForkServer(*self._last, plan=self._plan_file)
        if self._server.is_busy or self._server.is_closed:
            return
        self._planned = sizes
        journals = [lines_of(path) for path in self._journals.values()]
        self._server.read(self._plan.next_lines(journals))

    @property
    def are_late(self) -> bool:
        """Whether the server still imports: a worker that waits for it starts sooner."""
        return self._server is not None and self._server.is_busy

    def close(self) -> None:
        """End the server; the workers go on."""
        if self._server is not None:
            self._server.end()
        self._journals.clear()
        while self._files:
            self._files.pop().close()


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it has not begun
        return 0


Line = dict[str, Any]


def lines_of(path: str) -> list[Line]:
    """The lines of a journal; without a last one that is being written."""
    lines = []
    with suppress(OSError, ValueError), open(path) as file:
        for text in file:
            lines.append(json.loads(text))
    return lines


class Plan:
    """Imports that all workers of a launcher have made in one state of their processes.

    A worker may set a variable to a value of its own. What it imports after that is not imported
    ahead. But for the devices that it may see: those are read when one is first used.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._states = 0  # that were sent

    def next_lines(self, journals: Sequence[Sequence[Line]]) -> list[Line]:
        """Lines that are new, and one with all that the workers have imported or looked for."""
        lines: list[Line] = []
        parts = [_parts(journal) for journal in journals]
        for number, same in enumerate(zip(*parts, strict=False)):
            states = [state for state, _ in same]
            if any(state != states[0] for state in states):
                break
            if states[0] is not None and number > self._states:
                lines.append(states[0])
                self._states = number
            if number < self._states:  # its state is over in the server
                continue
            common = set[str].intersection(*({*modules} for _, modules in same))
            lines += [
                {"module": name} for name in same[0][1] if name in common and name not in self._sent
            ]
            self._sent |= common
        every = [line for journal in journals for line in journal]
        known = {line["module"]: line["origin"] for line in every if "module" in line}
        looked = sorted({line["looked"] for line in every if "looked" in line})
        return [*lines, {"known": known, "looked": looked}]


def _parts(journal: Sequence[Line]) -> list[tuple[Line | None, list[str]]]:
    """States of a worker, the first of which is that of its start, and installed modules that it
    has imported in each.
    """
    parts: list[tuple[Line | None, list[str]]] = [(None, [])]
    for line in journal:
        if "environment" in line:
            variables = line["environment"]
            rest = {key: variables[key] for key in variables if not key.endswith(_DEVICES)}
            parts.append(({**line, "environment": rest}, []))
        elif line.get("installed"):
            parts[-1][1].append(line["module"])
    return parts


class ForkServer:
    """The process that forks workers of this launcher, and ends with it.

    Forks are children of the launcher. They have environment, arguments and output of their own,
    and what differs from another start is what the imports leave, such as the hash seed. When the
    server fails, workers that it has forked go on, and others are started as usual.

    Args:
        command: of a worker, for which :func:`reason_for_usual_starts` knows none.
        environment: of a worker.
        plan: path of a file for what it imports.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, plan: str
    ) -> None:
        self.is_closed = False
        """It forks no more."""
        self._read_by: float | None = None  # a deadline; None: it imports nothing
        self._folder, self._plan = os.getcwd(), plan
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python, unbuffered, *script = command
        shared = {key: environment[key] for key in environment if key not in OF_ONE_WORKER}
        serve = [fork_server.__file__, "serve", plan, str(other.fileno())]
        with other:
            self.process = subprocess.Popen(
                [python, unbuffered, *serve, *script],
                env=shared,
                pass_fds=[other.fileno()],
                start_new_session=True,
                # Workers have written what imports write.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def read(self, lines: Sequence[Line]) -> None:
        """Begin to import what these lines of a :class:`Plan` say."""
        assert not self.is_busy
        self._read_by = time.monotonic() + IMPORT_SECONDS
        try:
            with open(self._plan, "a") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
            self._send({"until": os.stat(self._plan).st_size}, [])
        except OSError as error:
            self.close(str(error))

    @property
    def is_busy(self) -> bool:
        """Whether the server still imports."""
        if self.is_closed or self._read_by is None:
            return False
        self._channel.settimeout(0)
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            if time.monotonic() > self._read_by:
                self.close(f"it has not imported their modules in {IMPORT_SECONDS:g} s")
            return not self.is_closed
        except OSError as error:
            message = str(error).encode()
        self._read_by = None
        if message != READY:
            self.close(message.decode() or _ENDED)
        return False

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        journal: str,
        *,
        outputs: Sequence[int],
    ) -> ForkedProcess | None:
        """A worker; None where it has to be started as usual.

        A server that is late may still fork, therefore a worker waits until it is accepted.

        Args:
            journal: path of the file in which its imports are recorded.
            outputs: descriptors of its stdout and stderr.
        """
        while self.is_busy:
            time.sleep(0.01)
        if self.is_closed:
            return None
        request = {
            "command": [*command[2:]],
            "environment": dict(environment),
            "folder": self._folder,
            "journal": journal,
        }
        accepted, accept = os.pipe()
        try:
            with _subreaper():
                self._channel.settimeout(FORK_SECONDS)
                self._send(request, [*outputs, accepted])
                if not (worker := self._channel.recv(MESSAGE_BYTES)):
                    raise BrokenPipeError
                os.write(accept, b"1")
            return ForkedProcess(int(worker))
        except OSError as error:
            self.close(_ENDED if isinstance(error, BrokenPipeError) else str(error))
            return None
        finally:
            os.close(accepted)
            os.close(accept)

    def _send(self, request: dict[str, Any], files: list[int]) -> None:
        message = json.dumps(request).encode()
        if len(message) > MESSAGE_BYTES:
            raise OSError(f"the environment has more than {MESSAGE_BYTES} bytes")
        socket.send_fds(self._channel, [message], files)

    def close(self, reason: str) -> None:
        """Fork no more: workers are started as usual."""
        log.warning("launch: workers cannot be forks of one process: %s", reason)
        self.end()

    def end(self) -> None:
        """End the server's process."""
        if not self.is_closed:
            self.is_closed = True
            self.process.kill()
            self.process.wait()
            self._channel.close()


@contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans that appear inside become children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        with suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 0)


class ForkedProcess:
    """A child that another process has forked, as far as torch's agent uses a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # waited for, but a signal handler raised in between
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it runs still after ``timeout`` seconds.
        """
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code


class WorkerProcess(SubprocessHandler):
    """A worker of torch's agent, started by ours.

    Args:
        starts: of the workers of this launcher.
        appends: its output follows that of another worker in the same files.
        **others: as torch's handler takes them.
    """

    def __init__(
        self,
        *,
        starts: WorkerStarts,
        appends: bool = False,
        stdout: str | None,
        stderr: str | None,
        **others: Any,
    ) -> None:
        mode = "a" if appends else "w"
        self._files: list[Any] = [open(path, mode) if path else None for path in (stdout, stderr)]  # noqa: SIM115
        self._starts = starts
        super().__init__(stdout=None, stderr=None, **others)

    def _popen(self, args: Any, env: dict[str, str]) -> Any:
        self._stdout, self._stderr = self._files
        outputs = [
            file.fileno() if file else descriptor for descriptor, file in enumerate(self._files, 1)
        ]
        return self._starts.start(args, env, local_rank=self.local_rank_id, outputs=outputs)
