"""Tests that run on every rank of a world: ``@pytest.mark.on_ranks(4)``.

The function of such a test runs in four processes that have a default group of their own, with the
same arguments, which are pickled; its assertions stand where they are made, and the test passes if
it passes on all ranks. A world serves one test after the other, of all files, as the ranks of
torch's own ``MultiProcContinuousTest`` do; it ends with the first test that fails. A test that ends
ranks, or that is about their start or their output, starts processes of its own.
"""

from __future__ import annotations

import marshal
import os
import pickle
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion.rewrite import _rewrite_test
from forks import with_seeds
from processes import environment_of, kill_process, port

if TYPE_CHECKING:
    from rank_loop import Call

LOOP = Path(__file__).with_name("rank_loop.py")
START_LIMIT = 100.0
LIMIT = 150.0
"""Seconds that a test may take on ranks."""
SPARE = 20.0
"""Seconds for ranks that exit at their limit to tell where they are."""
GRACE = 3.0
"""Seconds in which ranks may end a test that has failed on another; most wait for that one."""
THREADS = 30
"""Of a rank, with which its world is not used again.

Tests leave groups behind, most of them in caches of torch's DTensor. Each has three threads, one of
which wakes up a hundred times a second.
"""


class World:
    """Ranks that wait for tests.

    Args:
        python: words to start them with.
    """

    def __init__(self, size: int, python: Sequence[str]) -> None:
        self.size = size
        self.is_worn = False
        self._stack = ExitStack()
        try:
            self._ranks = self._start(python)
        except BaseException:
            self.close()
            raise

    def _start(self, python: Sequence[str]) -> list[Connection[Any, Any]]:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._log = folder / "output"
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "socket"))
        listener.listen(self.size)
        listener.settimeout(START_LIMIT)
        options = [f"--nproc-per-node={self.size}", "--master-addr=127.0.0.1"]
        options += [f"--master-port={port()}", "--monitor-interval=1", "--no-python", *python]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*python, "-m", "torch.distributed.run", *options, str(LOOP), folder / "socket"],
                env=environment_of({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(kill_process, process)
        ranks: dict[int, Connection[Any, Any]] = {}
        for _ in range(self.size):
            try:
                rank = Connection(listener.accept()[0].detach())
                self._stack.callback(rank.close)
                ranks[rank.recv()] = rank
            except (TimeoutError, EOFError):
                pytest.fail(f"a world of {self.size} did not start:\n{self.output()}", False)
        return [ranks[number] for number in range(self.size)]

    def written(self) -> int:
        """Bytes of output until now."""
        return self._log.stat().st_size

    def output(self, since: int = 0) -> str:
        return self._log.read_bytes()[since:][-8000:].decode(errors="replace")

    def run(self, call: Call) -> list[tuple[str, str]]:
        """How the test has ended on every rank."""
        for rank in self._ranks:
            rank.send(call)
        found: dict[int, tuple[str, str]] = {}
        end = time.monotonic() + call.limit + SPARE
        while len(found) < self.size:
            waiting = [rank for n, rank in enumerate(self._ranks) if n not in found]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            for rank in ready:
                number = self._ranks.index(rank)
                try:
                    found[number], threads = rank.recv()
                    self.is_worn |= threads > THREADS
                except (EOFError, ConnectionError):
                    found[number] = "failed", "this rank has ended"
            if not ready:
                break
            if any(how == "failed" for how, _ in found.values()):
                end = min(end, time.monotonic() + GRACE)
        lost = "failed", "this rank has not come to the end"
        return [found.get(number, lost) for number in range(self.size)]

    def close(self) -> None:
        self._stack.close()


class Worlds:
    """A plugin of pytest: at most one world at a time, kept from test to test.

    Args:
        servers: words of the fork servers that are to be used in turns where a test asks for
            ``hash_seeds=True``: neighbours go through a set in different orders then.
    """

    def __init__(self, *servers: list[str]) -> None:
        self._servers = servers
        self._world: World | None = None
        self._kind: tuple[int, bool] = 0, False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """pytest's limit is above those of a world, which say what the ranks are doing."""
        for item in items:
            mark = item.get_closest_marker("on_ranks")
            if mark is not None and item.get_closest_marker("timeout") is None:
                limit = mark.kwargs.get("limit", LIMIT)
                item.add_marker(pytest.mark.timeout(START_LIMIT + limit + 2 * SPARE))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        mark = pyfuncitem.get_closest_marker("on_ranks")
        if mark is None:
            return None
        settings = dict(mark.kwargs)
        world = self._of(mark.args[0], hash_seeds=settings.pop("hash_seeds", False))
        written = world.written()
        try:
            found = world.run(call_of(pyfuncitem, **settings))
        except BaseException:
            self.close()
            raise
        failed: dict[str, list[int]] = {}
        for rank, (how, text) in enumerate(found):
            if how == "failed":
                failed.setdefault(text, []).append(rank)
        if failed:
            texts = [f"on rank {', '.join(map(str, of))}: {text}" for text, of in failed.items()]
            texts += ["output of the ranks:", world.output(written)]
            self.close()
            pytest.fail("\n".join(texts), pytrace=False)
        skipped = [text for how, text in found if how == "skipped"]
        if skipped:
            pytest.skip(skipped[0])
        return True

    def _of(self, size: int, *, hash_seeds: bool) -> World:
        worn = self._world is not None and self._world.is_worn
        if worn or self._kind != (size, hash_seeds):
            self.close()
        if self._world is None:
            servers = self._servers if hash_seeds else self._servers[:1]
            self._world, self._kind = World(size, with_seeds(*servers)), (size, hash_seeds)
        return self._world

    @pytest.hookimpl(tryfirst=True)  # before what is left behind is looked for
    def pytest_sessionfinish(self) -> None:
        self.close()

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


def call_of(item: pytest.Function, *, limit: float = LIMIT, hosts: int = 0) -> Call:
    from rank_loop import Call  # which imports torch, and the process that has workers does not

    names = item._fixtureinfo.argnames
    _, code = _rewrite_test(item.path, item.config)
    return Call(
        path=str(item.path),
        module=item.function.__module__,
        code=marshal.dumps(code),
        function=item.originalname,
        arguments=pickle.dumps({name: item.funcargs[name] for name in names}),
        limit=limit,
        hosts=hosts,
        environment={name: os.environ[name] for name in ("HITS_TEST",) if name in os.environ},
    )
