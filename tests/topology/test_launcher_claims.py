"""What launchers say of a rank's machine, and where that contradicts the names of hosts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lightning_dist.topology.launcher import Claim, claim, contradiction, promised_ranks

SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_RANK": "1", "RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Claim("torchrun", node=1, local_size=2)),
        ({"LOCAL_WORLD_SIZE": "2"}, Claim("torchrun", node=None, local_size=2)),
        (SRUN, Claim("SLURM", node=1)),
        ({**SRUN, **TORCHRUN}, Claim("torchrun", node=1, local_size=2)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Claim("Open MPI", local_size=2)),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, Claim("MVAPICH2", local_size=2)),
        ({"MPI_LOCALNRANKS": "2"}, Claim("MPICH", local_size=2)),
        ({"LOCAL_RANK": "1", "NODE_RANK": "1"}, Claim("Lightning", node=1)),
        ({"LOCAL_RANK": "1"}, None),
        ({"NODE_RANK": "1"}, None),
        ({"MPI_LOCALNRANKS": "many"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_claims(environment: Mapping[str, str], expected: Claim | None) -> None:
    assert claim(rank=3, environment=environment) == expected


@pytest.mark.parametrize(
    "shell",
    [
        {"SLURM_NTASKS": "4", "SLURM_NODEID": "0"},  # sbatch: a script that starts processes
        {**SRUN, "SLURM_PROCID": "0"},  # its first process has the variables of the script's task
        {**SRUN, "SLURM_NTASKS": "1"},  # srun --pty bash
        {key: value for key, value in SRUN.items() if key != "SLURM_NTASKS"},
    ],
    ids=["sbatch", "script", "pty", "no count"],
)
def test_a_shell_in_an_allocation_says_nothing_of_its_ranks(shell: Mapping[str, str]) -> None:
    """``claim`` of rank 3 where SLURM has not started rank 3."""
    assert claim(rank=3, environment=shell) is None
    within = {**shell, "LOCAL_RANK": "1", "NODE_RANK": "2"}
    assert claim(rank=3, environment=within) == Claim("Lightning", node=2)


def said(
    launcher: str, nodes: list[int | None], sizes: list[int | None]
) -> list[dict[str, object]]:
    return [Claim(launcher, n, s).as_fact() for n, s in zip(nodes, sizes, strict=True)]


def test_claims_that_agree() -> None:
    hosts = ["a", "a", "b", "b"]
    assert contradiction(hosts, said("torchrun", [0, 0, 1, 1], [2] * 4)) is None
    assert contradiction(hosts, said("SLURM", [1, 1, 0, 0], [None] * 4)) is None
    assert contradiction(hosts, said("MPICH", [None] * 4, [2] * 4)) is None
    assert contradiction(hosts, [None] * 4) is None


def test_a_rank_without_a_claim_ends_the_comparison() -> None:
    claims = said("torchrun", [0, 0, 0, 0], [4] * 4)
    assert contradiction(["a", "a", "b", "b"], claims) is not None
    assert contradiction(["a", "a", "b", "b"], [*claims[:3], None]) is None


def test_a_group_may_leave_ranks_of_a_host_out() -> None:
    assert contradiction(["a", "b"], said("torchrun", [0, 1], [8, 8])) is None


def test_other_nodes_than_names() -> None:
    text = contradiction(["x"] * 4, said("torchrun", [0, 0, 1, 1], [2] * 4))
    assert text == (
        "torchrun reports ranks 0 to 3 on nodes [0, 0, 1, 1], but their host names are ['x', 'x', "
        "'x', 'x']"
    )


def test_more_ranks_under_one_name_than_were_started_there() -> None:
    text = contradiction(["y", "x", "x", "x"], said("Open MPI", [None] * 4, [1, 2, 2, 2]))
    assert text == (
        "Open MPI reports 2 ranks on the host of rank 1, but 3 ranks have the host name 'x'"
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE", 2)),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE", 4)),
        ({"PMI_SIZE": "4", "WORLD_SIZE": "1"}, ("PMI_SIZE", 4)),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, ("SLURM_STEP_NUM_TASKS", 4)),
        ({"SLURM_NTASKS": "4"}, None),  # an sbatch script, which is one process
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "many"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_promised_ranks(environment: Mapping[str, str], expected: tuple[str, int] | None) -> None:
    assert promised_ranks(environment) == expected
