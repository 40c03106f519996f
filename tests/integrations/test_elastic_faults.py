"""Ranks that die, hang or are told to go; the training ends as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import Fault, Job, run_jobs, selected
from elastic_runs import SIZE, Step, committed
from tiers import some_exhaustive

from lightning_dist.profiling.run import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # the first test waits for all jobs

EXACT = {"codec": "none", "module": {"noisy": False}, "dataset": {"noisy": False}}
"""Nothing draws at random and no codec rounds: other world sizes give the same sums."""

ACCUMULATED = {"fit": {"accumulate_grad_batches": 3}}
VALIDATED = {"fit": {"val_check_interval": 2}}

SHARDED: Mapping[str, Any] = {
    "worlds": (4,),
    "replicas": (2,),
    "fit": {"elastic": {"format": "sharded"}},
}
"""Two replicas of two shards, by compressed_model_parallel."""

PROFILED = "rank 1 killed between steps"
"""Has a CommProfiler, which changes nothing of what is said of the others."""

AGENT_RESTARTS: Mapping[str, tuple[Fault, ...]] = {
    "rank 0 killed at its start": (Fault("kill", "at_start", ranks=(0,)),),
    "rank 1 killed between steps": (Fault("kill"),),
    "rank 0 killed in backward": (Fault("kill", "on_after_backward", 5, (0,)),),
    "rank 0 killed before the optimizer": (Fault("kill", "on_before_optimizer_step", 5, (0,)),),
    "both killed after a step": (Fault("kill", "on_train_batch_end", 7, (0, 1)),),
    "rank 0 killed in validation": (Fault("kill", "on_validation_batch_end", 6, (0,)),),
    "rank 1 killed at the end of an epoch": (Fault("kill", "on_train_epoch_end", 12),),
    "rank 0 killed at the end": (Fault("kill", "on_train_end", 18, (0,)),),
    "rank 0 aborts": (Fault("abort", "on_after_backward", 4, (0,)),),
    "rank 1 exits": (Fault("exit", "on_after_backward", 4),),
    "rank 1 has a mistake": (Fault("raise", "on_train_batch_end", 4),),
    "rank 1 told to end": (Fault("terminate", "on_after_backward", 7),),
    "rank 1 told to end in validation": (Fault("terminate", "on_validation_batch_end", 6),),
    "rank 1 told to end at the last batch": (Fault("terminate", "on_train_batch_end", 6),),
    "rank 1 killed while rank 0 starts again": (
        Fault("kill", "on_after_backward", 4, (0,)),
        Fault("kill", "on_load_checkpoint", 0, (1,)),  # only then is there one
    ),
}

EXHAUSTIVE = (
    "rank 0 killed in backward",
    "rank 0 killed before the optimizer",
    "both killed after a step",
    "rank 0 killed at the end",
    "rank 0 aborts",
    "rank 1 has a mistake",
    "rank 0 killed at its start",
    "rank 1 exits",
    "rank 1 told to end",
    "rank 1 told to end at the last batch",
    "killed while accumulating",
    "2, then 4, then 1 ranks",
    "sharded, rank 3 killed in backward",
    "sharded, all told to end",
    "stock ddp",
)


def job(name: str, folder: Path, *faults: Fault, **settings: Any) -> Job:
    path = folder / name.replace(" ", "-").replace(",", "")
    return Job(path.name, str(path), faults=faults, profiled=name == PROFILED, **settings)


LATER = "on_after_backward"
IN_BACKWARD = Fault("kill", LATER, 3, (0,))
IN_TURN: Mapping[str, Any] = {"max_restarts": 0, **EXACT}
TOLD_SHARDS: Mapping[str, Any] = {**SHARDED, "worlds": (4, 4), "replicas": (2, 2)}
JOBS: Mapping[str, tuple[Sequence[Fault], Mapping[str, Any]]] = {
    "reference": ((), {}),
    **{name: (faults, {}) for name, faults in AGENT_RESTARTS.items()},
    "a rank stops": ((Fault("stop", LATER, 4, (0,)),), {"fit": {"elastic": {"hang_timeout": 4}}}),
    "all told to end": ((Fault("terminate", LATER, 5, (0, 1)),), {"worlds": (2, 2)}),
    "accumulated": ((), ACCUMULATED),
    "killed while accumulating": ((IN_BACKWARD,), ACCUMULATED),
    "told while accumulating": ((Fault("terminate", LATER, 3, (0,)),), ACCUMULATED),
    "validated": ((), VALIDATED),
    "killed in a validation within an epoch": (
        (Fault("kill", "on_validation_batch_end", 4),),
        VALIDATED,
    ),
    "exact": ((), EXACT),
    "2, then 4, then 1 ranks": (
        (IN_BACKWARD, Fault("terminate", LATER, 7, (0, 1, 2, 3), 1)),
        {**IN_TURN, "worlds": (2, 4, 1)},
    ),
    "2, then 3, then 2 ranks": (
        (IN_BACKWARD, Fault("terminate", LATER, 7, (2,), 1)),
        {**IN_TURN, "worlds": (2, 3, 2)},
    ),
    "sharded": ((), SHARDED),
    "sharded, rank 3 killed in backward": ((Fault("kill", LATER, 5, (3,)),), SHARDED),
    "sharded, rank 2 killed while it saves": (
        (Fault("kill", "fsync", 3, (2,)),),
        {**SHARDED, "limit": 100},  # the agent kills those that wait for its part after 30 s
    ),
    "sharded, all told to end": ((Fault("terminate", LATER, 5, (0, 1, 2, 3)),), TOLD_SHARDS),
    "stock ddp": ((IN_BACKWARD,), {"worlds": (2, 2), "max_restarts": 0, "codec": None}),
    "stock ddp without a fault": ((), {"codec": None}),
}
"""Faults and settings of each."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    quick_python: list[str],
) -> dict[str, tuple[Job, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("faults")
    jobs = {name: job(name, folder, *given[0], **given[1]) for name, given in JOBS.items()}
    for name in set(EXHAUSTIVE) - selected(request):
        del jobs[name]
    results = run_jobs(list(jobs.values()), folder, python=quick_python)
    return {name: (each, results[each.name]) for name, each in jobs.items()}


def account(outcome: tuple[Job, dict[str, Any]]) -> dict[int, Step]:
    return committed(Path(outcome[0].folder) / "account")


def hashes(outcome: tuple[Job, dict[str, Any]]) -> set[str]:
    """Of the weights at the end of the last start."""
    given, _ = outcome
    paths = Path(given.folder).glob(f"end-{len(given.worlds) - 1}-*.json")
    ends = [json.loads(path.read_text()) for path in paths]
    assert not any(end["left"] for end in ends), "process groups"
    return {end["hash"] for end in ends}


def require_exact(
    outcome: tuple[Job, dict[str, Any]], reference: tuple[Job, dict[str, Any]]
) -> None:
    """The last start ended well, and what counts is what it would have been without faults."""
    given, result = outcome
    log = Path(given.folder) / "output.txt"
    assert not result["hung"], log.read_text()[-3000:]
    assert result["codes"][-1] == "ok", result["codes"]
    fired = list(Path(given.folder).glob("fired-*"))
    assert len(fired) == sum(len(fault.ranks) for fault in given.faults)
    found, expected = account(outcome), account(reference)
    assert [step.ids for step in found.values()] == [step.ids for step in expected.values()]
    assert all(len(step.hashes) == 1 for step in found.values())


def test_an_epoch_has_every_sample_once(outcomes: Any) -> None:
    steps = account(outcomes["reference"])
    for epoch in range(3):
        ids = [id for step in steps.values() if step.epoch == epoch for id in step.ids]
        assert sorted(ids) == list(range(SIZE))
    orders = [[s.ids for s in steps.values() if s.epoch == epoch] for epoch in range(3)]
    assert all(one != other for one, other in pairwise(orders))


@pytest.mark.parametrize("name", some_exhaustive(AGENT_RESTARTS, EXHAUSTIVE))
def test_the_agent_starts_the_ranks_again(name: str, outcomes: Any) -> None:
    require_exact(outcomes[name], outcomes["reference"])
    assert hashes(outcomes[name]) == hashes(outcomes["reference"])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("a rank stops", "reference"),
        ("all told to end", "reference"),
        pytest.param("killed while accumulating", "accumulated", marks=pytest.mark.exhaustive),
        ("told while accumulating", "accumulated"),
        ("killed in a validation within an epoch", "validated"),
        pytest.param("stock ddp", "stock ddp without a fault", marks=pytest.mark.exhaustive),
    ],
)
def test_the_weights_are_those_of_a_run_without_fault(
    name: str, reference: str, outcomes: Any
) -> None:
    require_exact(outcomes[name], outcomes[reference])
    assert hashes(outcomes[name]) == hashes(outcomes[reference])


