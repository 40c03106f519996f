"""Environment of the launcher. Without torch, because commands use it too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

RECOVERY_STORE = "LIGHTNING_DIST_RECOVERY_STORE"
"""Variable with the address of the store of a launcher that recovers within the process."""


@dataclass(frozen=True)
class Launch:
    """One start of this rank. ``restart_count`` does not rise where only the membership changed.

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
    restart_count: int = 0
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
            restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
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
