"""Restarts that ranks ask for, and those that failures cost, under our agent and torchrun's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Finished, run

OURS, STOCK = "lightning_dist.elastic.agent", "torch.distributed.run"
Start = Callable[..., tuple[Finished, int]]
SCRIPT = """
import json, os, sys
folder, codes = sys.argv[1], json.loads(sys.argv[2])
starts = len(os.listdir(folder))
if os.environ["RANK"] == "0":
    open(os.path.join(folder, f"start-{starts}"), "w").close()
    sys.exit(codes[starts])
"""


@pytest.fixture
def start(tmp_path: Path, quick_python: list[str]) -> Start:
    """Start a job of one rank that ends with one of the codes at every start; with its starts."""

    def start(module: str, codes: list[int], *, max_restarts: int) -> tuple[Finished, int]:
        script, folder = tmp_path / "script.py", tmp_path / "starts"
        script.write_text(SCRIPT)
        folder.mkdir()
        command = [
            *(*quick_python, "-m", module, "--standalone", f"--max-restarts={max_restarts}"),
            *("--monitor-interval=0.05", script, folder, json.dumps(codes)),
        ]
        return run(command, limit=110), len(list(folder.iterdir()))

    return start


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_planned_stops_cost_nothing(max_restarts: int, start: Start) -> None:
    codes = [75] * (max_restarts + 1) + [0]
    done, starts = start(OURS, codes, max_restarts=max_restarts)
    done.require_success()
    assert starts == len(codes)


@pytest.mark.parametrize(
    ("codes", "max_restarts"),
    [([75, 1, 75, 75, 1, 0], 1), ([74, 0], 0), ([76, 0], 0)],
)
def test_failures_cost_what_they_did(codes: list[int], max_restarts: int, start: Start) -> None:
    """Between planned stops, as many as ``max_restarts`` says."""
    done, starts = start(OURS, codes, max_restarts=max_restarts)
    assert done.returncode == 1
    assert f"(exitcode: {codes[-2]})" in done.output
    assert starts == len(codes) - 1


def test_under_stock_torchrun_a_planned_stop_costs_a_restart(start: Start) -> None:
    """What the documents say of it."""
    done, starts = start(STOCK, [75, 75, 0], max_restarts=1)
    assert done.returncode == 1
    assert starts == 2


def test_an_agent_whose_machine_is_lost_ends_as_after_a_signal(start: Start) -> None:
    """It does not come back to be lost, which would be a failure to all others."""
    done, starts = start(OURS, [77, 0], max_restarts=3)
    assert done.returncode == 1
    assert "SignalException" in done.output
    assert starts == 1
