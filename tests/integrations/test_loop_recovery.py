"""Loops whose ranks are killed: the others take the step again, and newcomers join them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from recovering_loops import EPOCHS, SIZE, train

from lightning_dist.profiling.run import read_run, run_folder

SCRIPT = Path(__file__).parent / "recovering_loops.py"
STEP = 6
"""The step in whose course a rank is killed, counted from 0; that of an epoch has 5."""
PLACES = ("forward", "between buckets", "before the vote", "after the vote", "after the step")
QUICK = ("0.1.0", "between buckets")
CI = (
    *(("0.0.0", "forward"), ("0.0.0", "after the vote"), ("0.1.0", "before the vote")),
    *(("0.2.0", "after the step"), ("0.2.0", "between buckets")),
)
"""Each place and each rank at least once."""
OTHER_ENDS = {
    ("0.0.0", "forward"): ("segfault", "SIGSEGV"),
    ("0.1.0", "after the step"): ("abort", "SIGABRT"),
    ("0.2.0", "between buckets"): ("out of memory", "exit code 1"),
}
"""Action and exit of those that are not killed."""
ENDS_EARLY: dict[str, Any] = {
    "accumulate": 2,
    "notices": STEP,
    "faults": [["0.1.0", "forward", STEP]],
    "joins": 10,
}
"""A rank is lost in the first of two micro-batches, and the others know before the second."""

pytestmark = [pytest.mark.timeout(400), pytest.mark.ranks(3)]


def lost_ranks(quick: tuple[str, str]) -> list[Any]:
    """Ranks that are killed and places where they are; the quick one is for all tiers."""
    tiers = {quick: (), **dict.fromkeys(set(CI) - {quick}, pytest.mark.slow)}
    return [
        pytest.param(each, place, marks=tiers.get((each, place), pytest.mark.exhaustive))
        for each in ("0.0.0", "0.1.0", "0.2.0")
        for place in PLACES
    ]


class Job:
    """Three ranks, or as many as told, under our launcher, and what they have written down.

    beats: seconds without one after which a rank is dead; a busy machine is not a hang.
    """

    script = SCRIPT

    def __init__(self, folder: Path, python: list[str], *, beats: str = "60", **told: Any) -> None:
        self.folder = folder
        self.ranks: int = told.get("ranks", 3)
        options = ["--monitor-interval=0.05", "--standalone", f"--nproc-per-node={self.ranks}"]
        launcher = [*python, "-m", "lightning_dist.elastic.agent", *options]
        launcher.append(f"--max-restarts={told.get('restarts', 3)}")
        script = ["--no-python", *python, self.script, folder, json.dumps(told)]
        done = run([*launcher, *script], limit=300, LIGHTNING_DIST_BEAT_TIMEOUT=beats)
        self.output = done.require_success().output
        self.lines: dict[str, list[dict[str, Any]]] = {}
        for path in folder.glob("*.*.*.jsonl"):
            self.lines[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for lines in self.lines.values() for line in lines if kind in line]

    def samples(self) -> dict[int, list[int]]:
        """Those of every epoch that are in the weights."""
        taken = {line["committed"]: line["generation"] for line in self.of("committed")}
        found = defaultdict(list)
        for line in self.of("computed"):
            if taken.get(line["computed"]) == line["generation"]:
                found[line["epoch"]] += line["ids"]
        return {epoch: sorted(ids) for epoch, ids in found.items()}

    def passes(self) -> int:
        """Of all steps that were committed: one, or two where two ranks do the work of three."""
        taken = {line["committed"]: line["generation"] for line in self.of("committed")}
        members = self.members()
        return sum(1 if len(members[generation]) == 3 else 2 for generation in taken.values())

    def members(self) -> dict[int, set[str]]:
        """Those of every generation that have computed something in it."""
        found: dict[int, set[str]] = defaultdict(set)
        for name, lines in self.lines.items():
            for line in lines:
                found[line.get("generation", -1)].add(name)
        return found

    def require_exact(self) -> None:
        """Every sample once in each epoch, and equal weights on all ranks after every step."""
        assert self.samples() == {epoch: list(range(SIZE)) for epoch in range(EPOCHS)}
        hashes, rates = defaultdict(set), defaultdict(set)
        for line in self.of("committed"):
            hashes[line["committed"]].add(line["hash"])
            rates[line["committed"]].add(line["lr"])
        steps = EPOCHS * -(-SIZE // (4 * self.ranks))
        assert sorted(hashes) == list(range(1, steps + 1))
        assert all(len(found) == 1 for found in (*hashes.values(), *rates.values()))
        assert len({line["hash"] for line in self.of("end")}) == 1
        assert len(self.of("end")) == self.ranks

    def begun(self) -> set[int]:
        """Steps that the first members have computed."""
        return {line["computed"] for line in self.of("computed") if line["generation"] == 0}

    def taken(self) -> set[int]:
        """Steps that the first members have committed."""
        return {line["committed"] for line in self.of("committed") if line["generation"] == 0}

    def require_levels(self, *, lost: int) -> None:
        """Of two hosts of two ranks, ``lost`` of which come again."""
        self.require_exact()
        levels = {line["committed"]: line["levels"] for line in self.of("committed")}
        worlds = {line["committed"]: line["world"] for line in self.of("committed")}
        assert (worlds[STEP + 1], levels[STEP + 1]) == (4 - lost, lost == 1)
        assert all(levels[step] == (world > 2) for step, world in worlds.items())
        assert {worlds[STEP], worlds[12]} == {4}

    def metrics(self) -> dict[str, float]:
        """Of the leader, at the end."""
        (found,) = [line["metrics"] for line in self.of("end") if line["metrics"]]
        return dict(found)

    def require_ended_early(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Told ENDS_EARLY: ranks that are left compute one of the step's two micro-batches."""
        self.require_exact()
        passed = [name for name, lines in self.lines.items() for line in lines if "passed" in line]
        assert sorted(passed) == ["0.0.0", "0.2.0"]
        self.require_weights(expected)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max(self.folder.glob("weights-*.pt"))
        found: dict[str, torch.Tensor] = torch.load(newest)
        return found

    def require_weights(self, expected: Mapping[str, torch.Tensor]) -> None:
        """At the end; how many passes there were is not the same with fewer ranks."""
        for name, weight in self.weights().items():
            if name != "passes":
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run of one process without a fault."""
    return dict(train(tmp_path_factory.mktemp("reference"), {}).state_dict())


@pytest.mark.parametrize(("victim", "place"), lost_ranks(QUICK))
def test_a_killed_rank_costs_no_sample_and_changes_no_weight(
    victim: str,
    place: str,
    expected: dict[str, torch.Tensor],
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """Whoever comes in its place takes part in the last steps."""
    new = f"{victim[:-1]}1"
    action, ends = OTHER_ENDS.get((victim, place), ("kill", "SIGKILL"))
    job = Job(tmp_path, quick_python, faults=[[victim, place, STEP, action]], joins=10)
    assert f"worker {victim} exited: {ends}" in job.output
    job.require_exact()
    job.require_weights(expected)
    assert job.weights()["passes"] == job.passes()
    worlds = {line["committed"]: line["world"] for line in job.of("committed")}
    assert worlds[STEP] == worlds[EPOCHS * SIZE // 12] == 3
    assert {line["committed"] for line in job.lines[new] if "committed" in line} >= {13, 14, 15}
    assert any(len(names) == 2 for names in job.members().values())
    # A rank that dies in the step has left it to the others; later it was done by all, and others
    # may have begun the next one.
    redone = job.begun() - job.taken()
    if place in ("after the vote", "after the step"):
        assert redone <= {STEP + 2}
    else:
        assert redone == {STEP + 1}
    assert job.metrics()["elastic/steps_redone"] == len(redone)
    assert job.output.count(" is repeated") == len(redone)
    assert all(f"step {step} is repeated" in job.output for step in redone)


TERMINATED = {
    "one": [["0.1.0", "forward", STEP, "terminate"]],
    "all": [[f"0.{rank}.0", "forward", STEP, "terminate"] for rank in range(3)],
    "one in a pause": [
        ["0.0.0", "between buckets", STEP],
        ["0.1.0", "groups", STEP, "terminate"],
    ],
}


def require_saved_on_sigterm(
    kind: type[Job], who: str, folder: Path, python: list[str], expected: dict[str, torch.Tensor]
) -> None:
    """All ranks stop at a checkpoint; a launcher whose ranks were not all terminated goes on."""
    job = kind(folder, python, faults=TERMINATED[who])
    ends = [line for each in folder.glob("ckpt/**/rank-*.jsonl") for line in each.open()]
    assert any("SIGTERM" in line for line in ends)
    if who == "all":
        assert not job.of("end")
        job = kind(folder, python)
    job.require_exact()
    job.require_weights(expected)


@pytest.mark.slow
@pytest.mark.parametrize("who", TERMINATED)
def test_sigterm_leads_to_a_checkpoint(
    who: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    require_saved_on_sigterm(Job, who, tmp_path, quick_python, expected)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Job:
    """Rank 0 dies after a vote whose answer rank 1 has not heard, and rank 2 has."""
    return Job(
        tmp_path_factory.mktemp("compressed"),
        quick_python,
        codec="int8",
        faults=[["0.0.0", "after the vote", STEP]],
        lost=[["0.1.0", STEP, "0.2.0"]],
        joins=10,
        profile=True,
    )


@pytest.mark.slow
def test_events_are_logged_in_one_line_each_and_counted(compressed: Job) -> None:
    told = [line for line in compressed.output.splitlines() if "elastic: " in line]
    (lost,) = [line for line in told if "worker 0.0.0 was lost" in line]
    assert f"2 ranks after step {STEP + 1}, within the process (generation 1)" in lost
    assert "residuals of norm " in lost
    assert "paused" in lost
    metrics = compressed.metrics()
    assert metrics["elastic/generations"] == 2  # lost, joined
    assert metrics["elastic/restarts"] == metrics["elastic/steps_redone"] == 0
    assert metrics["elastic/recovery_s"] > 0
    assert 0 < metrics["elastic/residual_norm_lost"] < 1


@pytest.mark.slow
def test_the_profile_has_all_ranks_and_says_when_members_changed(compressed: Job) -> None:
    folder = run_folder(compressed.folder / "profile")
    run = read_run(folder)
    assert [each.number for each in run.generations] == [1, 2]
    assert [each.step for each in run.generations][:1] == [STEP + 1]
    assert "0.0.0 was lost" in run.generations[0].reason
    assert "0.0.1 has joined" in run.generations[1].reason
    assert sorted(run.ranks) == [0, 1, 2]
    last, joined = EPOCHS * SIZE // 12, run.generations[1].step
    everyone = set(range(last))
    assert set(run.ranks[1].steps) == set(run.ranks[2].steps) == everyone
    # What the lost rank had not written yet went with it.
    assert set(range(joined, last)) <= set(run.ranks[0].steps) <= everyone - {STEP + 1}
    for of_rank in run.ranks.values():
        for step in set(of_rank.steps) & set(range(joined, last)):
            assert {span.phase for span in of_rank.steps[step].spans} >= {"encode", "exchange"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] >= last - joined - 2
    assert summary["generations"][0]["step"] == STEP + 1
    assert any("generation 1 began at step" in note for note in summary["notes"])
    page = (folder / "report.html").read_text()
    assert "generation 1" in page


@pytest.mark.slow
def test_compressed_ranks_stay_equal_and_a_rank_that_misses_the_answer_commits(
    compressed: Job,
) -> None:
    job = compressed
    job.require_exact()
    taken = [line for line in job.of("committed") if line["committed"] == STEP + 1]
    assert {line["generation"] for line in taken} == {0}
    assert len(taken) == 2


@pytest.mark.slow
def test_residuals_of_a_lost_rank_are_taken_over(tmp_path: Path, quick_python: list[str]) -> None:
    """By the next rank, which has a copy of the step before."""
    fault = ["0.1.0", "between buckets", STEP]
    job = Job(tmp_path, quick_python, codec="int8", mirror=True, faults=[fault], joins=10)
    job.require_exact()
    (told,) = [line for line in job.output.splitlines() if "worker 0.1.0 was lost" in line]
    assert "residuals of 0.1.0 taken over" in told
    assert job.metrics()["elastic/residual_norm_lost"] == 0


@pytest.mark.slow
def test_a_grad_scaler_is_as_at_the_begin_of_a_step_that_is_taken_again(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """It has seen an inf in the step that was given up, and skipped the optimizer."""
    fault = ["0.1.0", "before the vote", STEP]
    job = Job(tmp_path, quick_python, overflows=STEP, faults=[fault], joins=10)
    job.require_exact()
    job.require_weights(expected)
    assert job.metrics()["elastic/steps_redone"] == 1
    for line in job.of("committed"):
        assert line["scale"] == 1024.0 * 2 ** (line["committed"] // 3)


@pytest.mark.slow
def test_a_step_that_cannot_be_completed_ends_at_the_next_micro_batch(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    job = Job(tmp_path, quick_python, **ENDS_EARLY)
    job.require_ended_early(expected)
    assert job.metrics()["elastic/steps_redone"] == 1


@pytest.mark.slow
def test_a_step_of_which_nothing_was_computed_is_not_repeated(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """A rank is lost while all load the first batch of a step."""
    job = Job(tmp_path, quick_python, loads=["0.1.0", STEP], joins=10)
    job.require_exact()
    job.require_weights(expected)
    assert "worker 0.1.0 was lost" in job.output
    assert job.metrics()["elastic/steps_redone"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["fabric", "accelerate"])
def test_under_other_frameworks(
    framework: str, expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """Whose rank and world size are those of the present members."""
    fault = ["0.1.0", "between buckets", STEP]
    job = Job(tmp_path, quick_python, framework=framework, faults=[fault], joins=10)
    job.require_exact()
    job.require_weights(expected)
    taken = {(line["committed"], line["generation"]) for line in job.of("committed")}
    told = defaultdict(list)
    for line in job.of("computed"):
        told[line["computed"], line["generation"]].append(line["ranks"])
    for found in (sorted(told[each]) for each in taken):
        assert found == [[rank, len(found)] for rank in range(len(found))]
    assert {len(told[each]) for each in taken} == {2, 3}


@pytest.mark.slow
def test_two_ranks_at_once(
    expected: dict[str, torch.Tensor], tmp_path: Path, quick_python: list[str]
) -> None:
    """One is left, and goes on alone until both others have come again."""
    both = [["0.0.0", "between buckets", STEP], ["0.2.0", "after the vote", STEP - 1]]
    job = Job(tmp_path, quick_python, faults=both, joins=10)
    job.require_exact()
    job.require_weights(expected)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("victims", [["0.1.0"], ["0.2.0", "0.3.0"]], ids=["a rank", "a host"])
def test_groups_of_hosts_are_rebuilt(
    victims: list[str], codec: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """Two hosts of two ranks, as their names say; what is left of them is one level, or two."""
    faults = [[each, "between buckets", STEP] for each in victims]
    told: dict[str, Any] = {"ranks": 4, "per_host": 2, "codec": codec}
    job = Job(tmp_path, quick_python, faults=faults, joins=10, **told)
    job.require_levels(lost=len(victims))
    if codec == "none":
        (tmp_path / "alone").mkdir()
        expected = train(tmp_path / "alone", {"accumulate": 4}).state_dict()
        job.require_weights(expected)
    assert job.metrics()["elastic/steps_redone"] == 1
