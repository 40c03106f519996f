"""Workers that the launcher starts as forks of one process, which has imported their modules."""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.launcher import fork_server
from lightning_dist.elastic.launcher.fork_server import (
    MESSAGE_BYTES,
    PR_SET_CHILD_SUBREAPER,
    READY,
    prctl,
)

log = get_logger(__name__)

START_SECONDS, FORK_SECONDS = 120.0, 5.0
"""Time limits of the server: to import, and to fork."""
_OF_ONE_WORKER = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE", "LIGHTNING_DIST_WORKER"),
)
_ENDED = "it has ended"


def installed_modules() -> list[str]:
    """Modules of installed packages that this process has imported, in their order.

    Not those of the user: to import them may have effects that belong into a worker.
    """
    folders = (*site.getsitepackages(), site.getusersitepackages())
    return [
        name
        for name, module in [*sys.modules.items()]
        if name.startswith("lightning_dist.")
        or str(getattr(module, "__file__", None)).startswith(folders)
    ]


def runs_python(command: Sequence[str]) -> bool:
    """Whether ``command`` is that of torchrun for a script or a module of Python."""
    python = os.getenv("PYTHON_EXEC", sys.executable)
    return sys.platform == "linux" and tuple(command[:2]) == (python, "-u")


class ForkServer:
    """The process that forks newcomers of this launcher, and ends with it.

    Forks are children of the launcher. They have environment, arguments and output of their own,
    and what differs from another start is what the imports leave, such as the hash seed. When the
    server fails, workers that it has forked go on, and others are started as usual.

    Args:
        command: of a worker, which :func:`runs_python`.
        environment: of a worker.
        modules: to import, those of the first workers.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        self._is_ready = False
        self._start_by = time.monotonic() + START_SECONDS
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python, unbuffered, *script = command
        shared = {key: environment[key] for key in environment if key not in _OF_ONE_WORKER}
        with other:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [python, unbuffered, fork_server.__file__, str(other.fileno()), *script],
                env=shared,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        try:
            self._channel.send(json.dumps(modules).encode())
        except OSError as error:
            self.close(str(error))

    @property
    def is_starting(self) -> bool:
        """Whether the server still imports: a worker that waits for it starts sooner."""
        if self.process is None or self._is_ready:
            return False
        self._channel.settimeout(0)
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            if time.monotonic() > self._start_by:
                self.close(f"it has not imported its modules in {START_SECONDS:g} s")
            return self.process is not None
        except OSError as error:
            message = str(error).encode()
        self._is_ready = message == READY
        if not self._is_ready:
            self.close(message.decode() or _ENDED)
        return False

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, outputs: Sequence[int]
    ) -> ForkedProcess | None:
        """A worker; None where it has to be started as usual.

        A server that is late may still fork, therefore a worker waits until it is accepted.

        Args:
            outputs: descriptors of its stdout and stderr.
        """
        if self.process is None:
            return None
        request = {"command": [*command[2:]], "environment": dict(environment)}
        accepted, accept = os.pipe()
        try:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            self._channel.settimeout(FORK_SECONDS)
            files = [*outputs, accepted]
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
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
            with suppress(OSError):
                prctl(PR_SET_CHILD_SUBREAPER, 0)

    def close(self, reason: str) -> None:
        """Fork no more: workers are started as usual."""
        log.warning("recovery: workers start without the fork server: %s", reason)
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None
        self._channel.close()


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