@pytest.mark.parametrize(
    "name", some_exhaustive(["2, then 4, then 1 ranks", "2, then 3, then 2 ranks"], EXHAUSTIVE)
)
def test_another_number_of_ranks_takes_the_same_global_batches(name: str, outcomes: Any) -> None:
    require_exact(outcomes[name], outcomes["exact"])
    worlds = [step.world for step in account(outcomes[name]).values()]
    second, third = outcomes[name][0].worlds[1:]
    assert second in worlds
    assert worlds[-1] == third


def test_every_start_has_a_profile_of_its_own(outcomes: Any) -> None:
    profiles = Path(outcomes[PROFILED][0].folder) / "profiles"
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


OF_SHARDS = [name for name in JOBS if name.startswith("sharded, ")]


@pytest.mark.parametrize("name", some_exhaustive(OF_SHARDS, EXHAUSTIVE))
def test_a_sharded_model_goes_on_as_without_a_fault(outcomes: Any, name: str) -> None:
    require_exact(outcomes[name], outcomes["sharded"])
    assert hashes(outcomes[name]) == hashes(outcomes["sharded"])
    assert len(hashes(outcomes[name])) == 1


def test_a_rank_that_hangs_is_not_waited_for(outcomes: Any) -> None:
    _, result = outcomes["a rank stops"]
    assert result["seconds"] < 25, "hang_timeout is 4 s, and the agent kills after 30 s"


def test_signalled_ranks_exit_with_0_and_others_ask_for_a_restart(outcomes: Any) -> None:
    _, all_told = outcomes["all told to end"]
    assert all_told["codes"] == ["ok", "ok"]
    given, result = outcomes["2, then 3, then 2 ranks"]
    assert "exitcode  : 75" in result["codes"][1]
    reasons = {}
    for path in Path(given.folder, "ckpt", "elastic").glob("rank-*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        reasons[path.stem] = [line["reason"] for line in lines if line["event"] == "end"]
    assert reasons["rank-2"] == ["SIGTERM"]
    assert "peer preempted" in reasons["rank-1"]
