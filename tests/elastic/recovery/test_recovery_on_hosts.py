"""Trainings of two nodes that recover in their processes: a node dies, or its link goes down."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from processes import environment_of, kill_tree
from recovering_jobs import STEP, LoopJob, Written, weights_alone
from recovering_loops import EPOCHS, SIZE

from benchmarks.harness.testbed import INTERFACE, Testbed, TestbedUnavailable
from lightning_dist.base.features import RECOVERY

pytestmark = [needs(RECOVERY), pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT = 100.0


class Nodes(Written):
    """A launcher in each network namespace, and what their workers have written down."""

    def __init__(
        self, testbed: Testbed, python: list[str], folder: Path, *, ranks: int = 2, **told: Any
    ) -> None:
        super().__init__(folder, testbed.hosts * ranks)
        self._testbed = testbed
        endpoint = f"{testbed.address(0)}:29400"
        self.launchers = []
        for node in range(testbed.hosts):
            options = [
                *("--monitor-interval=0.05", f"--nnodes={testbed.hosts}"),
                f"--nproc-per-node={ranks}",
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"),
                f"--rdzv-conf=is_host={int(node == 0)}",
                *(f"--local-addr={testbed.address(node)}", "--max-restarts=3"),
                *("--no-python", *python, str(LoopJob.script), str(folder), json.dumps(told)),
            ]
            words = ["ip", "netns", "exec", testbed.namespace(node), *python]
            settings = {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "LIGHTNING_DIST_HOSTNAME": f"host{node}",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "LIGHTNING_DIST_BEAT_TIMEOUT": "5",
                "LIGHTNING_DIST_MIN_WORKERS": "2",
            }
            with self._log(node).open("wb") as log:
                launcher = subprocess.Popen(
                    [*words, "-m", "lightning_dist.elastic.launcher", *options],
                    env=environment_of(settings),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.launchers.append(launcher)

    def _log(self, node: int) -> Path:
        return self.folder / f"node{node}.txt"

    def said(self, node: int) -> str:
        return self._log(node).read_text(errors="replace")

    @property
    def _nodes(self) -> range:
        return range(self._testbed.hosts)

    def wait_for_step(self, step: int, *, ranks: int | None = None) -> None:
        """Until so many workers have committed it, all if None."""
        ranks = ranks or self.ranks
        self.wait_until(
            lambda: sum(line["committed"] == step for line in self.of("committed")) >= ranks
        )

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not is_true():
            assert time.monotonic() < end, "\n".join(map(self.said, self._nodes))
            time.sleep(0.02)

    def wait_for_the_end_of(self, node: int) -> None:
        """Until no process of a node that was killed is left."""
        self.wait_until(lambda: not self.processes(node))

    def processes(self, node: int) -> list[int]:
        words = ["ip", "netns", "pids", self._testbed.namespace(node)]
        done = subprocess.run(words, capture_output=True, check=True, timeout=30)
        return [*map(int, done.stdout.split())]

    def set_link(self, node: int, state: str) -> None:
        words = ["ip", "-n", self._testbed.namespace(node), "link", "set", INTERFACE, state]
        subprocess.run(words, check=True, timeout=30)

    def require_exact(self) -> None:
        """Each step in one generation, and the weights of the first node."""
        assert self.launchers[0].wait(LIMIT) == 0, self.said(0)
        super().require_exact()
        taken = {(line["committed"], line["generation"]) for line in self.of("committed")}
        assert len(taken) == len(dict(taken))
        self.require_weights(weights_alone(self.ranks))

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                kill_tree(launcher.pid)
            launcher.wait()


@pytest.fixture
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    try:
        with Testbed(hosts=getattr(request, "param", 2), link_mbit=None) as testbed:
            yield testbed
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("fault", ["node killed", "link down"])
def test_the_other_node_goes_on(
    fault: str, testbed: Testbed, tmp_path: Path, quick_python: list[str]
) -> None:
    """It is found by beats, and what comes later of the lost one changes nothing."""
    nodes = Nodes(testbed, quick_python, tmp_path, waits=["struck", STEP], accumulate=4)
    try:
        nodes.wait_for_step(STEP)
        if fault == "node killed":
            kill_tree(nodes.launchers[1].pid)
            nodes.wait_for_the_end_of(1)
        else:
            nodes.set_link(1, "down")
        (tmp_path / "struck").touch()
        nodes.require_exact()
        if fault == "link down":
            nodes.set_link(1, "up")
            assert nodes.launchers[1].wait(LIMIT) != 0
        lost = [nodes.steps_of(name) for name in nodes.lines if name.startswith("1.")]
        assert max(set().union(*lost)) == STEP
        assert "no heartbeat for " in nodes.said(0) or "was lost" in nodes.said(0)
    finally:
        nodes.close()


@pytest.mark.parametrize("testbed", [3], indirect=True)
@pytest.mark.parametrize("fault", ["link down", "link up while groups are made", "stopped"])
def test_a_leader_alone_is_evicted_and_writes_nothing_until_its_successor_comes(
    fault: str, testbed: Testbed, tmp_path: Path, quick_python: list[str]
) -> None:
    """One rank on each of three nodes: the leader is cut off, or its node stands still.

    It takes no step by itself, and ends before another one may write; a new process joins.
    """
    last = EPOCHS * SIZE // 12
    told = {
        "joins": [2, *range(STEP + 3, last)],
        "saves": 1,
        "limit": 60,
        "waits": ["struck", STEP],
        # 1.0.0 leads the others. In the generation after it there is time for more.
        "faults": [["0.0.0", "forward", 1], ["2.0.0", "groups", STEP, "wait"]],
    }
    nodes = Nodes(testbed, quick_python, tmp_path, ranks=1, **told)
    try:
        nodes.wait_until(lambda: len([*tmp_path.glob(f"begun-{STEP}/*")]) == 3)
        if fault == "stopped":
            stopped = nodes.processes(1)
            for process in stopped:
                os.kill(process, signal.SIGSTOP)
        else:
            nodes.set_link(1, "down")
        (tmp_path / "struck").touch()
        nodes.wait_until((tmp_path / "waiting").exists)
        if fault == "link up while groups are made":
            nodes.set_link(1, "up")
        (tmp_path / "go on").touch()
        if fault == "stopped":
            for process in stopped:
                with suppress(ProcessLookupError):  # one that goes on first ends the others
                    os.kill(process, signal.SIGCONT)
        if fault == "link down":
            nodes.wait_until(lambda: "has not answered the leader for 10 s" in nodes.said(1))
            nodes.wait_for_step(STEP + 3, ranks=2)
            nodes.set_link(1, "up")
        nodes.require_exact()
        assert [launcher.wait(LIMIT) for launcher in nodes.launchers] == [0, 0, 0]
    finally:
        nodes.close()
    assert max(nodes.steps_of("1.0.0")) == STEP
    assert max(nodes.steps_of("1.0.1")) == last
    assert min(nodes.steps_of("1.0.1")) > STEP
    assert "worker 1.0.0 was lost: no heartbeat for " in nodes.said(0) + nodes.said(2)
    assert {path.name for path in (tmp_path / "ckpt").glob("*.ckpt")} == {
        f"epoch={EPOCHS - 1 + (step == last)}-step={step}.ckpt" for step in (last - 1, last)
    }
    journal = [
        json.loads(line)
        for path in (tmp_path / "ckpt/elastic").glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    changes = [line for line in journal if line["event"] == "change"]
    numbers = [line["generation"] for line in sorted(changes, key=lambda line: line["time"])]
    assert numbers == sorted({*numbers})
