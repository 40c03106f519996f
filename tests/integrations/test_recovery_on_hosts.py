"""Trainings of two nodes that recover in their processes: a node dies, or its link goes down."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import environment_of, kill_tree
from recovering_loops import EPOCHS, SIZE, train

from benchmarks.harness.testbed import INTERFACE, Testbed, TestbedUnavailable

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "recovering_loops.py"
STEP, LIMIT = 6, 100.0
NODES, RANKS = 2, 2


class Nodes:
    """A launcher in each of two network namespaces, and what their workers have written down."""

    def __init__(self, testbed: Testbed, python: list[str], folder: Path, **told: Any) -> None:
        self._testbed, self.folder = testbed, folder
        endpoint = f"{testbed.address(0)}:29400"
        self.launchers = []
        for node in range(NODES):
            options = [
                *("--monitor-interval=0.05", f"--nnodes={NODES}", f"--nproc-per-node={RANKS}"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"),
                f"--rdzv-conf=is_host={int(node == 0)}",
                *(f"--local-addr={testbed.address(node)}", "--max-restarts=3"),
                *("--no-python", *python, str(SCRIPT), str(folder), json.dumps(told)),
            ]
            words = ["ip", "netns", "exec", testbed.namespace(node), *python]
            settings = {
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "LIGHTNING_DIST_HOSTNAME": f"host{node}",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "LIGHTNING_DIST_BEAT_TIMEOUT": "5",
            }
            with self._log(node).open("wb") as log:
                launcher = subprocess.Popen(
                    [*words, "-m", "lightning_dist.elastic.agent", *options],
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

    def lines(self, node: int) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob(f"{node}.*.jsonl"):
            lines = path.read_text().splitlines(True)
            found += [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    def wait_for_step(self, step: int) -> None:
        """Until every worker has committed it."""
        end = time.monotonic() + LIMIT
        while (
            sum(line.get("committed") == step for n in range(NODES) for line in self.lines(n)) < 4
        ):
            assert time.monotonic() < end, "\n".join(map(self.said, range(NODES)))
            time.sleep(0.02)

    def wait_for_the_end_of(self, node: int) -> None:
        """Until no process of a node that was killed is left."""
        end = time.monotonic() + LIMIT
        words = ["ip", "netns", "pids", self._testbed.namespace(node)]
        while subprocess.run(words, capture_output=True, check=True, timeout=30).stdout.split():
            assert time.monotonic() < end, "processes of a killed node are left"
            time.sleep(0.02)

    def require_exact(self, expected: dict[str, torch.Tensor]) -> None:
        """Of the first node, which goes on by itself."""
        assert self.launchers[0].wait(LIMIT) == 0, self.said(0)
        lines = self.lines(0)
        taken = {line["committed"]: line["generation"] for line in lines if "committed" in line}
        assert sorted(taken) == [*range(1, 1 + EPOCHS * -(-SIZE // (4 * NODES * RANKS)))]
        every = [*lines, *self.lines(1)]
        for epoch in range(EPOCHS):
            ids = [
                number
                for line in every
                if line.get("epoch") == epoch and taken.get(line["computed"]) == line["generation"]
                for number in line["ids"]
            ]
            assert sorted(ids) == [*range(SIZE)]
        assert len({line["hash"] for line in lines if "end" in line}) == 1
        weights = torch.load(max(self.folder.glob("weights-0.*.pt")))
        for name, weight in weights.items():
            if name != "passes":
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                kill_tree(launcher.pid)
            launcher.wait()


@pytest.fixture
def testbed() -> Iterator[Testbed]:
    try:
        with Testbed(hosts=NODES, link_mbit=None) as testbed:
            yield testbed
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run of one process without a fault."""
    folder = tmp_path_factory.mktemp("reference")
    return dict(train(folder, {"accumulate": NODES * RANKS}).state_dict())


@pytest.mark.parametrize("fault", ["node killed", "link down"])
def test_the_other_node_goes_on(
    fault: str,
    testbed: Testbed,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """It is found by beats, and what comes later of the lost one changes nothing."""
    nodes = Nodes(testbed, quick_python, tmp_path, waits=["struck", STEP], accumulate=4)
    link = ["ip", "-n", testbed.namespace(1), "link", "set", INTERFACE]
    try:
        nodes.wait_for_step(STEP)
        if fault == "node killed":
            kill_tree(nodes.launchers[1].pid)
            nodes.wait_for_the_end_of(1)
        else:
            subprocess.run([*link, "down"], check=True, timeout=30)
        (tmp_path / "struck").touch()
        nodes.require_exact(expected)
        if fault == "link down":
            subprocess.run([*link, "up"], check=True, timeout=30)
            assert nodes.launchers[1].wait(LIMIT) != 0
        assert max(line.get("committed", 0) for line in nodes.lines(1)) == STEP
        assert "no heartbeat for 5" in nodes.said(0) or "was lost" in nodes.said(0)
    finally:
        nodes.close()
