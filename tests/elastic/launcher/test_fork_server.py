"""Workers that a fork server starts, beside those that are started as usual: real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lightning_dist.elastic.launcher import forks
from lightning_dist.elastic.launcher.forks import ForkedProcess, ForkServer, runs_python

LIMIT = 60.0
FACTS = """
    import json, os, sys
    import __main__

    class Here:
        pass

    print(json.dumps({
        "name": __name__, "file": __file__, "package": __package__, "class": Here.__module__,
        "main": __main__.Here is Here, "spec": getattr(__spec__, "name", None),
        "cached": __cached__ and os.path.basename(__cached__),
        "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "parent": os.getppid(), "signals": open(
            "/proc/self/status").read().split("SigPnd")[1].split("Cpus_allowed")[0],
        "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
        "files": sorted(os.listdir("/proc/self/fd")), "stdin": os.path.realpath("/proc/self/fd/0"),
        "buffered": [sys.stdout.line_buffering, sys.stdout.write_through],
    }))
    print("an error", file=sys.stderr)
"""

Start = Callable[..., "subprocess.Popen[bytes] | ForkedProcess"]


class Scripts:
    """Scripts of a folder, which a fork server runs; as its launcher, this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[ForkServer] = []

    def command(self, code: str, *arguments: str) -> list[str]:
        (self.folder / "script.py").write_text(textwrap.dedent(code))
        return [sys.executable, "-u", "script.py", *arguments]

    def serve(self, command: Sequence[str], *modules: str) -> ForkServer:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "0"}
        self.servers.append(ForkServer(command, environment=environment, modules=modules))
        return self.servers[-1]

    def fork(
        self, server: ForkServer, command: Sequence[str], **environment: str
    ) -> ForkedProcess | None:
        """A fork that writes to ``stdout`` and ``stderr`` of the folder."""
        while server.is_starting:
            time.sleep(0.01)
        with self._output("stdout") as stdout, self._output("stderr") as stderr:
            outputs = [stdout.fileno(), stderr.fileno()]
            return server.start(command, self.environment(**environment), outputs=outputs)

    def forked(
        self, command: Sequence[str], *modules: str, server: ForkServer | None = None, **more: str
    ) -> ForkedProcess:
        """A fork of a server that has imported these modules, or of one that is there."""
        forked = self.fork(server or self.serve(command, *modules), command, **more)
        assert forked is not None
        return forked

    def environment(self, **environment: str) -> Mapping[str, str]:
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return {**os.environ, **paths, "RANK": "3", **environment}

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """The same, as torch's agent does it."""
        with self._output("stdout") as stdout, self._output("stderr") as stderr:
            return subprocess.Popen(
                command,
                env=self.environment(**environment),
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _output(self, name: str):  # type: ignore[no-untyped-def]
        return (self.folder / name).open("a")

    def take(self, name: str = "stdout") -> str:
        """What has been written since."""
        path = self.folder / name
        text = path.read_text()
        path.unlink()
        return text


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.chdir(tmp_path)
    found = Scripts(tmp_path)
    yield found
    for server in found.servers:
        if server.process is not None:
            server.close("the test ends")


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_launcher_that_ends_without_a_fork_leaves_no_error(
    is_ready: bool, scripts: Scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether or not the server has imported its modules by then."""
    server = scripts.serve(scripts.command(""))
    if is_ready:
        server._channel.settimeout(LIMIT)
        assert server._channel.recv(16, socket.MSG_PEEK)
    server._channel.close()
    assert server.process is not None
    assert server.process.wait(LIMIT) == 0
    assert capfd.readouterr().err == ""
    server.process = None


@pytest.mark.parametrize("as_module", [False, True])
def test_a_fork_is_as_another_start(as_module: bool, scripts: Scripts) -> None:
    """By all that it sees of itself: module, arguments, environment, session, parent, files."""
    command = scripts.command(FACTS, "--rate", "0.1")
    if as_module:
        (scripts.folder / "package").mkdir()
        (scripts.folder / "script.py").rename(scripts.folder / "package" / "script.py")
        command[2:3] = ["-m", "package.script"]
    usual = scripts.start(command, ONE="1")
    assert usual.wait(LIMIT) == 0
    expected = json.loads(scripts.take()), scripts.take("stderr")
    assert scripts.forked(command, "json", ONE="1").wait(LIMIT) == 0
    assert (json.loads(scripts.take()), scripts.take("stderr")) == expected
    assert expected[0]["environment"]["RANK"] == "3"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(76)", 76),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_exit_codes(code: str, expected: int, scripts: Scripts) -> None:
    command = scripts.command(code)
    forked = scripts.forked(command)
    assert forked.wait(LIMIT) == expected
    assert forked.poll() == expected


def test_signals_of_the_launcher(scripts: Scripts) -> None:
    """To the session of the worker, whether it handles them or not."""
    command = scripts.command(
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('here'); signal.pause()"
    )
    server = scripts.serve(command)
    for number, expected in ((signal.SIGTERM, 9), (signal.SIGKILL, -signal.SIGKILL)):
        forked = scripts.fork(server, command)
        assert forked is not None
        while "here" not in (scripts.folder / "stdout").read_text():
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(0)
        os.killpg(forked.pid, number)
        assert forked.wait(LIMIT) == expected
        scripts.take()


def test_workers_outlive_the_server(scripts: Scripts, caplog: pytest.LogCaptureFixture) -> None:
    """With their exit codes; no other is forked, for which there is one line."""
    command = scripts.command("import sys; sys.exit(len(open('end').read()))")
    os.mkfifo("end")
    server = scripts.serve(command)
    forked = scripts.forked(command, server=server)
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    assert scripts.fork(server, command) is None
    assert scripts.fork(server, command) is None
    (record,) = caplog.records
    assert "workers start without the fork server" in record.message
    Path("end").write_text("123")
    assert forked.wait(LIMIT) == 3


def test_a_server_with_threads_does_not_fork(
    scripts: Scripts, caplog: pytest.LogCaptureFixture
) -> None:
    Path("threaded.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    command = scripts.command("pass")
    assert scripts.fork(scripts.serve(command, "threaded"), command) is None
    assert "its imports started 1 threads" in caplog.text


def test_a_server_that_hangs_is_given_up(
    scripts: Scripts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its imports, or later; a worker that it forks after that ends before the script."""
    monkeypatch.setattr(forks, "START_SECONDS", 0.0)
    Path("hanging.py").write_text("import threading; threading.Event().wait()")
    command = scripts.command("open('ran', 'w')")
    assert scripts.fork(scripts.serve(command, "hanging"), command) is None
    assert "it has not imported its modules in 0 s" in caplog.text
    monkeypatch.undo()
    monkeypatch.chdir(scripts.folder)
    monkeypatch.setattr(forks, "FORK_SECONDS", 0.01)
    server = scripts.serve(command)
    while server.is_starting:
        time.sleep(0.01)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    assert scripts.fork(server, command) is None
    assert "timed out" in caplog.text
    assert not Path("ran").exists()


def test_forks_do_not_share_random_numbers(scripts: Scripts) -> None:
    """Nor does it matter that numpy starts threads at its import: it ends them before a fork."""
    command = scripts.command("import numpy, random; print(numpy.random.rand(), random.random())")
    server = scripts.serve(command, "numpy", "random")
    for _ in range(2):
        assert scripts.forked(command, server=server).wait(LIMIT) == 0
    first, second = scripts.take().splitlines()
    assert not {*first.split()} & {*second.split()}


def test_forks_have_a_rank_of_their_own_for_lightning(scripts: Scripts) -> None:
    """It reads the rank at its import."""
    command = scripts.command(
        "import lightning_utilities.core.rank_zero as z, os; print(z.rank_zero_only.rank)"
    )
    forked = scripts.forked(command, "lightning_utilities.core.rank_zero", RANK="2")
    assert forked.wait(LIMIT) == 0
    assert scripts.take() == "2\n"


def test_the_server_ends_with_its_launcher(scripts: Scripts) -> None:
    """Also while it imports."""
    Path("hanging.py").write_text("import threading; print('here'); threading.Event().wait()")
    code = (
        "import os, signal, sys; from lightning_dist.elastic.launcher.forks import ForkServer\n"
        "command = [sys.executable, '-u', 'script.py']\n"
        "server = ForkServer(command, environment=os.environ, modules=['hanging'])\n"
        "sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        env=scripts.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"here\n"
    assert launcher.communicate(timeout=LIMIT)[0] == b""  # nobody else has it open
    assert launcher.wait() == -signal.SIGKILL


def test_only_scripts_of_the_same_python_are_forked() -> None:
    assert runs_python([sys.executable, "-u", "train.py"])
    assert not runs_python(["train.sh", "-u"])
    assert not runs_python(["numactl", "-C", "1", sys.executable, "-u", "train.py"])
