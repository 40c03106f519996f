"""Folders that are checkpoints, or are in the way of one, and trainings that have none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.format import NAME, CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.scan import (
    Description,
    checkpoints,
    describe,
    is_original,
    verify,
)
from lightning_dist.elastic.recovery.generations import is_alone
from lightning_dist.frameworks.accelerate.attach import kind_of
from lightning_dist.frameworks.accelerate.private import prepared_models

if TYPE_CHECKING:
    from accelerate import Accelerator

log = get_logger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True)
class Destination:
    """Where to save."""

    target: str
    number: int
    superseded: list[str]
    """Checkpoints that are over ``total_limit`` once this one is there."""


def local(path: str | os.PathLike[str]) -> str:
    """An absolute path. Raises ValueError for a URL."""
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(
            f"AsyncStateCheckpointer saves to a local or mounted folder, got {text!r}; save to one "
            "and copy the finished folder, which is complete as soon as it has its name"
        )
    return os.path.abspath(os.path.expanduser(text))


def staging(given: str | os.PathLike[str] | None) -> str | None:
    """An absolute path. Raises ValueError if it is no folder."""
    if given is None:
        return None
    folder = local(given)
    if not os.path.isdir(folder):
        raise ValueError(f"staging_dir must be a folder, got {folder}; make it")
    return folder


def automatic(project: Any, *, needed: str) -> str:
    """The folder in which accelerate's automatic naming puts checkpoints.

    Args:
        project: an Accelerator's ``ProjectConfiguration``.
        needed: what is missing where it does not ask for automatic naming.

    Raises:
        ValueError: it does not.
    """
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ValueError(
            f"{needed}, or an Accelerator with ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True)"
        )
    return os.path.join(local(project.project_dir), "checkpoints")


def next_in(folder: str, project: Any, *, pending: Iterable[str]) -> Destination:
    """The next ``checkpoint_n`` in ``folder``.

    Only what AsyncStateCheckpointer saved as ``checkpoint_n`` is superseded: no copies, nor what
    accelerate saved.

    Args:
        pending: where saves that are under way will be.
    """
    under_way = _numbers(path for path in pending if os.path.dirname(path) == folder)
    number = max({project.iteration - 1} | _numbers(os.listdir(folder)) | under_way) + 1
    superseded: list[int] = []
    if project.total_limit is not None:
        found = (checkpoint.description for checkpoint in checkpoints(folder))
        own = _numbers(
            description.path
            for description in found
            if description is not None and is_original(description)
        )
        superseded = sorted(own | under_way | {number})[: -max(project.total_limit, 1)]
    return Destination(
        _numbered(folder, number), number, [_numbered(folder, old) for old in superseded]
    )


def _numbered(folder: str, number: int) -> str:
    return os.path.join(folder, f"checkpoint_{number}")


def _numbers(paths: Iterable[str]) -> set[int]:
    """``n`` of every ``checkpoint_n`` among ``paths``."""
    found = (_NUMBERED.fullmatch(os.path.basename(path)) for path in paths)
    return {int(match[1]) for match in found if match is not None}


def require_ours(target: str) -> None:
    """Raise ValueError if something is at ``target`` that a save must not replace."""
    if not os.path.lexists(target):
        return
    if os.path.exists(os.path.join(target, NAME)):
        _require_original(target)
    elif not os.path.isdir(target):
        raise ValueError(f"A checkpoint is a folder, and {target} is a file; choose another name")
    elif os.listdir(target):
        raise ValueError(
            f"{target} holds files and no {NAME}, so AsyncStateCheckpointer did not write it and "
            "will not replace it; remove it, or choose another name"
        )


def _require_original(target: str) -> None:
    try:
        found = describe(target)
    except CheckpointError:
        return  # damaged, and about to be replaced by a whole one
    if found.origin is not None and not is_original(found):
        raise ValueError(
            f"{target} was saved as {found.origin.name!r}, so it is a copy that "
            "AsyncStateCheckpointer did not make and will not replace; remove it, or choose "
            "another name"
        )


def newest(folder: str, *, check: bool) -> Description:
    """The newest complete checkpoint of ours in ``folder``; others are named in warnings.

    Raises:
        FileNotFoundError: there is none, not even a damaged one.
        CheckpointError: all are damaged or incomplete.
    """
    passed: dict[str, str] = {}
    chosen = None
    for found in checkpoints(folder):
        if found.description is None:
            passed[found.path] = found.problem
        elif found.description.kind == "folder" and chosen is None:
            try:
                chosen = verify(found.path) if check else found.description
            except (CheckpointError, OSError) as error:
                passed[found.path] = getattr(error, "reason", str(error))
    chosen_number = -1 if chosen is None else max(_numbers([chosen.path]), default=-1)
    for number in sorted(_numbers(os.listdir(folder)), reverse=True):
        path = _numbered(folder, number)
        if number > chosen_number and not os.path.exists(os.path.join(path, NAME)):
            passed[path] = (
                f"it has no {NAME}: accelerate itself wrote it, and it cannot be verified; to load "
                "it, give its name"
            )
    for path, reason in passed.items():
        log.warning("Skipping %s: %s", path, reason)
    if chosen is not None:
        return chosen
    if passed:
        reasons = "; ".join(f"{os.path.basename(path)}: {why}" for path, why in passed.items())
        raise CheckpointError(
            f"There is no complete checkpoint in {folder}: {reasons}; give another one (input_dir=)"
        )
    raise FileNotFoundError(
        f"There is no checkpoint in {folder}; save one first, or give another folder (input_dir=)"
    )


def given(path: str, *, check: bool) -> Description | None:
    """The checkpoint in the folder ``path``; None if accelerate itself wrote it.

    Raises:
        FileNotFoundError: there is no such folder.
        CorruptCheckpointError: it is incomplete or has changed.
        ValueError: it holds something else.
    """
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"There is no folder {path}; give one that save_state has written (input_dir=)"
        )
    if not os.path.exists(os.path.join(path, NAME)):
        if not os.listdir(path):
            raise CorruptCheckpointError(path, "the folder is empty")
        log.warning(
            "%s has no %s: accelerate itself wrote it, and it cannot be verified", path, NAME
        )
        return None
    description = verify(path) if check else describe(path)
    if description.kind != "folder":
        raise ValueError(
            f"{path} is a {description.kind} checkpoint of Lightning, not one of accelerate"
        )
    return description


def require_separable(accelerator: Accelerator) -> None:
    """Raise ValueError unless every rank can write its files into a folder of its own."""
    if is_alone():
        raise ValueError(
            "an AsyncStateCheckpointer saves with the ranks of its start, and with "
            "recovery='in_process' ranks join and leave; leave it out: ElasticLoop saves, and "
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
