"""Ranks as processes: the number on each host, their environment, and what they send back.

    python -m benchmarks.harness.launch MODULE FUNCTION SETTINGS

is one rank: it calls a function with settings (JSON) in a gloo group, and sends what that yields.
Jobs are launchers that start ranks of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
_GRACE_S = 2.0
_KILL_TIMEOUT_S = 10.0
_TAIL_LINES = 30
_RESULTS = "BENCHMARK_RESULTS"
_GROUP_TIMEOUT = timedelta(seconds=600)  # long enough for the other ranks to compile their kernels

_TELLING = re.compile(r"error|what\(\)|enforce|abort|signal", re.IGNORECASE)
_CONSEQUENCE = re.compile(r"reset by peer|closed by peer|broken pipe", re.IGNORECASE)
_PREFIX = re.compile(
    r"^(\[rank\d+\]: |what\(\): +|\w+Error: (?=Got the following)"
    r"|Got the following error when running the callback: )+"
)
_LONGEST_REASON = 240

RankFunction = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Layout:
    """The number of ranks of every host; ranks are numbered host by host, as torchrun does."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"every host needs at least one rank, got {list(self.counts)}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From `HOSTSxRANKS` or `RANKS+RANKS+...`."""
        if match := re.fullmatch(r"(\d+)x(\d+)", text):
            return cls((int(match[2]),) * int(match[1]))
        if re.fullmatch(r"\d+(\+\d+)*", text):
            return cls(tuple(int(count) for count in text.split("+")))
        raise ValueError(f"a layout is like 2x2 (hosts x ranks) or 3+1 (ranks of each), got {text}")

    @property
    def hosts(self) -> int:
        return len(self.counts)

    @property
    def world_size(self) -> int:
        return sum(self.counts)

    @property
    def even(self) -> bool:
        return len(set(self.counts)) == 1

    @property
    def ranks_per_host(self) -> int | list[int]:
        """One number where all hosts have the same, else one for each."""
        return self.counts[0] if self.even else list(self.counts)

    @property
    def name(self) -> str:
        return f"{self.hosts}x{self.counts[0]}" if self.even else "+".join(map(str, self.counts))


class RankFailed(RuntimeError):
    """A rank ended with an error, or not in time; the message has the end of all outputs."""

    @property
    def reason(self) -> str:
        """One line: the last of the output that looks like the cause, else what ended."""
        ended, *lines = str(self).splitlines()
        causes = [each for each in lines if _TELLING.search(each) and not _CONSEQUENCE.search(each)]
        if not causes or "still running" in ended:
            return ended
        return _PREFIX.sub("", causes[-1].strip())[:_LONGEST_REASON]


class RankGroup:
    """The ranks of one launch, started here; the output of each goes to a file of its own.

    They get our environment, torchrun's variables and one thread. Each leads a session, so that
    Ctrl-C reaches only the launcher.

    Args:
        argv: the command of every rank.
        folder: for what the ranks print and send; new.
        interface: of the hosts, over which ranks meet; ``address`` is that of the first host.
        prefix: of the command on a host, by its number.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        layout: Layout,
        port: int,
        interface: str = "lo",
        address: str = "127.0.0.1",
        prefix: Callable[[int], Sequence[str]] = lambda host: (),
    ) -> None:
        folder.mkdir(parents=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        places = [(host, at) for host, count in enumerate(layout.counts) for at in range(count)]
        for rank, (host, local_rank) in enumerate(places):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(layout.world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(layout.counts[host]),
                "GROUP_RANK": str(host),
                "NODE_RANK": str(host),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": interface,
                "LIGHTNING_DIST_HOSTNAME": f"host{host}",  # namespaces share the machine's
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
                "PYTHONUNBUFFERED": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that 10.77.0.1 has no name
                _RESULTS: str(self._path(rank, ".jsonl")),
            }
            self._path(rank, ".jsonl").touch()
            with self._path(rank).open("wb") as output:
                process = subprocess.Popen(
                    [*prefix(host), *argv],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def wait(
        self,
        *,
        timeout_s: float,
        echo: bool = False,
        on_result: Callable[[Any], None] = lambda result: None,
    ) -> list[str]:
        """Wait for all ranks and return their output; on the first failure kill the rest, raise.

        echo: copy rank 0's output to stderr. on_result: called with each result that it sends.
        """
        deadline = time.monotonic() + timeout_s
        echoed = passed_on = 0

        def look() -> None:
            nonlocal echoed, passed_on
            if echo:
                text = self.output(0)
                print(text[echoed:], end="", file=sys.stderr, flush=True)
                echoed = len(text)
            *lines, _ = self._path(0, ".jsonl").read_text().split("\n")  # the last is not whole
            for line in lines[passed_on:]:
                on_result(json.loads(line))
            passed_on = len(lines)

        try:
            while running := [r for r, p in enumerate(self.processes) if p.poll() is None]:
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    message = f"ranks {running} were still running after {timeout_s:g} s"
                    raise RankFailed(f"{message}\n{self.tail()}")
                look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[running[0]].wait(timeout=_POLL_S)
            self._raise_if_failed()
        finally:
            self.kill()
            look()
        return [self.output(rank) for rank in range(len(self.processes))]

    def kill(self) -> None:
        """Kill what is left of the ranks and of the process groups they lead, and reap them."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=_KILL_TIMEOUT_S)

    def output(self, rank: int) -> str:
        """What the rank has printed so far, stdout and stderr together."""
        return self._path(rank).read_text(errors="replace")

    def results(self) -> list[list[Any]]:
        """All that every rank has sent."""
        paths = [self._path(rank, ".jsonl") for rank in range(len(self.processes))]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def tail(self) -> str:
        """The last lines of every rank's output."""
        parts = []
        for rank in range(len(self.processes)):
            lines = self.output(rank).splitlines()[-_TAIL_LINES:]
            parts.append("\n".join([f"--- rank {rank} ---", *lines]))
        return "\n".join(parts)

    def _raise_if_failed(self) -> None:
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        if not failed:
            return
        deadline = time.monotonic() + _GRACE_S  # who ends first often has not the telling error
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        status = self.processes[failed[0]].returncode
        raise RankFailed(f"rank {failed[0]} ended with exit status {status}\n{self.tail()}")

    def _path(self, rank: int, suffix: str = ".txt") -> Path:
        return self._folder / f"rank{rank}{suffix}"


def rank_command(function: RankFunction, settings: Mapping[str, Any]) -> list[str]:
    """The command of a rank that calls a function of a module, and sends what it yields."""
    spec = sys.modules[function.__module__].__spec__
    assert spec is not None
    names = [spec.name, function.__name__]
    return [sys.executable, "-m", "benchmarks.harness.launch", *names, json.dumps(settings)]


def run_ranks(
    function: RankFunction,
    *,
    ranks: int,
    timeout_s: float,
    on_result: Callable[[Any], None] = lambda result: None,
    **settings: Any,
) -> list[list[Any]]:
    """Call a function on every one of ``ranks`` processes of this machine; what each has yielded.

    Raises `RankFailed`. on_result: called with each result of rank 0 when it comes.
    """
    command, layout = rank_command(function, settings), Layout((ranks,))
    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(command, Path(folder) / "ranks", layout=layout, port=free_port())
        group.wait(timeout_s=timeout_s, on_result=on_result)
        return group.results()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_job(words: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start Python with these arguments, with one thread a process; ``output`` is appended to."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def end_job(job: subprocess.Popen[bytes]) -> None:
    """Kill the launcher first, so that it starts nothing anew; ranks have sessions of their own."""
    if job.poll() is None:
        ranks = psutil.Process(job.pid).children(recursive=True)
        job.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    job.wait()


def main() -> None:
    """One rank."""
    import torch.distributed as dist

    module, name, settings = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    with Path(os.environ[_RESULTS]).open("a", buffering=1) as results:
        for result in function(**json.loads(settings)):
            results.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
