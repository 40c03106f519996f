"""Scripts that start in milliseconds: in forks of a process that has imported Lightning."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import environment_of

HERE = Path(__file__).parent


@contextmanager
def fork_server() -> Iterator[list[str]]:
    """Words to use in the place of ``sys.executable``, while the server runs.

    Ranks that are to import for themselves, or to have hash seeds of their own (two that go through
    a set in different orders), need interpreters of their own: those of ``two`` in integrations/.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()  # clients may come while it still imports
            server = subprocess.Popen(
                [sys.executable, str(HERE / "fork_server.py"), str(listener.fileno())],
                env=environment_of({}),
                stdin=subprocess.PIPE,  # its end, however this process ends, is that of the server
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        try:
            yield [sys.executable, "-IS", str(HERE / "fork_client.py"), path]
        finally:
            server.kill()  # what it started ends with its own client
            server.wait()
