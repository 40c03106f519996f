"""What the ranks of a shared checkpoint agree on before they take their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.manifest import Origin
from lightning_dist.exchange.handshake import all_facts


def agree(
    origin: Origin,
    *,
    group: dist.ProcessGroup | None,
    shape: int = 0,
    problem: Exception | None = None,
) -> tuple[Origin, bool]:
    """Rank 0's origin, and whether all ranks divide the state alike. Collective.

    Args:
        origin: what this rank would write.
        group: of the ranks, on CPU; None if there is one.
        shape: equal numbers mean that ranks divide alike.
        problem: why this rank cannot take part.

    Raises:
        CheckpointError: on all ranks, if that is the problem of one.
        ValueError: on all ranks, if one has another problem; or there are several ranks and no
            group.
    """
    if group is None and origin.ranks > 1:
        raise ValueError(
            f"{origin.ranks} ranks write one folder together, so they need a group on CPU, got "
            "group=None; give dist.new_group(backend='gloo')"
        )
    mine: dict[str, Any] = {"id": origin.save_id, "ns": origin.created_ns, "order": origin.order}
    mine |= {"shape": shape, "problem": _told(problem)}
    mine |= {"failed": isinstance(problem, CheckpointError)}
    facts = [mine]
    if group is not None:
        facts = [dict(of) for of in all_facts(mine, group=group, device=torch.device("cpu"))]
    for rank, of_rank in enumerate(facts):
        if of_rank["problem"]:
            kind = CheckpointError if of_rank["failed"] else ValueError
            raise kind(f"rank {rank} cannot save its state: {of_rank['problem']}")
    first = facts[0]
    alike = all(of_rank["shape"] == first["shape"] for of_rank in facts)
    agreed = replace(
        origin,
        save_id=str(first["id"]),
        created_ns=int(first["ns"]),
        order=int(first["order"]),
    )
    return agreed, alike


def _told(problem: Exception | None) -> str:
    return "" if problem is None else f"{type(problem).__name__}: {problem}"
