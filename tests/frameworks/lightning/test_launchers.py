"""Every way in which Lightning starts ranks. torchrun starts those of all the other tests."""

from pathlib import Path

import pytest
import torch
from elastic_jobs import selected
from processes import SUPPORT, Finished, port, run, run_together
from replicas import require_equal
from scenarios.world import Facts
from tiers import some_exhaustive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPTS = SUPPORT / "scenarios"


STARTS = ("notebook", "fork")
EXHAUSTIVE = "spawn"  # imports all in a new process


class Results:
    """Facts of every scenario by name, one entry per rank."""

    def __init__(self, folder: Path, finished: Finished, *, ranks: int) -> None:
        self.folder, self.finished, self.ranks = folder, finished, ranks

    def __call__(self, name: str, *, ranks: int | None = None) -> list[Facts]:
        return [self._of(name, rank) for rank in range(ranks or self.ranks)]

    def _of(self, name: str, rank: int) -> Facts:
        path = self.folder / f"{name}.{rank}.pt"
        if not path.exists():
            output = self.finished.output[-8000:]
            pytest.fail(f"rank {rank} left no {path.name}; output:\n{output}", pytrace=False)
        result = torch.load(path, weights_only=True)
        if "error" in result:
            pytest.fail(f"{name} on rank {rank}:\n{result['error']}", pytrace=False)
        return result["facts"]


def require_compressed(ranks: list[Facts], *, steps: int) -> None:
    """Ranks are replicas, whose hook ran ``steps`` times and saved bytes each time."""
    digests = ranks[0]["digests"]
    assert len(set(digests)) > 1
    for facts in ranks:
        assert facts["digests"] == digests
        require_equal(facts["parameters"], ranks[0]["parameters"])
        assert all(value.isfinite().all() for value in facts["parameters"].values())
        stats = facts["stats"]
        assert stats["steps"] == steps
        assert 0 < stats["wire_bytes"] < stats["raw_bytes"]
        assert 0 < stats["last_step"]["wire_bytes"] < stats["last_step"]["raw_bytes"]


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    quick_python: list[str],
) -> Results:
    """One script that is its own launcher, by several start methods one after the other."""
    folder = tmp_path_factory.mktemp("launchers")
    starts = [*STARTS, *({EXHAUSTIVE} & selected(request))]
    strategies = [*(f"compressed_ddp_{start}" for start in starts), "compressed_ddp"]
    command = [*quick_python, SCRIPTS / "launchers.py", folder, *strategies]
    finished = run(command, limit=260, MASTER_PORT=str(port()))
    return Results(folder, finished, ranks=2)


@pytest.mark.parametrize("name", some_exhaustive(["fork", "spawn", ""], [EXHAUSTIVE]))
def test_lightning_starts_the_second_rank(launched: Results, name: str) -> None:
    ranks = launched("_".join(filter(None, ["compressed_ddp", name])))
    assert ranks[0]["pid"] != ranks[1]["pid"]
    require_compressed(ranks, steps=8)


@pytest.mark.parametrize("name", some_exhaustive([*STARTS, EXHAUSTIVE], [EXHAUSTIVE]))
def test_the_caller_of_fit_has_the_bytes_of_the_workers(launched: Results, name: str) -> None:
    """Those of rank 0, whose process has ended; and settings and nodes."""
    facts = launched(f"main_compressed_ddp_{name}", ranks=1)[0]
    assert facts["stats"] == launched(f"compressed_ddp_{name}")[0]["stats"]
    assert facts["config"]["codec"] == "int8"
    assert facts["config"]["world_size"] == 2
    assert facts["topology"].startswith("Topology(nodes=(")


def test_the_script_ends_by_itself(launched: Results) -> None:
    launched.finished.require_success()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Results:
    """Two tasks with the variables that srun sets."""
    folder = tmp_path_factory.mktemp("slurm")
    environments = [
        {
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODEID": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free),
        }
        for free in [port()]
        for task in range(2)
    ]
    command = [*quick_python, SCRIPTS / "slurm_task.py", folder]
    survivor, dead = run_together([command] * 2, environments, limit=130)
    assert dead.returncode in (9, None), dead.output[-4000:]
    return Results(folder, survivor, ranks=2)


def test_slurm_tasks_find_each_other(slurm: Results) -> None:
    ranks: list[Facts] = slurm("slurm")
    assert {facts["environment"] for facts in ranks} == {"SLURMEnvironment"}
    require_compressed(ranks, steps=8)


def test_the_survivor_of_a_dead_rank_fails_soon(slurm: Results) -> None:
    """With an error, well before anybody would have noticed, and the process ends."""
    facts = slurm("survivor", ranks=1)[0]
    assert "lightning_dist: " in facts["error"]
    assert facts["seconds"] < 60
    slurm.finished.require_success()
