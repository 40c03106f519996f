"""Told to end where the last checkpoint cannot be written: what is said is what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import Fault, Job, run_jobs
from processes import Finished, run

from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.elastic.process.lifecycle import EXIT_UNSAVED

MAIN = """
import json, logging, resource, sys, threading
from pathlib import Path
from elastic_jobs import KINDS, limit_files_of_writer
from elastic_runs import FailAt, fit
from loop_runs import train
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.elastic.process.preemption import PreemptionListener
saving = {"on_error": "warn", "writer": "process", "snapshot": "sync"}
framework, folder, steps = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
def space_after_a_failure():
    on_failed = Checkpointer._on_failed
    def mended(self, event):
        limit_files_of_writer(resource.RLIM_INFINITY)
        on_failed(self, event)
    Checkpointer._on_failed = mended
def terminate():  # and wait until the thread of signals has taken note of it
    heard, give = threading.Event(), PreemptionListener.give
    def told(self, reason):
        give(self, reason)
        heard.set()
    PreemptionListener.give = told
    KINDS["terminate"]()
    assert heard.wait(60)
kinds = KINDS | {"terminate": terminate}
actions = {at: kinds[kind] for kind, at in steps.items() if kind in kinds}
def strike(place, step):
    if place == "after_backward" and step in actions:
        actions[step]()
logging.basicConfig(level=logging.INFO)
if "space" in steps:
    space_after_a_failure()
if framework == "trainer":
    hooks = [FailAt("on_after_backward", at, action) for at, action in actions.items()]
    fit(folder, *hooks, elastic={**saving, "every_n_train_steps": 4})
else:
    train(folder, "plain", strike=strike, saving=saving, elastic={"every_n_train_steps": 4})
"""
FRAMEWORKS = ("trainer", "loop")


@pytest.fixture(scope="module")
def end(quick_python: list[str]) -> Callable[..., Finished]:
    """Train with a checkpoint every 4 steps, and with something that happens at some steps."""

    def end(framework: str, folder: Path, **steps: int) -> Finished:
        command = [*quick_python, "-c", MAIN, framework, folder, json.dumps(steps)]
        return run(command, limit=90)

    return end


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_any_checkpoint(framework: str, end: Any, tmp_path: Path) -> None:
    done = end(framework, tmp_path, full_disk=0, terminate=7)
    assert (
        "elastic: preempted at step 8 (rank 0: SIGTERM), which could not be saved; there is no "
        "complete checkpoint;" in done.output
    )
    assert "is saved" not in done.output
    assert done.returncode == EXIT_UNSAVED == 74
    assert newest_valid(str(tmp_path / "ckpt")) is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_with_an_earlier_checkpoint(framework: str, end: Any, tmp_path: Path) -> None:
    done = end(framework, tmp_path, full_disk=5, terminate=7)
    assert (
        "elastic: preempted at step 8 (rank 0: SIGTERM), which could not be saved; the last "
        "complete checkpoint is of step 4;" in done.output
    )
    assert done.returncode == EXIT_UNSAVED
    newest = newest_valid(str(tmp_path / "ckpt"))
    assert newest is not None
    assert "step=4.ckpt" in newest.path


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_with_that_of_an_earlier_start(framework: str, end: Any, tmp_path: Path) -> None:
    assert end(framework, tmp_path, terminate=3).returncode == 0
    done = end(framework, tmp_path, full_disk=4, terminate=7)
    assert "which could not be saved; the last complete checkpoint is of step 4;" in done.output
    assert done.returncode == EXIT_UNSAVED


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_save_of_this_step_that_failed_is_tried_again(
    framework: str, end: Any, tmp_path: Path
) -> None:
    """Step 8 is due, and the one at which all stop; after its failure there is space again."""
    done = end(framework, tmp_path, full_disk=5, space=8, terminate=7)
    assert "elastic: preempted at step 8 (rank 0: SIGTERM); checkpoint committed" in done.output
    assert done.returncode == 0
    newest = newest_valid(str(tmp_path / "ckpt"))
    assert newest is not None
    assert "step=8" in newest.path


@pytest.mark.timeout(240)
def test_all_ranks_know(tmp_path: Path, quick_python: list[str]) -> None:
    """Rank 0 cannot write. Rank 1 is told to end; or else a failure ends all at one step."""
    jobs = []
    for framework, hook in (("trainer", "on_after_backward"), ("plain", "after_backward")):
        for on_error in ("warn", "raise"):
            faults = [Fault("full_disk", hook, 5, (0,))]
            faults += [Fault("terminate", hook, 7)] if on_error == "warn" else []
            saving = {"on_error": on_error, "writer": "process", "snapshot": "sync"}
            fit: dict[str, Any] = {"elastic": {"every_n_train_steps": 4}}
            if framework == "trainer":
                fit["elastic"] |= saving
            else:
                fit["saving"] = saving
            name = f"{framework}-{on_error}"
            folder = str(tmp_path / name)
            jobs.append(
                Job(name, folder, faults=faults, max_restarts=0, framework=framework, fit=fit)
            )
    done = run_jobs(jobs, tmp_path, python=quick_python)
    for job in jobs:
        assert not done[job.name]["hung"]
        if job.name.endswith("warn"):
            # The agent ends the other one as soon as the first is gone.
            codes = {path.read_text() for path in Path(job.folder).glob("exit-0-*")}
            assert codes == {"74"}, job.name
        else:
            journals = Path(job.folder, "ckpt", "elastic").glob("rank-*.jsonl")
            ends = [json.loads(each.read_text().splitlines()[-1]) for each in journals]
            assert {each["rank"] for each in ends} == {0, 1}
            (reason,) = {each["reason"] for each in ends}
            assert reason.startswith("CheckpointError: The checkpoint "), job.name
            assert "was not written: OSError" in reason
