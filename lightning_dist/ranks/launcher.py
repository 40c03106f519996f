"""Placement of this process by the launcher, to be checked against the host names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dist.ranks.nodes import ranks_by

_LOCAL_SIZES = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI",
    "MV2_COMM_WORLD_LOCAL_SIZE": "MVAPICH2",
    "MPI_LOCALNRANKS": "MPICH",
}

_SIZES = (
    "WORLD_SIZE",  # torchrun, accelerate, kubeflow, ...
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",  # srun only: an sbatch script has SLURM_NTASKS and is one process
)


@dataclass(frozen=True)
class Claim:
    """``node``: number of the machine; ``local_size``: ranks on it; None where it is not said."""

    launcher: str
    node: int | None = None
    local_size: int | None = None

    def as_fact(self) -> dict[str, Any]:
        return asdict(self)


def claim(*, rank: int, environment: Mapping[str, str] = os.environ) -> Claim | None:
    """Placement of global ``rank`` in the environment of torchrun, Lightning, SLURM or MPI.

    The innermost launcher speaks: torchrun inside a SLURM allocation is torchrun.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else None

    if "LOCAL_WORLD_SIZE" in environment:
        return Claim("torchrun", number("GROUP_RANK"), number("LOCAL_WORLD_SIZE"))
    if number("SLURM_PROCID") == rank and number("SLURM_NTASKS") not in (None, 1):
        return Claim("SLURM", number("SLURM_NODEID"))
    for variable, launcher in _LOCAL_SIZES.items():
        if number(variable) is not None:
            return Claim(launcher, local_size=number(variable))
    if "LOCAL_RANK" in environment and "NODE_RANK" in environment:
        return Claim("Lightning", number("NODE_RANK"))
    return None


def promised_ranks(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """The variable in which a launcher says that there are several processes, and how many."""
    for name in _SIZES:
        text = environment.get(name, "")
        if text.isdigit() and int(text) > 1:
            return name, int(text)
    return None


def contradiction(names: Sequence[str], claims: Sequence[Mapping[str, Any] | None]) -> str | None:
    """Contradiction between the launcher and the host names of ranks; None if there is none."""
    if any(claim is None for claim in claims):
        return None
    reported = [claim for claim in claims if claim is not None]
    nodes = [claim["node"] for claim in reported]
    if None not in nodes and ranks_by(nodes) != ranks_by(names):
        return (
            f"{reported[0]['launcher']} reports ranks 0 to {len(names) - 1} on nodes {nodes}, but "
            f"their host names are {list(names)}"
        )
    for rank, claim in enumerate(reported):
        here = sum(name == names[rank] for name in names)
        # A process group may leave some of a node's ranks out, but it cannot add any.
        if claim["local_size"] is not None and here > claim["local_size"]:
            return (
                f"{claim['launcher']} reports {claim['local_size']} ranks on the node of rank "
                f"{rank}, but {here} ranks have the host name {names[rank]!r}"
            )
    return None
