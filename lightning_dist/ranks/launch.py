"""Launch of this process: its ranks by the environment and by the launcher's claims."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from lightning_dist.ranks.levels import ranks_by

RECOVERY_STORE = "LIGHTNING_DIST_RECOVERY_STORE"
"""Variable with the address of the store of a launcher that recovers within the process."""


@dataclass(frozen=True)
class Launch:
    """One start of this rank.

    ``local_world_size`` is None where the launcher does not say it: torchrun does, other agents may
    not. ``shares_store``: the ranks use the store of their agent, which outlives them.
    ``is_elastic`` is False where torchrun (or another launcher on torch's elastic agent) did not
    start this process.
    """

    is_elastic: bool
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    node_rank: int = 0
    nodes: int = 1
    max_restarts: int = 0
    run_id: str = ""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    shares_store: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """Read the variables of torch's elastic agent; defaults where they are not set.

        Raises:
            ValueError: a variable that should be a number is not one.
        """
        return cls(
            is_elastic="TORCHELASTIC_RUN_ID" in environ,
            rank=_number(environ, "RANK", 0),
            world_size=_number(environ, "WORLD_SIZE", 1),
            local_rank=_number(environ, "LOCAL_RANK", 0),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 0) or None,
            node_rank=_number(environ, "GROUP_RANK", 0),
            nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
            max_restarts=_number(environ, "TORCHELASTIC_MAX_RESTARTS", 0),
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", 0),
            shares_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def missing_settings(self) -> list[str]:
        """Settings of the launcher that restarts need and that this rank can see are missing.

        One sentence each, with the remedy. Empty where nothing is missing, or where torchrun did
        not start this process.
        """
        missing = []
        if self.is_elastic and self.max_restarts == 0:
            missing.append(
                "a failed rank ends the job, because max_restarts is 0: start torchrun with "
                "--max-restarts=3, or use `lightning-dist launch`"
            )
        if self.is_elastic and self.shares_store and not self._is_alone:
            # torch 2.13: an agent that stays does not publish the address of its store again, and
            # the agent that joins waits for it until both give up.
            missing.append(
                "nodes cannot join this job (--nnodes=MIN:MAX), because its ranks share the "
                "launcher's store: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts, "
                "or use `lightning-dist launch`"
            )
        return missing

    @property
    def _is_alone(self) -> bool:
        """The only node for good: torchrun draws the run id where nobody else needs to know it."""
        try:
            return self.nodes == 1 and str(UUID(self.run_id)) == self.run_id
        except ValueError:
            return False


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    try:
        return int(value or default)
    except ValueError:
        raise ValueError(
            f"{name} must be an integer, got {value!r}; the launcher sets it, so leave it unset"
        ) from None


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
    """Place of global ``rank`` in the environment of torchrun, Lightning, SLURM or MPI.

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
