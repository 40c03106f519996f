"""Ranks as processes: how many each host has, their environment, and one group for each launch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
_GRACE_S = 2.0
_KILL_TIMEOUT_S = 10.0
_TAIL_LINES = 30
_RESULT = "BENCHMARK_RESULT"

RanksPerHost = int | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """The number of ranks of every host; ranks are numbered host by host, as torchrun does."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"every host needs at least one rank, got {list(self.counts)}")

    @classmethod
    def of(cls, ranks_per_host: RanksPerHost, *, hosts: int) -> Layout:
        """From one number for all hosts or one for each."""
        if isinstance(ranks_per_host, int):
            return cls((ranks_per_host,) * hosts)
        if len(ranks_per_host) != hosts:
            raise ValueError(
                f"ranks_per_host needs one number for each of {hosts} hosts, "
                f"got {list(ranks_per_host)}"
            )
        return cls(tuple(ranks_per_host))

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
        if self.even:
            return f"{self.hosts}x{self.counts[0]}"
        return "+".join(map(str, self.counts))

    @property
    def title(self) -> str:
        """For the head of a table."""
        ranks = self.counts[0] if self.even else " and ".join(map(str, self.counts))
        return f"{self.hosts} hosts x {ranks} ranks"

    def place(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its number there."""
        places = [(host, each) for host, count in enumerate(self.counts) for each in range(count)]
        return places[rank]


class RankFailed(RuntimeError):
    """A rank ended with an error; the message holds the end of every rank's output."""


class RanksTimedOut(RankFailed):
    """The ranks were still running at the end of the time allowed."""


class RankGroup:
    """The ranks of one launch, in rank order; the output of each goes to a file of its own."""

    def __init__(self, output_directory: Path) -> None:
        output_directory.mkdir(parents=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._directory = output_directory
        self._echoed = 0

    def start(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        """Start the next rank; it leads a session, so that Ctrl-C reaches only the launcher."""
        rank = len(self.processes)
        with self._path(rank).open("wb") as output:
            process = subprocess.Popen(
                list(argv),
                env={**env, _RESULT: str(self._path(rank, ".json"))},
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
        on_poll: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Wait for all ranks and return their output; on the first failure kill the rest, raise.

        echo: copy rank 0's output to stderr. on_poll: called about ten times a second.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while running := [r for r, p in enumerate(self.processes) if p.poll() is None]:
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    message = f"ranks {running} were still running after {timeout_s:g} s"
                    raise RanksTimedOut(f"{message}\n{self.tail()}")
                if echo:
                    self._echo()
                on_poll()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[running[0]].wait(timeout=_POLL_S)
            self._raise_if_failed()
        finally:
            self.kill()
        if echo:
            self._echo()
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

    def results(self) -> list[Any]:
        """What every rank has given to `send_result`; None: nothing."""
        paths = [self._path(rank, ".json") for rank in range(len(self.processes))]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

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

    def _echo(self) -> None:
        text = self.output(0)
        sys.stderr.write(text[self._echoed :])
        sys.stderr.flush()
        self._echoed = len(text)

    def _path(self, rank: int, suffix: str = ".txt") -> Path:
        return self._directory / f"rank{rank}{suffix}"


def send_result(result: Any) -> None:
    """Give the launcher the result of this rank, something that JSON can hold."""
    Path(os.environ[_RESULT]).write_text(json.dumps(result))


def rank_environment(
    rank: int,
    *,
    layout: Layout,
    interface: str,
    master_address: str,
    master_port: int,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of one rank: ours, torchrun's variables, one thread, and `extra` on top.

    LIGHTNING_DIST_HOSTNAME tells the hosts apart: all namespaces share the machine's host name.
    """
    host, local_rank = layout.place(rank)
    search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.counts[host]),
        "GROUP_RANK": str(host),
        "NODE_RANK": str(host),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "GLOO_SOCKET_IFNAME": interface,
        "LIGHTNING_DIST_HOSTNAME": f"host{host}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in search_path if part),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that 10.77.0.1 has no name
        **(extra or {}),
    }
