"""Loops and Trainers whose ranks are killed: the others take the step again, newcomers join."""

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from needs import needs
from recovering_jobs import STEP, LoopJob, TrainerJob
from recovering_loops import EPOCHS, SIZE

from lightning_dist.base.features import RECOVERY
from lightning_dist.profiling.run import read_run, run_folder

OTHER_ENDS = {
    ("0.0.0", "forward"): ("segfault", "SIGSEGV"),
    ("0.0.0", "before the vote"): ("stop", "SIGKILL"),
    ("0.1.0", "between buckets"): ("stop", "SIGKILL"),
    ("0.1.0", "after the step"): ("abort", "SIGABRT"),
    ("0.2.0", "between buckets"): ("out of memory", "exit code 1"),
}
"""Action and exit of those that do not kill themselves; who stops is killed by the launcher."""
LAST = EPOCHS * SIZE // 12

pytestmark = [needs(RECOVERY), pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.ranks(3)]
of_both = pytest.mark.parametrize("kind", [LoopJob, TrainerJob])


@of_both
@pytest.mark.parametrize("victim", ["0.0.0", "0.1.0", "0.2.0"])
@pytest.mark.parametrize(
    "place", ["forward", "between buckets", "before the vote", "after the vote", "after the step"]
)
def test_a_killed_rank_costs_no_sample_and_changes_no_weight(
    kind: type[LoopJob], victim: str, place: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Whoever comes in its place takes part in the last steps."""
    action, ends = OTHER_ENDS.get((victim, place), ("kill", "SIGKILL"))
    fault, beats = [victim, place, STEP, action], "5" if action == "stop" else "60"
    job = kind(tmp_path, quick_python, beats=beats, faults=[fault], joins=10)
    assert f"worker {victim} exited: {ends}" in job.output
    killing = f"killing worker {victim}: no heartbeat for " in job.output
    assert killing == (action == "stop")
    job.require_exact()
    assert job.weights()["passes"] == job.passes()
    worlds = job.by_step("world")
    assert worlds[STEP] == worlds[LAST] == 3
    assert job.steps_of(f"{victim[:-1]}1") >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())
    if kind is TrainerJob:
        return
    # A rank that dies in the step has left it to the others; later it was done by all, and others
    # may have begun the next one.
    redone = job.redone()
    if place in ("after the vote", "after the step"):
        assert redone <= {STEP + 2}
    else:
        assert redone == {STEP + 1}
    assert job.metrics()["elastic/steps_redone"] == len(redone)
    assert job.output.count(" is repeated") == len(redone)
    assert all(f"step {step} is repeated" in job.output for step in redone)


def test_a_newcomer_that_finds_nothing_left_ends_with_the_others(
    tmp_path: Path, quick_python: list[str]
) -> None:
    job = LoopJob(tmp_path, quick_python, faults=[["0.1.0", "forward", LAST - 2]], joins=[LAST - 1])
    assert "started worker 0.1.1" in job.output
    assert not job.steps_of("0.1.1")
    job.require_exact()


@of_both
@pytest.mark.parametrize("who", ["one", "all", "one in a pause"])
def test_sigterm_leads_to_a_checkpoint(
    kind: type[LoopJob], who: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """All ranks stop at it; a launcher whose ranks were not all terminated goes on."""
    faults: list[list[Any]] = [["0.1.0", "forward", STEP, "terminate"]]
    if who == "all":
        faults = [[f"0.{rank}.0", "forward", STEP, "terminate"] for rank in range(3)]
    elif who == "one in a pause":
        faults = [["0.0.0", "between buckets", STEP], ["0.1.0", "groups", STEP, "terminate"]]
    job = kind(tmp_path, quick_python, faults=faults)
    ends = [line for each in tmp_path.glob("ckpt/**/rank-*.jsonl") for line in each.open()]
    assert any("SIGTERM" in line for line in ends)
    if who == "all":
        assert not job.of("end")
        job = kind(tmp_path, quick_python)
    job.require_exact(again=True)


@of_both
def test_compressed_ranks_stay_equal_and_a_rank_that_misses_the_answer_commits(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """Rank 0 dies after a vote whose answer rank 1 has not heard, and rank 2 has."""
    told = {"faults": [["0.0.0", "after the vote", STEP]], "lost": [["0.1.0", STEP, "0.2.0"]]}
    job = kind(tmp_path, quick_python, codec="int8", joins=10, profile=True, **told)
    job.require_exact()
    taken = [line for line in job.of("committed") if line["committed"] == STEP + 1]
    assert {line["generation"] for line in taken} == {0}
    if kind is LoopJob:
        assert len(taken) == 2
        require_events(job)
        require_profile(job)


def require_events(job: LoopJob) -> None:
    """They are logged in one line each, and counted."""
    told = [line for line in job.output.splitlines() if "elastic: " in line]
    (lost,) = [line for line in told if "worker 0.0.0 was lost" in line]
    assert f"2 ranks after step {STEP + 1}, within the process (generation 1)" in lost
    assert "residuals of norm " in lost
    assert "paused" in lost
    metrics = job.metrics()
    assert metrics["elastic/generations"] == 2  # lost, joined
    assert metrics["elastic/restarts"] == metrics["elastic/steps_redone"] == 0
    assert metrics["elastic/recovery_s"] > 0
    assert 0 < metrics["elastic/residual_norm_lost"] < 1


def require_profile(job: LoopJob) -> None:
    """It has all ranks, and says when members changed."""
    folder, _ = run_folder(job.folder / "profile")
    run = read_run(folder)
    assert [each.number for each in run.generations] == [1, 2]
    assert run.generations[0].step == STEP + 1
    assert "0.0.0 was lost" in run.generations[0].reason
    assert "0.0.1 has joined" in run.generations[1].reason
    assert sorted(run.ranks) == [0, 1, 2]
    joined, everyone = run.generations[1].step, set(range(LAST))
    assert set(run.ranks[1].steps) == set(run.ranks[2].steps) == everyone
    # What the lost rank had not written yet went with it.
    assert set(range(joined, LAST)) <= set(run.ranks[0].steps) <= everyone - {STEP + 1}
    for of_rank in run.ranks.values():
        for step in set(of_rank.steps) & set(range(joined, LAST)):
            assert {span.phase for span in of_rank.steps[step].spans} >= {"encode", "exchange"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= LAST - joined - 2
    assert summary["generations"][0]["step"] == STEP + 1
    assert any("generation 1 began at step" in note for note in summary["notes"])
    assert "generation 1" in (folder / "report.html").read_text()


@of_both
def test_residuals_of_a_lost_rank_are_taken_over(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """By the next rank, which has a copy of the step before."""
    fault = ["0.1.0", "between buckets", STEP]
    job = kind(tmp_path, quick_python, codec="int8", mirror=True, faults=[fault], joins=10)
    job.require_exact()
    (told,) = [line for line in job.output.splitlines() if "worker 0.1.0 was lost" in line]
    assert "residuals of 0.1.0 taken over" in told
    if kind is LoopJob:
        assert job.metrics()["elastic/residual_norm_lost"] == 0


def test_a_grad_scaler_is_as_at_the_begin_of_a_step_that_is_taken_again(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """It has seen an inf in the step that was given up, and skipped the optimizer."""
    fault = ["0.1.0", "before the vote", STEP]
    job = LoopJob(tmp_path, quick_python, overflows=STEP, faults=[fault], joins=10)
    job.require_exact()
    assert job.metrics()["elastic/steps_redone"] == 1
    for line in job.of("committed"):
        assert line["scale"] == 1024.0 * 2 ** (line["committed"] // 3)


@pytest.mark.parametrize("when", ["late", "early"])
def test_an_average_of_weights_has_each_step_once(
    when: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """What a failed step changes is put back; all restart where that was before it was known."""
    fault = ["0.1.0", "between buckets", STEP]
    joins = {"joins": 10} if when == "late" else {}
    job = LoopJob(tmp_path, quick_python, averages=when, faults=[fault], **joins)
    job.require_exact(again=when == "early")
    ends = job.of("end")
    assert [line["averaged"] for line in ends] == [LAST] * 3
    assert len({line["average"] for line in ends}) == 1
    refused = "state['average'] was changed in a step before optimizer.step()" in job.output
    assert refused == (when == "early")


@of_both
def test_a_step_that_cannot_be_completed_ends_at_the_next_micro_batch(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """A rank is lost in the first of two, and those that are left know before the second."""
    told = {"accumulate": 2, "notices": STEP, "faults": [["0.1.0", "forward", STEP]]}
    job = kind(tmp_path, quick_python, joins=10, **told)
    job.require_exact()
    passed = [name for name, lines in job.lines.items() for line in lines if "passed" in line]
    assert sorted(passed) == ["0.0.0", "0.2.0"]
    assert kind is TrainerJob or job.metrics()["elastic/steps_redone"] == 1


def test_a_step_of_which_nothing_was_computed_is_not_repeated(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """A rank is lost while all load the first batch of a step."""
    job = LoopJob(tmp_path, quick_python, loads=["0.1.0", STEP], joins=10)
    job.require_exact()
    assert "worker 0.1.0 was lost" in job.output
    assert job.metrics()["elastic/steps_redone"] == 0


@pytest.mark.parametrize("framework", ["fabric", "accelerate"])
def test_under_other_frameworks(framework: str, tmp_path: Path, quick_python: list[str]) -> None:
    """Whose rank and world size are those of the present members."""
    fault = ["0.1.0", "between buckets", STEP]
    job = LoopJob(tmp_path, quick_python, framework=framework, faults=[fault], joins=10)
    job.require_exact()
    taken = {(line["committed"], line["generation"]) for line in job.of("committed")}
    told = defaultdict(list)
    for line in job.of("computed"):
        told[line["computed"], line["generation"]].append(line["ranks"])
    for found in (sorted(told[each]) for each in taken):
        assert found == [[rank, len(found)] for rank in range(len(found))]
    assert {len(told[each]) for each in taken} == {2, 3}


@of_both
def test_a_newcomer_whose_script_is_another_is_refused(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    """With what differs; the others go on without it."""
    told = {"faults": [["0.1.0", "between buckets", STEP]], "other": "0.1.1", "restarts": 1}
    job = kind(tmp_path, quick_python, **told, joins=[10], fails=True)
    assert "every_n_train_steps is 5 here and 4 there" in job.output
    assert [line["end"] for line in job.of("end")] == [LAST] * 2
    assert not any("computed" in line for line in job.lines["0.1.1"])


@of_both
def test_ranks_whose_scripts_differ_do_not_begin(
    kind: type[LoopJob], tmp_path: Path, quick_python: list[str]
) -> None:
    job = kind(tmp_path, quick_python, other="0.1.0", restarts=0, fails=True)
    assert "ValueError" in job.output
    assert "every_n_train_steps" in job.output
    assert not job.of("computed")


@of_both
def test_two_ranks_at_once(kind: type[LoopJob], tmp_path: Path, quick_python: list[str]) -> None:
    """One is left, and goes on alone until both others have come again."""
    both = [["0.0.0", "between buckets", STEP], ["0.2.0", "after the vote", STEP - 1]]
    kind(tmp_path, quick_python, faults=both, joins=10).require_exact()


OF_HOSTS = {"a rank": ["0.1.0"], "a node": ["0.2.0", "0.3.0"]}


@pytest.mark.parametrize(
    ("kind", "codec", "lost"),
    [
        *product([LoopJob], ["none", "int8"], OF_HOSTS),
        (TrainerJob, "none", "a node"),
        (TrainerJob, "int8", "a rank"),
    ],
)
def test_groups_of_nodes_are_rebuilt(
    kind: type[LoopJob], codec: str, lost: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Two nodes of two ranks, as their names say; what is left of them is one level, or two."""
    told = {"codec": codec} if codec != "none" else {}
    faults = [[each, "between buckets", STEP] for each in OF_HOSTS[lost]]
    job = kind(tmp_path, quick_python, faults=faults, joins=10, ranks=4, per_host=2, **told)
    job.require_exact()
    levels, worlds = job.by_step("levels"), job.by_step("world")
    assert (worlds[STEP + 1], levels[STEP + 1]) == (4 - len(faults), len(faults) == 1)
    assert all(levels[step] == (world > 2) for step, world in worlds.items())
    assert {worlds[STEP], worlds[12]} == {4}
    if kind is LoopJob:
        assert job.metrics()["elastic/steps_redone"] == 1
    elif codec == "int8":
        # All ranks, newcomers too, go on from the mean residual.
        committed = job.of("committed")
        whole = max(line["generation"] for line in committed)
        first = min(line["committed"] for line in committed if line["generation"] == whole)
        there = [line["residual"] for line in committed if line["committed"] == first]
        assert there == [there[0]] * 4
        assert there[0] > 0
