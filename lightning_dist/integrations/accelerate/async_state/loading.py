"""Give an Accelerator the state that a folder holds."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.integrations.accelerate import residuals
from lightning_dist.integrations.accelerate.async_state.files import as_seen_by, problem_on_load
from lightning_dist.integrations.accelerate.async_state.places import Source
from lightning_dist.integrations.accelerate.private import registered_objects

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

_OBJECT = re.compile(r"custom_checkpoint_\d+\.pkl")


def load(
    accelerator: Accelerator,
    source: Source,
    *,
    ranks: Ranks,
    restricted: bool,
    arguments: Mapping[str, Any],
) -> None:
    """Load ``source``, which has been checked. Collective.

    Args:
        restricted: whether objects that would run code are refused.
        arguments: of ``accelerator.load_state``.

    Raises:
        ValueError: a rank cannot read it, or has other objects registered, or ``restricted`` does
            not let it be read; nothing was loaded.
    """
    path, says = source.path, ranks.rank == 0
    resized = source.ranks not in (None, ranks.count)
    rank = 0 if resized else ranks.rank  # 0 has no files of its own: as accelerate would load it
    problem = _problem(path, accelerator, rank=ranks.rank)
    if problem is None and restricted:
        problem = problem_on_load(path, rank=rank)
    ranks.all({}, error=problem)
    if resized and says:
        _warn_of_other_ranks(path, saved_by=source.ranks, loaded_by=ranks.count)
    with as_seen_by(rank, path) as view, residuals.in_our_hands(accelerator):
        accelerator.load_state(view, **arguments)
    residuals.load(accelerator, path, says=says)


def _problem(path: str, accelerator: Accelerator, *, rank: int) -> ValueError | None:
    """What accelerate would notice when half of it is loaded."""
    try:
        names = os.listdir(path)
    except OSError as error:
        return ValueError(
            f"rank {rank} cannot read {path} ({error}); checkpoints must be in a folder that all "
            "ranks share"
        )
    saved = sum(_OBJECT.fullmatch(name) is not None for name in names)
    registered = len(registered_objects(accelerator))
    if saved == registered:
        return None
    return ValueError(
        f"{path} holds {saved} objects registered for checkpointing, and this accelerator has "
        f"{registered}; register the same objects in the same order"
    )


def _warn_of_other_ranks(path: str, *, saved_by: int | None, loaded_by: int) -> None:
    log.warning(
        "%s was saved by %s ranks and is loaded by %d: models, optimizers and schedulers are "
        "exact; registered objects and stateful dataloaders start from rank 0's state on every "
        "rank, each rank's random states are those of the same number or, where there were fewer, "
        "stay as they are, and residuals of compressed gradients start from their mean",
        path,
        saved_by,
        loaded_by,
    )
