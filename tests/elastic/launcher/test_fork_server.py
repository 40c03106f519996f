"""Workers that a fork server starts, beside those that are started as usual: real processes."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dist.elastic.launcher import PRELOAD, fork_server, forks
from lightning_dist.elastic.launcher.forks import (
    ForkedProcess,
    ForkServer,
    WorkerStarts,
    reason_for_usual_starts,
)

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
        self.starts: list[WorkerStarts] = []

    def command(self, code: str, *arguments: str) -> list[str]:
        (self.folder / "script.py").write_text(textwrap.dedent(code))
        return [sys.executable, "-u", "script.py", *arguments]

    def serve(self, command: Sequence[str], *modules: str) -> ForkServer:
        """A server that imports these, of the standard library or not at all."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "0"}
        server = ForkServer(
            command, environment, plan=str(self.folder / f"plan-{len(self.servers)}")
        )
        self.servers.append(server)
        lines: list[dict[str, Any]] = [{"module": name} for name in modules]
        server.read([*lines, {"known": {}, "looked": []}])
        return server

    def fork(
        self, server: ForkServer, command: Sequence[str], **environment: str
    ) -> ForkedProcess | None:
        """A fork that writes to ``stdout`` and ``stderr`` of the folder."""
        journal, variables = str(self.folder / "journal"), self.environment(**environment)
        with self._output("stdout") as stdout, self._output("stderr") as stderr:
            outputs = [stdout.fileno(), stderr.fileno()]
            return server.start(command, variables, journal, outputs=outputs)

    def forked(
        self, command: Sequence[str], *modules: str, server: ForkServer | None = None, **more: str
    ) -> ForkedProcess:
        """A fork of a server that has imported these modules, or of one that is there."""
        forked = self.fork(server or self.serve(command, *modules), command, **more)
        assert forked is not None
        return forked

    def first(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """A first worker, whose imports are recorded."""
        return self.start_of(self.workers(), command, rank=3, **environment)  # type: ignore[return-value]

    def workers(self) -> WorkerStarts:
        self.starts.append(WorkerStarts())
        return self.starts[-1]

    def start_of(
        self, starts: WorkerStarts, command: Sequence[str], *, rank: int = 0, **environment: str
    ) -> "subprocess.Popen[bytes] | ForkedProcess":
        """The next worker of a launcher."""
        variables = self.environment(**{"RANK": str(rank), "LOCAL_RANK": str(rank), **environment})
        with self._output("stdout") as stdout, self._output("stderr") as stderr:
            outputs = [stdout.fileno(), stderr.fileno()]
            return starts.start(command, variables, local_rank=rank, outputs=outputs)

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
    for each in (*found.servers, *found.starts):
        each.end() if isinstance(each, ForkServer) else each.close()


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
    assert server.process.wait(LIMIT) == 0
    assert capfd.readouterr().err == ""
    server.is_closed = True


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_worker_is_as_a_usual_start(as_module: bool, is_first: bool, scripts: Scripts) -> None:
    """By all that it sees of itself: module, arguments, environment, session, parent, files."""
    command = scripts.command(FACTS, "--rate", "0.1")
    if as_module:
        (scripts.folder / "package").mkdir()
        (scripts.folder / "script.py").rename(scripts.folder / "package" / "script.py")
        command[2:3] = ["-m", "package.script"]
    usual = scripts.start(command, ONE="1", LOCAL_RANK="3")
    assert usual.wait(LIMIT) == 0
    expected = json.loads(scripts.take()), scripts.take("stderr")
    if is_first:
        worker: Any = scripts.first(command, ONE="1")
    else:
        worker = scripts.forked(command, "json", ONE="1", LOCAL_RANK="3")
    assert worker.wait(LIMIT) == 0
    seen = json.loads(scripts.take()), scripts.take("stderr")
    journal = {*seen[0]["files"]} - {*expected[0]["files"]}
    assert len(journal) == 1  # which children do not inherit
    seen[0]["files"] = expected[0]["files"]
    assert seen == expected
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
    server.process.kill()
    server.process.wait()
    assert scripts.fork(server, command) is None
    assert scripts.fork(server, command) is None
    (record,) = caplog.records
    assert "workers cannot be forks of one process: it has ended" in record.message
    Path("end").write_text("123")
    assert forked.wait(LIMIT) == 3


def test_a_server_that_hangs_is_given_up(
    scripts: Scripts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its imports, or later; a worker that it forks after that ends before the script."""
    monkeypatch.setattr(forks, "IMPORT_SECONDS", 0.0)
    Path("hanging.py").write_text("import threading; threading.Event().wait()")
    command = scripts.command("open('ran', 'w')")
    assert scripts.fork(scripts.serve(command, "hanging"), command) is None
    assert "it has not imported their modules in 0 s" in caplog.text
    monkeypatch.undo()
    monkeypatch.chdir(scripts.folder)
    monkeypatch.setattr(forks, "FORK_SECONDS", 0.01)
    server = scripts.serve(command)
    while server.is_busy:
        time.sleep(0.01)
    os.kill(server.process.pid, signal.SIGSTOP)
    assert scripts.fork(server, command) is None
    assert "timed out" in caplog.text
    assert not Path("ran").exists()


def test_the_server_ends_with_its_launcher(scripts: Scripts) -> None:
    """Also while it imports."""
    Path("hanging.py").write_text(
        "import threading; open('imports', 'w').close(); threading.Event().wait()"
    )
    code = (
        "import os, signal, sys\n"
        "from lightning_dist.elastic.launcher.forks import ForkServer\n"
        "server = ForkServer([sys.executable, '-u', 'script.py'], os.environ, plan='plan')\n"
        "server.read([{'module': 'hanging'}, {'known': {}, 'looked': []}])\n"
        "print(server.process.pid, flush=True)\n"
        "sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        env=scripts.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    server = psutil.Process(int(launcher.stdout.readline()))
    deadline = time.monotonic() + LIMIT
    while not Path("imports").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert launcher.communicate(timeout=LIMIT)[0] == b""
    assert launcher.wait() == -signal.SIGKILL
    server.wait(LIMIT)


@pytest.mark.parametrize(
    ("command", "environ", "reason"),
    [
        ([sys.executable, "-u", __file__], {}, ""),
        ([sys.executable, "-u", "-m", "train"], {}, ""),
        ([sys.executable, "-u", __file__], {PRELOAD: "0"}, f"{PRELOAD}=0"),
        ([sys.executable, "-u", "/"], {}, "/ is no source file"),
        (["train.sh", "-u"], {}, f"they run `train.sh -u`, not a script in {sys.executable}"),
        (["numactl", "-C", "1", sys.executable, "-u", "train.py"], {}, "they run `numactl"),
        (["/other/python", "-u", "train.py"], {}, "they run `/other/python"),
    ],
)
def test_only_scripts_of_the_same_python_are_forked(
    command: list[str], environ: dict[str, str], reason: str
) -> None:
    found = reason_for_usual_starts(command, environ)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_command_that_cannot_be_forked_is_said_once(
    scripts: Scripts, caplog: pytest.LogCaptureFixture
) -> None:
    starts = scripts.workers()
    for _ in range(2):
        assert scripts.start_of(starts, ["true"]).wait(LIMIT) == 0
    starts.look()
    (record,) = caplog.records
    assert "workers cannot be forks: they run `true`" in record.message


# What a fork finds imported, beside what a worker of its own would have imported.


class Job:
    """Workers of one launcher with an installed package, and a server that imports at once.

    Args:
        package: source of the module ``installed``.
        code: of the script.
    """

    def __init__(self, scripts: Scripts, package: str, code: str) -> None:
        self.scripts, self.command = scripts, scripts.command(code)
        self.starts = scripts.workers()
        base = scripts.folder / "base"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = base / "lib" / version / "site-packages"
        site.mkdir(parents=True)
        self.site = site
        (site / "installed.py").write_text(textwrap.dedent(package))
        paths = os.pathsep.join([str(site), *filter(None, sys.path)])
        self.environment = {"PYTHONUSERBASE": str(base), "PYTHONPATH": paths}

    def start(self, rank: int = 0, **environment: str) -> Any:
        variables = {**self.environment, **environment}
        return self.scripts.start_of(self.starts, self.command, rank=rank, **variables)

    def run(self, rank: int = 0, **environment: str) -> tuple[str, bool]:
        """Output of the next worker, and whether it was a fork."""
        worker = self.start(rank, **environment)
        assert worker.wait(LIMIT) == 0, self.scripts.take("stderr")
        return self.scripts.take(), isinstance(worker, ForkedProcess)

    def preload(self) -> None:
        """Let the server import what workers have imported so far."""
        deadline = time.monotonic() + LIMIT
        self.starts.look()
        while (self.starts._server is None or self.starts.are_late) and time.monotonic() < deadline:
            time.sleep(0.01)
            self.starts.look()


@pytest.fixture
def job(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Job]:
    monkeypatch.setattr(forks, "QUIET_SECONDS", 0.0)
    return partial(Job, scripts)


IS_NEW = """
    import sys, json
    print("installed" in sys.modules, "own" in sys.modules)
    import installed, own
    import json.tool  # or the last import could not be seen
"""


def test_installed_modules_are_there_and_those_of_the_user_are_read_anew(
    job: Callable[[str, str], Job],
) -> None:
    workers = job("", IS_NEW)
    Path("own.py").write_text("print('one')")
    assert workers.run() == ("False False\none\n", False)
    Path("own.py").write_text("print('two!')")
    workers.preload()
    assert workers.run() == ("True False\ntwo!\n", True)
    Path("script.py").write_text("print('another script')")
    assert workers.run() == ("another script\n", True)


def test_packages_may_lie_in_a_folder_that_only_the_path_names(
    job: Callable[[str, str], Job],
) -> None:
    workers = job("", "import sys; print('installed' in sys.modules)\nimport installed, json.tool")
    del workers.environment["PYTHONUSERBASE"]
    assert workers.run() == ("False\n", False)
    workers.preload()
    assert workers.run() == ("True\n", True)


def test_packages_may_extend_the_path_for_what_they_import(
    job: Callable[[str, str], Job],
) -> None:
    """As setuptools does: what is imported inside is known before the package itself."""
    extend = "import os, sys; sys.path.append(os.path.join(os.path.dirname(__file__), 'vendor'))"
    code = "import sys; print('vendored' in sys.modules)\nimport installed, json.tool"
    workers = job(f"{extend}\nimport vendored\nimport another", code)
    (workers.site / "vendor").mkdir()
    for name in ("vendored", "another"):  # the first is over when the second is looked for
        (workers.site / "vendor" / f"{name}.py").touch()
    assert workers.run() == ("False\n", False)
    workers.preload()
    assert workers.run() == ("True\n", True)


def test_what_is_imported_later_is_imported_ahead_later(job: Callable[[str, str], Job]) -> None:
    code = "import installed, sys, os; print('yaml' in sys.modules)\nif 'LATE' in os.environ:"
    workers = job("import json", f"{code}\n    import yaml\nimport json.tool")
    assert workers.run() == ("False\n", False)
    workers.preload()
    assert workers.run(LATE="1") == ("False\n", True)
    workers.preload()
    assert workers.run() == ("True\n", True)


@pytest.mark.parametrize(
    ("package", "code"),
    [
        (
            "import os; VALUE = os.environ.get('SETTING')",
            "os.environ['SETTING'] = 'a'\nimport installed; print(installed.VALUE)",
        ),
        (
            "import os; VALUE = os.environ.get('SETTING')",
            "os.environ.pop('SETTING', None)\nimport installed; print(installed.VALUE)",
        ),
        (
            "import os; os.environ.setdefault('SETTING', 'b')",
            "import installed; print(os.environ['SETTING'])",
        ),
        (
            "import os; os.environ['SETTING'] = 'b'\nimport fractions",
            "import installed; print(os.environ['SETTING'])",
        ),
        (
            "import os; VALUE = os.getcwd()",
            "os.chdir('/')\nimport installed; print(installed.VALUE)",
        ),
        (
            "import logging; VALUE = bool(logging.root.handlers)",
            "import logging; logging.basicConfig()\nimport installed; print(installed.VALUE)",
        ),
        ("import sys; VALUE = sys.argv", "import installed; print(installed.VALUE)"),
        ("import sys; VALUE = sys.path[0]", "import installed; print(installed.VALUE)"),
    ],
)
@pytest.mark.parametrize("setting", [{}, {"SETTING": "outer"}])
def test_packages_see_what_they_would_have_seen(
    package: str, code: str, setting: dict[str, str], job: Callable[[str, str], Job]
) -> None:
    """Variables that the script or the package sets, the folder, arguments, handlers."""
    workers = job(package, f"import os\n{code}\nimport json.tool")
    text, is_fork = workers.run(**setting)
    assert not is_fork
    workers.preload()
    assert workers.run(**setting) == (text, True)


@pytest.mark.parametrize(
    ("package", "code", "reason"),
    [
        (
            "import os; VALUE = os.environ.get('LOCAL_RANK')",
            "import installed",
            "installed reads LOCAL_RANK at its import",
        ),
        (
            "import os; open(f'imported-{os.getpid()}', 'w')\n"
            "if sum(n.startswith('imported') for n in os.listdir()) > 2: raise OSError('no')",
            "import installed",
            "installed raised OSError when it was imported: no",
        ),
    ],
)
def test_imports_that_would_be_others_are_not_made_ahead(
    package: str,
    code: str,
    reason: str,
    job: Callable[[str, str], Job],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says why, and workers start as usual."""
    workers = job(package, f"{code}\nimport json.tool")
    for rank in range(2):
        assert workers.run(rank) == ("", False)
    workers.preload()
    assert f"workers cannot be forks of one process: {reason}" in caplog.text
    worker = workers.start()
    assert not isinstance(worker, ForkedProcess)
    worker.wait(LIMIT)  # its journal must not be opened late, as a file of the next test
    workers.starts.look()
    assert len(caplog.records) == 1


def test_a_server_that_fails_while_workers_import_says_so_once(
    job: Callable[[str, str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    package = "if 'serve' in open('/proc/self/cmdline').read().split(chr(0)): raise OSError('no')"
    code = (
        "import os, time, installed, json.tool\nopen('imported', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "import yaml, json.tool"
    )
    workers = job(package, code)
    starts, worker, deadline = workers.starts, workers.start(), time.monotonic() + LIMIT
    while not Path("imported").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    while starts._server is None and time.monotonic() < deadline:
        starts.look()
    assert starts._server is not None
    Path("go").touch()
    assert worker.wait(LIMIT) == 0
    assert select.select([starts._server._channel], [], [], LIMIT)[0]
    starts.look()
    assert len(caplog.records) == 1
    assert "installed raised OSError" in caplog.text


@pytest.mark.parametrize(("variable", "is_ahead"), [("CUDA_VISIBLE_DEVICES", True), ("X", False)])
def test_only_visible_devices_may_differ_before_an_import(
    variable: str, is_ahead: bool, job: Callable[[str, str], Job]
) -> None:
    """They are read when a device is first used, in the fork."""
    code = f"""
        import os, sys
        print("installed" in sys.modules)
        os.environ["{variable}"] = os.environ["RANK"]
        import installed
        import json.tool
    """
    workers = job("", code)
    for rank in range(2):
        assert workers.run(rank) == ("False\n", False)
    workers.preload()
    assert workers.run() == (f"{is_ahead}\n", True)


def test_imports_that_fail_in_the_script_are_not_made_ahead(job: Callable[[str, str], Job]) -> None:
    """As those of optional parts."""
    workers = job(
        "import no_such_module", "try:\n    import installed\nexcept ImportError: print('no')"
    )
    workers.command = workers.scripts.command(
        "import yaml\ntry:\n    import installed\n"
        "except ImportError:\n    print('no')\nimport json.tool",
    )
    assert workers.run() == ("no\n", False)
    workers.preload()
    assert workers.run() == ("no\n", True)


def test_modules_that_are_only_looked_for_are_not_imported(job: Callable[[str, str], Job]) -> None:
    code = """
        import sys, yaml, importlib.util
        print("installed" in sys.modules)
        assert importlib.util.find_spec("installed")
        import json.tool
    """
    workers = job("", code)
    assert workers.run() == ("False\n", False)
    workers.preload()
    assert workers.run() == ("False\n", True)


def test_an_open_device_is_a_reason_not_to_fork(scripts: Scripts) -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(fork_server.__file__)!r})\n"
        "import fork_server; print(repr(fork_server.reason_not_to_fork()))\n"
        "fork_server._DEVICES, file = ('/dev/zero',), open('/dev/zero')\n"
        "print(fork_server.reason_not_to_fork())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == "''\nthe imports of the script opened /dev/zero\n"


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("package", "files", "code", "reason"),
    [
        (THREAD, {}, "", "the imports of the script started 1 threads"),
        (
            "import own",
            {"own.py": ""},
            "",
            "an installed package imports own, which is not installed",
        ),
        (
            "import other",
            {"vendored/other.py": ""},
            "import sys; sys.path.insert(0, 'vendored')",
            "vendored/other.py in the script",
        ),
        (
            "try:\n    import other\nexcept ImportError: pass",
            {},
            "import sys; sys.modules['other'] = None",
            "other is imported here, and not in the script",
        ),
        (
            "import os; os.environ['SETTING'] = 'of the package'",
            {},
            "import os; os.environ['SETTING'] = 'of the script'",
            "the script and a package that it imports set SETTING",
        ),
    ],
)
def test_what_a_server_would_find_and_a_worker_would_not(
    package: str,
    files: dict[str, str],
    code: str,
    reason: str,
    job: Callable[[str, str], Job],
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = "import os; import json.tool; os._exit(0)"  # of a process with a thread, too
    workers = job(package, f"{code}\nimport installed\n{end}")
    (workers.site / "other.py").touch()
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert workers.run() == ("", False)
    workers.preload()
    assert reason in caplog.text
    assert workers.run() == ("", False)


def test_what_only_some_workers_have_done_is_not_imported_ahead(
    job: Callable[[str, str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor what comes after it; what comes before is."""
    code = """
        import os, sys
        print(*(name in sys.modules for name in ("yaml", "installed", "psutil")))
        import yaml
        if os.environ["RANK"] == "0":
            os.environ["SETTING"] = "here only"
            import psutil
        import installed
        print(installed.VALUE)
        import json.tool
    """
    workers = job("import os; VALUE = os.environ.get('SETTING')", code)
    values = [workers.run(rank) for rank in range(2)]
    assert values == [
        ("False False False\nhere only\n", False),
        ("False False False\nNone\n", False),
    ]
    workers.preload()
    for rank, value in enumerate(("here only", "None")):
        assert workers.run(rank) == (f"True False False\n{value}\n", True)
    assert not caplog.records


def test_a_state_that_changes_between_modules_of_a_package(job: Callable[[str, str], Job]) -> None:
    code = """
        import os, installed
        os.environ["SETTING"] = "a"
        import second
        print(second.VALUE)
        import json.tool
    """
    workers = job("", code)
    (workers.site / "second.py").write_text(
        "import installed, os; VALUE = os.environ.get('SETTING')"
    )
    assert workers.run() == ("a\n", False)
    workers.preload()
    assert workers.run() == ("a\n", True)


@pytest.mark.parametrize("is_fork", [False, True])
def test_what_a_script_has_left_open_is_written_at_its_end(
    is_fork: bool, job: Callable[[str, str], Job]
) -> None:
    """Also where only the last collection of garbage finds it."""
    code = """
        import installed
        class Kept: pass
        kept = Kept()
        kept.itself, kept.file = kept, open("written", "w")
        kept.file.write("data")
        import json.tool
    """
    workers = job("", code)
    workers.run()
    if is_fork:
        workers.preload()
        Path("written").unlink()
        assert workers.run() == ("", True)
    assert Path("written").read_text() == "data"


def test_classes_of_a_module_that_is_run_can_be_pickled_to_the_end(scripts: Scripts) -> None:
    command = scripts.command("")
    Path("module.py").write_text(
        "import atexit, pickle\nclass Here: pass\n"
        "atexit.register(lambda: print(len(pickle.dumps(Here()))))"
    )
    command[2:] = ["-m", "module"]
    assert scripts.first(command).wait(LIMIT) == 0
    assert int(scripts.take()) > 0
    command[2:] = ["-m", "no_such_module"]
    assert scripts.first(command).wait(LIMIT) == 1
    assert scripts.take("stderr").endswith("No module named no_such_module\n")


def test_children_that_are_spawned_find_the_script(job: Callable[[str, str], Job]) -> None:
    code = """
        import installed, multiprocessing
        def work(): print("here", flush=True)
        if __name__ == "__main__":
            for kind in ("spawn", "forkserver", "fork"):
                child = multiprocessing.get_context(kind).Process(target=work)
                child.start(); child.join(); assert child.exitcode == 0
            import json.tool
    """
    workers = job("", code)
    assert workers.run() == ("here\n" * 3, False)
    workers.preload()
    assert workers.run() == ("here\n" * 3, True)


def test_forks_do_not_share_random_numbers(job: Callable[[str, str], Job]) -> None:
    """Nor does it matter that numpy starts threads at its import: it ends them before a fork."""
    code = "import installed, numpy, random; print(numpy.random.rand(), random.random())"
    workers = job("import numpy", f"{code}\nimport json.tool")
    workers.run()
    workers.preload()
    (first, is_fork), (second, _) = workers.run(), workers.run()
    assert is_fork
    assert not {*first.split()} & {*second.split()}


def test_forks_have_a_rank_of_their_own(job: Callable[[str, str], Job]) -> None:
    """For Lightning and torchmetrics, which read it at their imports."""
    code = """
        import lightning.fabric.utilities.rank_zero as one, torchmetrics.utilities.prints as two
        print(one.rank_zero_only.rank, two.rank_zero_only.rank)
        import json.tool
    """
    workers = job("", code)
    assert workers.run() == ("0 0\n", False)
    workers.preload()
    assert workers.run(3) == ("3 3\n", True)


def test_a_launcher_keeps_nothing_of_a_start(job: Callable[[str, str], Job]) -> None:
    """No descriptor; files it has none, which a launcher that is killed would leave."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    workers = job("", "import installed; import json.tool")
    workers.run()
    workers.preload()
    counts = [(workers.run(), descriptors())[1] for _ in range(3)]
    assert len({*counts}) == 1
    assert workers.starts._journals[0].startswith("/proc/")
    workers.starts.close()
    assert descriptors() == before


def test_a_journal_that_is_cut_off_is_read_as_far_as_it_is_whole(
    job: Callable[[str, str], Job],
) -> None:
    workers = job("", "import installed; import json.tool")
    workers.run()
    with open(workers.starts._journals[0], "a") as journal:
        journal.write('{"module": "x", "ori')
    workers.preload()
    assert workers.run()[1]
