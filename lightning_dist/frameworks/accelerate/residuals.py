"""Residuals of compressed gradients, in files beside accelerate's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_dist.base.log import get_logger
from lightning_dist.frameworks.accelerate.attach import handler_of
from lightning_dist.frameworks.accelerate.private import prepared_models
from lightning_dist.ranks.facts import all_facts
from lightning_dist.sync.base import Sync, sync_of

if TYPE_CHECKING:
    from accelerate import Accelerator

log = get_logger(__name__)


def owners(accelerator: Accelerator) -> list[Sync]:
    """What keeps replicas of the prepared models equal and is saved beside them, in their order."""
    found = [sync_of(model) for model in prepared_models(accelerator)]
    return [sync for sync in found if sync is not None and not sync.is_own_object]


@contextmanager
def in_our_hands(accelerator: Accelerator) -> Iterator[None]:
    """Let an attached plugin leave residuals alone while Accelerate saves or loads."""
    handler = handler_of(accelerator)
    if handler is not None:
        handler.saved_by_another = True
    try:
        yield
    finally:
        if handler is not None:
            handler.saved_by_another = False


def write(states: Iterable[Any], folder: str) -> None:
    """Write states of reducers, None where another rank has them."""
    for index, state in enumerate(states):
        if state is not None:
            torch.save(state, _file(folder, index))


def require_one_folder(accelerator: Accelerator, folder: str) -> None:
    """Raise ValueError unless every rank sees the same files of ours in ``folder``. Collective."""
    count, world = len(owners(accelerator)), dist.group.WORLD
    if not count:
        return
    assert world is not None
    mine = {"files": [os.path.exists(_file(folder, index)) for index in range(count)]}
    facts = all_facts(mine, group=world, device=accelerator.device)
    differ = [rank for rank, fact in enumerate(facts) if fact != facts[0]]
    if differ:
        raise ValueError(
            f"All ranks must load the same residuals, but ranks {differ} do not see the files that "
            f"rank 0 sees in {folder}; load from a folder that all nodes share"
        )


def load(accelerator: Accelerator, folder: str, *, says: bool) -> None:
    """Give every reducer what ``folder`` holds for it.

    Args:
        says: warn of what does not fit.
    """
    found = owners(accelerator)
    for index, owner in enumerate(found):
        file, state = _file(folder, index), None
        if os.path.exists(file):
            state = torch.load(file, map_location="cpu", weights_only=True)
        elif says:
            log.warning(
                "%s holds no residuals for compressed model %d, which starts without any",
                folder,
                index,
            )
        owner.load_state_dict(state)
    if says and os.path.exists(_file(folder, len(found))):
        log.warning(
            "%s holds residuals of a compressed model, and no model here is compressed: the "
            "residuals are dropped. Compress the model before load_state: with a "
            "CompressedDDPPlugin attached before prepare, which needs several processes, or with "
            "compress_ddp after it",
            folder,
        )


def _file(folder: str, index: int) -> str:
    return os.path.join(folder, f"lightning_dist_reducer_{index}.bin")
