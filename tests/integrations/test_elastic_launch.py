"""torchrun starts the ranks anew when one dies, with the same or another number of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, port, run_together

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("scenarios") / "elastic_job.py"
TORCHRUN = ["-m", "torch.distributed.run", "--max-restarts=2"]
LIMIT = 100.0
SAMPLES = list(range(24))


def launch(
    python: str, folder: Path, *agents: list[str], framework: str = "lightning", **options: Any
) -> Finished:
    """A job of one torchrun for every list of its options; what the first one left."""
    script = [SCRIPT, folder, framework, json.dumps({"strategy": "compressed_ddp", **options})]
    commands = [[python, *TORCHRUN, *agent, *script] for agent in agents]
    return run_together(commands, [{}] * len(agents), limit=LIMIT)[0]


def told(folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def c10d(nodes: int = 1) -> list[str]:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{port()}"
    return [f"--nnodes={nodes}", "--rdzv-backend=c10d", "--rdzv-id=job", endpoint]


BACKENDS = {
    "c10d": c10d,
    "static": lambda: [f"--master-port={port()}"],
    "standalone": lambda: ["--standalone"],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_goes_on_after_a_rank_died(
    backend: str, tmp_path: Path, quick_executable: str
) -> None:
    options = [*BACKENDS[backend](), "--nproc-per-node=2"]
    launch(quick_executable, tmp_path, options, dies=1).require_success()
    facts = told(tmp_path, ranks=2)
    assert [each["restarts"] for each in facts] == [1, 1]
    assert sorted(facts[0]["seen"] + facts[1]["seen"]) == SAMPLES
    assert all(each["devices"] == 2 for each in facts)  # nobody had said devices=2


def test_fabric_goes_on_too(tmp_path: Path, quick_executable: str) -> None:
    options = [*BACKENDS["static"](), "--nproc-per-node=2"]
    launch(quick_executable, tmp_path, options, framework="fabric", dies=0).require_success()
    facts = told(tmp_path, ranks=2)
    assert [each["restarts"] for each in facts] == [1, 1]
    assert sorted(facts[0]["seen"] + facts[1]["seen"]) == SAMPLES


def test_nodes_with_different_numbers_of_ranks(tmp_path: Path, quick_executable: str) -> None:
    """Every agent counts its own restarts, so the ranks need not have the same count."""
    shared = c10d(nodes=2)
    agents = [[*shared, f"--nproc-per-node={ranks}"] for ranks in (2, 1)]
    finished = launch(
        quick_executable, tmp_path, *agents, dies=1, devices=2, num_nodes=2, plugin=True
    )
    assert "devices * num_nodes is" not in finished.require_success().output
    facts = told(tmp_path, ranks=3)
    assert max(each["restarts"] for each in facts) == 1
    assert sorted(number for each in facts for number in each["seen"]) == SAMPLES
    assert sorted(each["devices"] for each in facts) == [1, 2, 2]


def test_fewer_ranks_than_the_script_says(tmp_path: Path, quick_executable: str) -> None:
    finished = launch(quick_executable, tmp_path, ["--nproc-per-node=1"], devices=2, num_nodes=2)
    finished.require_success()
    (facts,) = told(tmp_path, ranks=1)
    assert sorted(facts["seen"]) == SAMPLES
    assert facts["num_nodes"] == 1
    told_so = "follows the launcher: 1 ranks on this node, not devices=2 and 1 nodes, not num_nodes"
    assert finished.output.count(told_so) == 1


def test_stock_ddp_with_the_plugin(tmp_path: Path, quick_executable: str) -> None:
    """It starts, and says what Lightning's sampler makes of a world size that is another."""
    options = ["--nproc-per-node=1"]
    finished = launch(quick_executable, tmp_path, options, strategy="ddp", plugin=True, devices=2)
    finished.require_success()
    assert "devices * num_nodes is 2 * 1" in finished.output
    (facts,) = told(tmp_path, ranks=1)
    assert facts["world_size"] == 1
