"""Ranks of an accelerator that are lost, on the simulated one; and what one GPU can show of NCCL.

The host does not wait for its collectives, and those that were aborted look as if they were
complete, with whatever was in memory.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from processes import ROOT, run
from recovering_jobs import STEP, LoopJob
from simulated_device.device import build, can_build
from tiers import some_exhaustive

from lightning_dist.base.features import RECOVERY

GROUPS = Path(__file__).with_name("accelerated_groups.py")
LAST = 15

pytestmark = [needs(RECOVERY), pytest.mark.timeout(400)]


@pytest.fixture
def device() -> None:
    """Built once, while no process is waited for."""
    if not can_build():
        pytest.skip("needs g++")
    build()


def with_fault(place: str, action: str = "kill", victim: str = "0.1.0") -> dict[str, Any]:
    return {"faults": [[victim, place, STEP, action]], "joins": 10}


FAULTS = {
    "in a collective": with_fault("between buckets"),
    "before the vote": with_fault("before the vote", victim="0.0.0"),
    "after the vote": with_fault("after the vote", victim="0.2.0"),
    "stopped": {**with_fault("forward", "stop"), "beats": "5"},
    "while groups are made": {
        "faults": [["0.0.0", "between buckets", STEP], ["0.1.0", "groups", STEP]],
        "joins": 10,
    },
    "while it is healed": {
        "faults": [["0.1.0", "forward", STEP], ["0.1.1", "healed", None]],
        "joins": 10,
    },
}


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "how", some_exhaustive([*FAULTS], {*FAULTS} - {"in a collective", "after the vote"})
)
@pytest.mark.usefixtures("device")
def test_a_lost_rank_of_an_accelerator_changes_no_weight(
    how: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Sums that were aborted are in no weight, on no rank."""
    job = LoopJob(tmp_path, quick_python, accelerated=True, **FAULTS[how])
    job.require_exact()
    worlds = job.by_step("world")
    assert worlds[STEP + 2] < 3
    assert worlds[LAST] == 3
    assert "restarting all workers" not in job.output


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
@pytest.mark.usefixtures("device")
def test_compressed_ranks_of_an_accelerator_stay_equal(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Rank 0 dies after a vote whose answer rank 1 has not heard; codec int8, and int4 in nodes."""
    told = {"faults": [["0.0.0", "after the vote", STEP]], "lost": [["0.1.0", STEP, "0.2.0"]]}
    for name, of_job in {
        "int8": {"codec": "int8", **told},
        "int4": {"codec": "int4", "ranks": 4, "per_host": 2, **with_fault("between buckets")},
    }.items():
        job = LoopJob(tmp_path / name, quick_python, accelerated=True, **{**of_job, "joins": 8})
        job.require_exact()
        assert "restarting all workers" not in job.output


def in_one_generation_after_the_other(kind: str, python: list[str]) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = run([*python, GROUPS, kind], limit=120, PYTHONPATH=path, TORCH_DIST_USE_NCCL2="1")
    return done.require_success().output


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_aborted_groups_do_not_work_until_they_have_members(quick_python: list[str]) -> None:
    assert "connected 3 times" in in_one_generation_after_the_other("sim", quick_python)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_aborted_groups_of_nccl_do_not_work_until_they_have_members() -> None:
    assert "connected 3 times" in in_one_generation_after_the_other("cuda", [sys.executable])
