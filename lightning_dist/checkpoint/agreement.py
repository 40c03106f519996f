"""The origin of a shared checkpoint, on which ranks agree before they take their parts."""

from __future__ import annotations

from dataclasses import replace

from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.manifest import Origin
from lightning_dist.checkpoint.ranks import Ranks


def agree(
    origin: Origin, *, ranks: Ranks, shape: int = 0, problem: Exception | None = None
) -> tuple[Origin, bool]:
    """Rank 0's origin, and whether all ranks divide the state alike. Collective.

    Args:
        origin: what this rank would write.
        ranks: that write one checkpoint together.
        shape: equal numbers mean that ranks divide alike.
        problem: why this rank cannot take part.

    Raises:
        CheckpointError: on all ranks, if that is the problem of one.
        ValueError: on all ranks, if one has another problem; or there are several ranks and no
            group.
    """
    if ranks.count < origin.ranks:
        raise ValueError(
            f"{origin.ranks} ranks write one folder together, so they need a group on CPU, got "
            "group=None; give dist.new_group(backend='gloo')"
        )
    error: Exception | None = None
    if problem is not None:
        kind = CheckpointError if isinstance(problem, CheckpointError) else ValueError
        text = f"{type(problem).__name__}: {problem}"
        error = kind(f"rank {ranks.rank} cannot save its state: {text}")
        error.__cause__ = problem
    mine = {"save_id": origin.save_id, "created_ns": origin.created_ns, "order": origin.order}
    by_rank = ranks.all({"origin": mine, "shape": shape}, error=error)
    alike = all(each["shape"] == by_rank[0]["shape"] for each in by_rank)
    return replace(origin, **by_rank[0]["origin"]), alike
