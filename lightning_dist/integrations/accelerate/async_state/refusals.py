"""Settings that AsyncStateCheckpointer refuses, checked before anything is saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from lightning_dist.elastic.recovery.groups import is_alone
from lightning_dist.integrations.accelerate.async_state.folders import local
from lightning_dist.integrations.accelerate.attach import kind_of
from lightning_dist.integrations.accelerate.private import prepared_models

if TYPE_CHECKING:
    from accelerate import Accelerator


def require_effect(*, snapshot: str, host_memory_limit: int | None) -> None:
    """Raise ValueError for settings of other checkpoints that cannot take effect here."""
    if snapshot == "overlap":
        raise ValueError(
            "snapshot='overlap' cannot take effect: accelerate writes its files at once; use "
            "'blocking'"
        )
    if host_memory_limit is not None:
        raise ValueError(
            "host_memory_limit cannot take effect: accelerate decides how much it writes; give "
            "staging_dir= on a disk to keep snapshots out of memory"
        )


def staging_folder(given: str | os.PathLike[str] | None) -> str | None:
    """An absolute path. Raises ValueError if it is no folder."""
    if given is None:
        return None
    folder = local(given)
    if not os.path.isdir(folder):
        raise ValueError(f"staging_dir must be a folder, got {folder}; make it")
    return folder


def require_separable(accelerator: Accelerator) -> None:
    """Raise ValueError unless every rank can write its files into a folder of its own."""
    if is_alone():
        raise ValueError(
            "An AsyncStateCheckpointer saves with the ranks of its start, and with "
            "recovery='in_process' ranks come and go; leave it out: ElasticLoop saves, and "
            "accelerator.save_state works inside of it"
        )
    kind = kind_of(accelerator)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise _not_separable(f"with {kind} they are not")
    for model in prepared_models(accelerator):
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise _not_separable("this model is divided over ranks (DTensor), which save together")
    if accelerator.project_configuration.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True cannot take effect: all ranks write one folder, which they "
            "must share; leave it out, and save to a folder that all nodes see"
        )


def _not_separable(reason: str) -> ValueError:
    return ValueError(
        "AsyncStateCheckpointer works for one process and for DDP, where every rank's files are "
        f"written apart; {reason}; use accelerator.save_state there"
    )
