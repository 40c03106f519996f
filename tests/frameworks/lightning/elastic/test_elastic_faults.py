"""Ranks that die, hang or are told to go; the training ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import Fault, Job, run_jobs, selected
from elastic_runs import SIZE, Step, committed
from tiers import some_exhaustive

from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.reading import load
from lightning_dist.profiling.run import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]  # the first test waits for all jobs


@dataclass(frozen=True)
class Case:
    """Faults and settings of a job, and the one without a fault that ends as it does."""

    faults: Sequence[Fault]
    settings: Mapping[str, Any]
    like: str
    exhaustive: bool


def case(
    *faults: Fault, like: str = "reference", exhaustive: bool = False, **settings: Any
) -> Case:
    return Case(faults, settings, like, exhaustive)


LATER, TOLD = "on_after_backward", "terminate"
IN_BACKWARD = Fault("kill", LATER, 3, (0,))
PROFILED = "rank 1 killed between steps"
"""Has a CommProfiler, which changes nothing of what is said of the others."""

ACCUMULATED: Mapping[str, Any] = {"like": "accumulated", "fit": {"accumulate_grad_batches": 3}}
VALIDATED: Mapping[str, Any] = {"like": "validated", "fit": {"val_check_interval": 2}}
HANGS: Mapping[str, Any] = {"fit": {"elastic": {"hang_timeout": 4}}}
STOCK: Mapping[str, Any] = {"like": "stock ddp without a fault", "codec": None, "max_restarts": 0}
SHARDED: Mapping[str, Any] = {
    "like": "sharded",
    "worlds": (4,),
    "replicas": (2,),
    "fit": {"elastic": {"format": "sharded"}},
}
"""Two replicas of two shards, by compressed_model_parallel."""

LOOP: Mapping[str, Any] = {"like": "loop", "framework": "plain"}
IN_PASS = Fault("kill", "in_pass", 5)
REQUEUED = {"elastic": {"signals": [signal.SIGTERM, signal.SIGUSR1]}}
IN_PARTS = "loop, sharded checkpoints"
COSTS = "loop, rank 1 killed in a pass"

FAULTS = {
    "rank 0 killed at its start": case(Fault("kill", "at_start", ranks=(0,)), exhaustive=True),
    PROFILED: case(Fault("kill"), profiled=True),
    "rank 0 killed in backward": case(Fault("kill", LATER, 5, (0,)), exhaustive=True),
    "rank 0 killed before the optimizer": case(
        Fault("kill", "on_before_optimizer_step", 5, (0,)), exhaustive=True
    ),
    "both killed after a step": case(
        Fault("kill", "on_train_batch_end", 7, (0, 1)), exhaustive=True
    ),
    "rank 0 killed in validation": case(Fault("kill", "on_validation_batch_end", 6, (0,))),
    "rank 1 killed at the end of an epoch": case(Fault("kill", "on_train_epoch_end", 12)),
    "rank 0 killed at the end": case(Fault("kill", "on_train_end", 18, (0,)), exhaustive=True),
    "rank 0 aborts": case(Fault("abort", LATER, 4, (0,)), exhaustive=True),
    "rank 1 exits": case(Fault("exit", LATER, 4), exhaustive=True),
    "rank 1 has a mistake": case(Fault("raise", "on_train_batch_end", 4), exhaustive=True),
    "rank 1 told to end": case(Fault(TOLD, LATER, 7), exhaustive=True),
    "rank 1 told to end in validation": case(Fault(TOLD, "on_validation_batch_end", 6)),
    "rank 1 told to end at the last batch": case(
        Fault(TOLD, "on_train_batch_end", 6), exhaustive=True
    ),
    "rank 1 killed while rank 0 starts again": case(
        Fault("kill", LATER, 4, (0,)),
        Fault("kill", "on_load_checkpoint", 0, (1,)),  # only then is there one
    ),
    "a rank stops": case(Fault("stop", LATER, 4, (0,)), **HANGS),
    "all told to end": case(Fault(TOLD, LATER, 5, (0, 1)), worlds=(2, 2)),
    "killed while accumulating": case(IN_BACKWARD, exhaustive=True, **ACCUMULATED),
    "told while accumulating": case(Fault(TOLD, LATER, 3, (0,)), **ACCUMULATED),
    "killed in a validation within an epoch": case(
        Fault("kill", "on_validation_batch_end", 4), **VALIDATED
    ),
    "sharded, rank 3 killed in backward": case(
        Fault("kill", LATER, 5, (3,)), exhaustive=True, **SHARDED
    ),
    "sharded, rank 2 killed while it saves": case(
        Fault("kill", "fsync", 3, (2,)),
        limit=100,  # the agent kills those that wait for its part after 30 s
        **SHARDED,
    ),
    "sharded, all told to end": case(
        Fault(TOLD, LATER, 5, (0, 1, 2, 3)),
        exhaustive=True,
        **{**SHARDED, "worlds": (4, 4), "replicas": (2, 2)},
    ),
    "stock ddp": case(IN_BACKWARD, exhaustive=True, worlds=(2, 2), **STOCK),
    COSTS: case(IN_PASS, **LOOP),
    "loop, rank 0 killed between steps": case(
        Fault("kill", "after_step", 5, (0,)), exhaustive=True, **LOOP
    ),
    "loop, rank 1 killed after an epoch": case(
        Fault("kill", "after_epoch", 6), exhaustive=True, **LOOP
    ),
    "loop, rank 1 has a mistake": case(Fault("raise", "after_step", 3), exhaustive=True, **LOOP),
    "loop, rank 0 told to end": case(Fault(TOLD, "in_pass", 7, (0,)), **LOOP),
    "loop, all told": case(
        Fault("requeue", "after_step", 5, (0, 1)), worlds=(2, 2), fit=REQUEUED, **LOOP
    ),
    "loop, a rank stops": case(Fault("stop", "in_pass", 4, (0,)), exhaustive=True, **LOOP, **HANGS),
    IN_PARTS: case(IN_PASS, fit=SHARDED["fit"], **LOOP),
    "accelerate": case(IN_PASS, like="loop", framework="accelerate"),
    "fabric": case(IN_PASS, like="loop", framework="fabric"),
}
"""They end as others, to the bit."""

EXACT: Mapping[str, Any] = {
    "like": "exact",
    "codec": "none",
    "max_restarts": 0,
    "module": {"noisy": False},
    "dataset": {"noisy": False},
}
"""Nothing draws at random and no codec rounds: other world sizes give the same sums."""
EXACT_LOOP: Mapping[str, Any] = {
    "like": "exact loop",
    "framework": "plain",
    "codec": "none",
    "fit": {"noisy": False},
}
STATEFUL = {"data": "map-style, stateful loader"}
OTHER_WORLDS = {
    "2, then 4, then 1 ranks": case(
        IN_BACKWARD,
        Fault(TOLD, LATER, 7, (0, 1, 2, 3), 1),
        exhaustive=True,
        worlds=(2, 4, 1),
        **EXACT,
    ),
    "2, then 3, then 2 ranks": case(
        IN_BACKWARD,
        Fault(TOLD, LATER, 7, (2,), 1),
        Fault("wait", "on_exception", 7, (2,), 1),  # until its launcher tells it once more
        worlds=(2, 3, 2),
        **EXACT,
    ),
    "loop, 2, then 1, then 3 ranks": case(
        Fault(TOLD, "after_step", 3, (0, 1)),
        Fault(TOLD, "after_step", 9, (0,), 1),
        worlds=(2, 1, 3),
        **EXACT_LOOP,
    ),
    "fabric, 2, then 1 ranks": case(
        Fault(TOLD, "after_step", 7, (0, 1)),
        like="stateful",
        exhaustive=True,
        framework="fabric",
        worlds=(2, 1),
        fit=STATEFUL,
    ),
}
"""They take the same batches as others."""

# torchdata's loader, whose order of samples is that of one process.
ALONE = {**STATEFUL, "elastic": {"gradient_accumulation_steps": 2}}
CASES = {
    **FAULTS,
    **OTHER_WORLDS,
    "reference": case(),
    "accumulated": case(**ACCUMULATED),
    "validated": case(**VALIDATED),
    "sharded": case(**SHARDED),
    "stock ddp without a fault": case(**STOCK, exhaustive=True),
    "loop": case(**LOOP),
    "exact": case(**EXACT),
    "exact loop": case(**EXACT_LOOP),
    "stateful": case(exhaustive=True, framework="plain", worlds=(1,), fit=ALONE),
}


def names_of(cases: Mapping[str, Case]) -> list[Any]:
    return some_exhaustive(cases, [name for name, each in cases.items() if each.exhaustive])


class Outcome:
    """What became of a job."""

    def __init__(self, job: Job, result: Mapping[str, Any]) -> None:
        self.job, self.folder, self.result = job, Path(job.folder), result

    def account(self) -> dict[int, Step]:
        return committed(self.folder / "account")

    def ids(self) -> list[list[int]]:
        return [step.ids for step in self.account().values()]

    def end(self) -> dict[str, Any]:
        """Of every rank of the last start."""
        last = len(self.job.worlds) - 1
        ends = [json.loads(path.read_text()) for path in self.folder.glob(f"end-{last}-*.json")]
        assert len(ends) == self.job.worlds[-1], self.output()
        assert ends == [ends[0]] * len(ends)
        assert ends[0]["left"] == [], "process groups"
        found: dict[str, Any] = ends[0]
        return found

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()[-3000:]

    def newest(self) -> str:
        found = newest_valid(str(self.folder / "ckpt"))
        assert found is not None
        return found.path

    def reasons(self, rank: int) -> list[str]:
        """Why the starts of a rank have ended."""
        lines = (self.folder / "ckpt" / "elastic" / f"rank-{rank}.jsonl").read_text().splitlines()
        return [line["reason"] for line in map(json.loads, lines) if line["event"] == "end"]

    def require_batches_of(self, reference: Outcome) -> None:
        """The last start ended well, and what counts are the same steps."""
        assert not self.result["hung"], self.output()
        assert self.result["codes"][-1] == "ok", self.result["codes"]
        fired = list(self.folder.glob("fired-*"))
        assert len(fired) == sum(len(fault.ranks) for fault in self.job.faults)
        assert self.ids() == reference.ids()
        assert all(len(step.hashes) == 1 for step in self.account().values())


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    quick_python: list[str],
) -> dict[str, Outcome]:
    """Exhaustive ones where they are asked for."""
    folder, jobs = tmp_path_factory.mktemp("faults"), {}
    wanted = {name for name, each in CASES.items() if not each.exhaustive} | selected(request)
    wanted |= {CASES[name].like for name in wanted & CASES.keys()}
    for name, each in CASES.items():
        if name in wanted:
            path = folder / name.replace(" ", "-").replace(",", "")
            jobs[name] = Job(path.name, str(path), faults=each.faults, **each.settings)
    results = run_jobs(list(jobs.values()), folder, python=quick_python)
    return {name: Outcome(job, results[job.name]) for name, job in jobs.items()}


@pytest.mark.parametrize("name", ["reference", "loop"])
def test_an_epoch_has_every_sample_once(name: str, outcomes: Any) -> None:
    steps = outcomes[name].account()
    orders = [[s.ids for s in steps.values() if s.epoch == epoch] for epoch in range(3)]
    for order in orders:
        assert sorted(id for ids in order for id in ids) == list(range(SIZE))
    assert all(one != other for one, other in pairwise(orders))


@pytest.mark.parametrize("name", names_of(FAULTS))
def test_the_end_is_that_of_a_run_without_a_fault(name: str, outcomes: Any) -> None:
    """Weights too, with the residuals of int8 and generators of all ranks."""
    reference = outcomes[FAULTS[name].like]
    outcomes[name].require_batches_of(reference)
    assert outcomes[name].end() == reference.end()


@pytest.mark.parametrize("name", names_of(OTHER_WORLDS))
def test_another_number_of_ranks_takes_the_same_global_batches(name: str, outcomes: Any) -> None:
    found, reference = outcomes[name], outcomes[OTHER_WORLDS[name].like]
    found.require_batches_of(reference)
    assert found.end()["step"] == reference.end()["step"] == 18
    worlds = [step.world for step in found.account().values()]
    assert set(worlds) >= set(found.job.worlds[1:])
    assert worlds[-1] == found.job.worlds[-1]
    if name.startswith("loop"):
        assert set(worlds) == {1, 2, 3}
        weights, expected = (
            load(each.newest(), weights_only=False)["objects"]["model"]
            for each in (found, reference)
        )
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_every_start_has_a_profile_of_its_own(outcomes: Any) -> None:
    profiles = outcomes[PROFILED].folder / "profiles"
    assert sorted(path.name for path in profiles.iterdir()) == ["run-0", "run-1"]
    killed, again = (read_run(profiles / f"run-{number}") for number in range(2))
    # What the killed rank has not written yet, of a second at most, is lost with it.
    assert list(killed.ranks[0].steps) == [0, 1, 2]
    assert killed.ranks[1].end is None
    assert killed.ranks[0].end is not None
    assert killed.ranks[0].end.reason != "finished"
    assert again.common_steps[0] > 0  # it goes on from a checkpoint
    assert again.common_steps[-1] == 17
    assert [each.end and each.end.reason for each in again.ranks.values()] == ["finished"] * 2
    for number in range(2):
        assert (profiles / f"run-{number}" / "trace.json.gz").is_file()
        summary = json.loads((profiles / f"run-{number}" / "summary.json").read_text())
        assert summary["steps"] > 0


def test_every_rank_writes_its_part_of_a_sharded_checkpoint(outcomes: Any) -> None:
    parts = [path.stat().st_size for path in Path(outcomes[IN_PARTS].newest()).glob("*.bin")]
    assert len(parts) == 2
    assert min(parts) > 4 * 8 * 4  # half of weights and momentum


def test_what_a_restart_has_cost_is_for_the_loggers_of_rank_0(outcomes: Any) -> None:
    folder = outcomes[COSTS].folder
    first, other = (json.loads((folder / f"metrics-{rank}.json").read_text()) for rank in "01")
    assert other == {}
    assert (first["elastic/restarts"], first["elastic/world_size"]) == (1, 2)
    assert first["elastic/samples_recomputed"] == 8  # 5 steps of 8 samples, 4 of them saved
    assert 0 < first["elastic/lost_time_s"] < 60
    assert first["checkpoint/failed"] == 0
    assert first["checkpoint/bytes"] > 0


def test_a_rank_that_hangs_is_not_waited_for(outcomes: Any) -> None:
    seconds = outcomes["a rank stops"].result["seconds"]
    assert seconds < 25, "hang_timeout is 4 s, and the agent kills after 30 s"


def test_signalled_ranks_exit_with_0_and_others_ask_for_a_restart(outcomes: Any) -> None:
    for name in ("all told to end", "loop, all told"):
        assert outcomes[name].result["codes"] == ["ok", "ok"]
    told = outcomes["2, then 3, then 2 ranks"]
    assert "exitcode  : 75" in told.result["codes"][1]
    assert told.reasons(2) == ["SIGTERM"]
    assert "peer preempted" in told.reasons(1)
    in_loop = outcomes["loop, rank 0 told to end"]
    assert "exitcode: 75" in (in_loop.folder / "output.txt").read_text()
    assert "SIGTERM" in in_loop.reasons(0)
    assert "SIGUSR1" in outcomes["loop, all told"].reasons(0)
