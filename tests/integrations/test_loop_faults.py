"""Loops of the user's own whose ranks die or are told to go; the end is that of a quiet run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import Fault, Job, run_jobs, selected
from elastic_runs import SIZE, committed
from loop_runs import train
from tiers import some_exhaustive

from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.reading import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test waits for all jobs

EXACT: Mapping[str, Any] = {"codec": "none", "fit": {"noisy": False}}
FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "rank 1 killed in a pass": (Fault("kill", "in_pass", 5),),
    "rank 0 killed between steps": (Fault("kill", "after_step", 5, (0,)),),
    "rank 1 killed after an epoch": (Fault("kill", "after_epoch", 6),),
    "rank 1 has a mistake": (Fault("raise", "after_step", 3),),
    "rank 0 told to end": (Fault("terminate", "in_pass", 7, (0,)),),
}
EXHAUSTIVE = (
    *("rank 0 killed between steps", "rank 1 has a mistake"),
    *("rank 1 killed after an epoch", "one rank hangs"),
)
OTHERS = ("accelerate", "fabric")
SHARDED = "rank 1 killed, sharded checkpoints"
STATEFUL = "map-style, stateful loader"


def job(name: str, folder: Path, *faults: Fault, **settings: Any) -> Job:
    path = folder / name.replace(" ", "-")
    return Job(path.name, str(path), faults=faults, **{"framework": "plain", **settings})


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    quick_python: list[str],
) -> dict[str, tuple[Job, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("loops")
    killed, told = Fault("kill", "in_pass", 5), Fault("requeue", "after_step", 5, (0, 1))
    requeued = {"fit": {"elastic": {"signals": [signal.SIGTERM, signal.SIGUSR1]}}}
    jobs = {
        "reference": job("reference", folder),
        **{name: job(name, folder, *faults) for name, faults in FAULTS.items()},
        **{name: job(name, folder, killed, framework=name) for name in OTHERS},
        SHARDED: job("sharded", folder, killed, fit={"elastic": {"format": "sharded"}}),
        "all told": job("all told", folder, told, worlds=(2, 2), **requeued),
        "exact": job("exact", folder, **EXACT),
        "2, then 1, then 3": job(
            "2 1 3",
            folder,
            Fault("terminate", "after_step", 3, (0, 1), start=0),
            Fault("terminate", "after_step", 9, (0,), start=1),
            worlds=(2, 1, 3),
            **EXACT,
        ),
        "fabric on 2, then 1": job(
            "fabric 2 1",
            folder,
            Fault("terminate", "after_step", 7, (0, 1), start=0),
            worlds=(2, 1),
            framework="fabric",
            fit={"data": STATEFUL},
        ),
        "one rank hangs": job(
            "one hangs",
            folder,
            Fault("stop", "in_pass", 4, (0,)),
            fit={"elastic": {"hang_timeout": 4}},
        ),
    }
    left_out = set(EXHAUSTIVE) - selected(request)
    jobs = {name: each for name, each in jobs.items() if name not in left_out}
    done = run_jobs(list(jobs.values()), folder, python=quick_python)
    return {name: (each, done[each.name]) for name, each in jobs.items()}


def end_of(job: Job) -> dict[str, Any]:
    last = len(job.worlds) - 1
    ends = [json.loads(p.read_text()) for p in Path(job.folder).glob(f"end-{last}-*.json")]
    assert len(ends) == job.worlds[-1], Path(job.folder, "output.txt").read_text()[-3000:]
    assert len({each["hash"] for each in ends}) == 1
    return ends[0]


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    newest = newest_valid(str(Path(job.folder) / "ckpt"))
    assert newest is not None
    weights: dict[str, torch.Tensor] = load(newest.path, weights_only=False)["objects"]["model"]
    return weights


def ids_of(job: Job) -> list[list[int]]:
    return [step.ids for step in committed(Path(job.folder) / "account").values()]


@pytest.mark.parametrize(
    "name",
    some_exhaustive([*FAULTS, *OTHERS, SHARDED, "all told", "one rank hangs"], EXHAUSTIVE),
)
def test_the_end_is_that_of_a_run_without_a_fault(name: str, outcomes: Any) -> None:
    """Every framework, to the bit, residuals of int8 and generators of both ranks included."""
    reference, _ = outcomes["reference"]
    found, result = outcomes[name]
    assert not result["hung"]
    assert end_of(found) == end_of(reference)
    assert end_of(found)["left"] == [], "process groups"
    assert ids_of(found) == ids_of(reference)
    assert list(Path(found.folder).glob("fired-*")), "the fault did not happen"


def test_every_rank_writes_its_part_of_a_sharded_checkpoint(outcomes: Any) -> None:
    newest = newest_valid(str(Path(outcomes[SHARDED][0].folder) / "ckpt"))
    assert newest is not None
    parts = [path.stat().st_size for path in Path(newest.path).glob("*.bin")]
    assert len(parts) == 2
    assert min(parts) > 4 * 8 * 4  # half of weights and momentum


def test_what_a_restart_has_cost_is_for_the_loggers_of_rank_0(outcomes: Any) -> None:
    found, _ = outcomes["rank 1 killed in a pass"]
    first, other = (json.loads(Path(found.folder, f"metrics-{n}.json").read_text()) for n in "01")
    assert other == {}
    assert (first["elastic/restarts"], first["elastic/world_size"]) == (1, 2)
    assert first["elastic/samples_recomputed"] == 8  # 5 steps of 8 samples, 4 of them saved
    assert 0 < first["elastic/lost_time_s"] < 60
    assert first["checkpoint/failed"] == 0
    assert first["checkpoint/bytes"] > 0


def test_every_sample_once_in_each_epoch(outcomes: Any) -> None:
    found, _ = outcomes["reference"]
    steps = committed(Path(found.folder) / "account").values()
    for epoch in range(3):
        ids = [number for step in steps if step.epoch == epoch for number in step.ids]
        assert sorted(ids) == list(range(SIZE))


def test_other_numbers_of_ranks_see_the_same_global_batches(outcomes: Any) -> None:
    reference, _ = outcomes["exact"]
    found, result = outcomes["2, then 1, then 3"]
    assert not result["hung"]
    assert ids_of(found) == ids_of(reference)
    worlds = [step.world for step in committed(Path(found.folder) / "account").values()]
    assert sorted(set(worlds)) == [1, 2, 3]
    assert end_of(found)["step"] == end_of(reference)["step"] == 18
    for name, weight in weights_of(reference).items():
        torch.testing.assert_close(weights_of(found)[name], weight, rtol=1e-4, atol=1e-6)


def test_fabric_goes_on_with_fewer_ranks(outcomes: Any, tmp_path: Path) -> None:
    """With torchdata's loader, whose order of samples is that of one process."""
    found, result = outcomes["fabric on 2, then 1"]
    assert not result["hung"]
    train(tmp_path, "plain", data=STATEFUL, elastic={"gradient_accumulation_steps": 2})
    steps = committed(tmp_path / "account")
    assert ids_of(found) == [step.ids for step in steps.values()]
    assert end_of(found)["step"] == len(steps) == 18


def test_a_signal_ends_ranks_as_it_does_under_a_trainer(outcomes: Any) -> None:
    """Told ranks with 0, the others with 75: the agent starts all again."""
    told, _ = outcomes["rank 0 told to end"]
    assert "exitcode: 75" in Path(told.folder, "output.txt").read_text()
    requeued, result = outcomes["all told"]
    assert result["codes"] == ["ok", "ok"]
    for each, reason in ((told, "SIGTERM"), (requeued, "SIGUSR1")):
        account = Path(each.folder, "ckpt", "elastic", "rank-0.jsonl").read_text()
        assert f'"reason": "{reason}"' in account
