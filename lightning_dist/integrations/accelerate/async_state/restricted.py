"""``weights_only=True`` for all that Accelerate writes.

``accelerator.load_state`` reads optimizers, schedulers and loaders with the restricted unpickler,
but registered objects without it: those are read with it here first, which runs no code of theirs.
"""

from __future__ import annotations

import os
import re

from lightning_dist.checkpoint.restricted import problem_with
from lightning_dist.integrations.accelerate.async_state.files import named_for
from lightning_dist.integrations.accelerate.private import load_restricted

_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
_PICKLED = re.compile(r"(custom_checkpoint_|optimizer|scheduler|dl_state_dict).*\.(pkl|bin)")


def problem_on_load(folder: str, *, rank: int) -> ValueError | None:
    """Why registered objects of ``rank`` are not loaded from ``folder``; None if they may be."""
    names = set(os.listdir(folder))
    for name in sorted(filter(_CUSTOM.fullmatch, names)):
        own = named_for(rank, name)
        if problem := _problem_with(folder, own if own in names else name):
            return problem
    return None


def problem_on_save(folder: str) -> ValueError | None:
    """Why what was written to ``folder`` could not be loaded; None if it could be."""
    for name in sorted(filter(_PICKLED.fullmatch, os.listdir(folder))):
        if problem := _problem_with(folder, name):
            return problem
    return None


def _problem_with(folder: str, name: str) -> ValueError | None:
    path = os.path.join(folder, name)
    with open(path, "rb") as file:
        return problem_with(
            file, path=path, load=load_restricted
        )  # Accelerate's allows arrays of NumPy
