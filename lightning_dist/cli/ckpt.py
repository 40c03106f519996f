"""``lightning-dist ckpt``: what is in a folder of checkpoints, and what may go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from lightning_dist.base.console import print_table, stdout_console
from lightning_dist.checkpoint.disk.folder_owner import own, owner_of
from lightning_dist.checkpoint.disk.format import (
    NAME,
    CheckpointError,
    CorruptCheckpointError,
    no_checkpoint,
)
from lightning_dist.checkpoint.disk.scan import (
    Description,
    Found,
    checkpoints,
    is_checkpoint,
    is_original,
    verify,
)
from lightning_dist.checkpoint.disk.storage import LocalStorage, Storage, storage_of
from lightning_dist.cli.command import DAMAGED, Json, line_of, print_json, reported

PROTECTED = ("last", "latest", "best")
"""Checkpoints with such a name, and those they point to, are never removed."""


def check(path: str) -> Found:
    """Read the checkpoint at ``path`` to the last byte; a terminal shows which one it is."""
    try:
        with Console(stderr=True).status(Text(f"reading {path}")):
            return Found(path, verify(path), verified=True)
    except (CheckpointError, OSError) as error:
        damaged = isinstance(error, CorruptCheckpointError)
        return Found(path, None, without_path(line_of(error), path), verified=damaged)


def without_path(problem: str, path: str) -> str:
    """``problem`` without the path, for where that is printed already."""
    return problem.removeprefix(f"{path} ").removeprefix(f"{path}: ")


@dataclass
class PrunePlan:
    """Future of every checkpoint, as ``(path, why)``."""

    kept: list[tuple[str, str]] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    untouched: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[dict[str, str | None]]]:
        """For JSON."""
        return {
            name: [{"path": path, "why": why or None} for path, why in items]
            for name, items in vars(self).items()
        }


def plan(found: Sequence[Found], *, keep: int) -> PrunePlan:
    """Keep the ``keep`` newest whole checkpoints, and remove older ones.

    Names of one save (links, copies) are one checkpoint, and only the name under which a run saved
    it is removed. Damaged ones among the newest and foreign ones are not touched.

    Args:
        found: as :func:`~lightning_dist.checkpoint.disk.scan.checkpoints` gives it.
    """
    result, enough = PrunePlan(), 0
    copies = {checkpoint.path: why for checkpoint in found if (why := _copy_of(checkpoint))}
    for paths in _saves(found):
        if enough >= keep:
            if any(_is_protected(path) or _is_link(path) for path in paths):
                result.kept += [(path, "protected name, or linked to one") for path in paths]
            else:
                result.removed += [(path, "older") for path in paths if path not in copies]
                result.untouched += [(path, copies[path]) for path in paths if path in copies]
            continue
        problems = {path: check(path).problem for path in paths}
        whole = not all(problems.values())
        enough += whole and not all(_is_protected(path) or path in copies for path in paths)
        for path, problem in problems.items():
            (result.untouched if problem else result.kept).append((path, problem))
    for checkpoint in found:
        path = checkpoint.path
        if checkpoint.description is None:
            result.untouched.append((path, without_path(checkpoint.problem, path)))
        elif checkpoint.description.origin is None:
            result.untouched.append((path, "not written by lightning_dist"))
    return result


def _saves(checkpoints: Sequence[Found]) -> list[list[str]]:
    """Paths of checkpoints of ours, by save, the newest first."""
    saves: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        if checkpoint.description is not None and checkpoint.description.origin is not None:
            saves.setdefault(checkpoint.description.origin.save_id, []).append(checkpoint.path)
    return list(saves.values())


def _copy_of(checkpoint: Found) -> str:
    """Reason why no run has written it under this name; empty: one has, or nobody knows."""
    description = checkpoint.description
    if description is None or description.origin is None or is_original(description):
        return ""
    return f"saved as {description.origin.name!r}; this is a copy or a link"


def _is_link(path: str) -> bool:
    storage, inside = storage_of(path)
    return isinstance(storage, LocalStorage) and os.path.islink(inside)


def _is_protected(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith(PROTECTED)


app = typer.Typer(no_args_is_help=True, help="List, verify, prune and consolidate checkpoints.")

_SHARD = re.compile(r"shard-\d{5}-of-\d{5}-[0-9a-f]{16}\.bin")

Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="Path or URL of a folder of checkpoints.")
]


@app.command()
@reported
def ls(folder: Folder, as_json: Json = False) -> None:
    """List the checkpoints of a folder, the newest first. Reads headers only.

    \b
      lightning-dist ckpt ls checkpoints/
      lightning-dist ckpt ls s3://bucket/run --json
    """
    storage, inside = _require_folder(folder)
    found, owner = checkpoints(folder), owner_of(folder)
    leftovers = [_name_of(path) for path in storage.leftovers(inside)]
    if as_json:
        print_json(
            folder=folder,
            checkpoints=[_fields(checkpoint) for checkpoint in found],
            owner=owner and vars(owner),
            leftovers=leftovers,
        )
        return
    if found:
        print_table(
            ("name", "step", "created", "size", "kind", "ranks", "status"),
            map(_cells, found),
            right=("step", "size", "ranks"),
            fold=("name", "status"),
            optional=("ranks", "kind", "size", "created"),
        )
    else:
        typer.echo(f"no checkpoints in {folder}")
    if owner is not None:
        typer.echo(f"in use by {owner}")
    origin = "under way" if owner is not None else "left by a dead writer; the next run removes it"
    for name in leftovers:
        typer.echo(f"{name}: {origin}")


@app.command("verify")
@reported
def verify_command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH_OR_DIR...", help="Checkpoints, or folders of them.")
    ],
    as_json: Json = False,
) -> None:
    """Read checkpoints completely and check them. Exit code 1 if any is not what was written.

    \b
      lightning-dist ckpt verify checkpoints/last.ckpt
      lightning-dist ckpt verify checkpoints/ other/ --json
    """
    checked = []
    for path in [path for given in paths for path in _checkpoints_at(given)]:
        checkpoint = check(path)
        checked.append(checkpoint)
        if as_json:
            continue
        if checkpoint.description is not None:
            _print_item("ok", path, _summary(checkpoint.description), color="green")
        else:
            _print_item("PROBLEM", path, checkpoint.problem, color="red")
    if as_json:
        print_json(checkpoints=[_fields(checkpoint) for checkpoint in checked])
    if any(checkpoint.problem for checkpoint in checked):
        raise typer.Exit(DAMAGED)


@app.command()
@reported
def prune(
    folder: Folder,
    keep: Annotated[int, typer.Option(min=1, help="Number of complete checkpoints to keep.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without confirmation.")] = False,
    no_lock: Annotated[
        bool, typer.Option("--no-lock", help="Proceed on a file system without locks.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Keep the newest checkpoints of a folder, remove older ones.

    Kept checkpoints are verified first. Damaged ones are neither counted nor removed. Files named
    last*, latest* or best*, their link targets, and files that lightning_dist did not write are
    never removed. A folder that a trainer writes to is refused, except in an object store, which
    has no locks.

    \b
    Preview, then without confirmation:
      lightning-dist ckpt prune checkpoints/ --keep 3 --dry-run
      lightning-dist ckpt prune checkpoints/ --keep 3 --yes
    """
    if as_json and not (yes or dry_run):
        raise ValueError("--json cannot ask for confirmation: add --yes, or --dry-run")
    _require_folder(folder)
    owner = owner_of(folder)
    if owner is not None:
        raise ValueError(f"{folder} is in use by {owner}; prune it when that has ended")
    lock = None if dry_run or no_lock else own(folder, patience=0, clean=False)
    try:
        found = checkpoints(folder)
        planned = plan(found, keep=keep)
        if not as_json:
            _print_plan(planned, found)
        if planned.removed and not dry_run:
            _remove(planned, locked=lock is not None, asks=not yes, says=not as_json)
        if as_json:
            print_json(folder=folder, dry_run=dry_run, **planned.as_dict())
    finally:
        if lock is not None:
            lock.release()


def _print_plan(planned: PrunePlan, found: list[Found]) -> None:
    known = {checkpoint.path: checkpoint.description for checkpoint in found}
    for word, color, items in (
        ("keep", "green", planned.kept),
        ("leave", "yellow", planned.untouched),
        ("remove", "red", planned.removed),
    ):
        for path, why in items:
            description = known[path]
            about = _summary(description) if description is not None else ""
            _print_item(word, path, "; ".join(filter(None, [about, why])), color=color)
    if not planned.removed:
        typer.echo("nothing to remove")


def _remove(planned: PrunePlan, *, locked: bool, asks: bool, says: bool) -> None:
    if asks:
        hint = "" if locked else " (no locks here: make sure that no trainer writes to this folder)"
        typer.confirm(f"Remove {_counted(planned)}{hint}?", abort=True)
    for path, _ in planned.removed:
        storage, inside = storage_of(path)
        storage.remove(inside)
    if says:
        typer.echo(f"removed {_counted(planned)}")


def _counted(planned: PrunePlan) -> str:
    count = len(planned.removed)
    return f"{count} checkpoint" + "s" * (count != 1)


@app.command()
@reported
def consolidate(
    source: Annotated[str, typer.Argument(help="Path or URL of a folder of shards.")],
    target: Annotated[str, typer.Argument(help="The file to write; must not exist.")],
    as_json: Json = False,
) -> None:
    """Merge a sharded checkpoint into one file for torch.load.

    \b
      lightning-dist ckpt consolidate checkpoints/epoch=3.ckpt whole.ckpt
    """
    storage, inside = storage_of(source)
    if not storage.exists(inside):
        raise no_checkpoint(source)
    inner = _checkpoints_at(source)
    if inner != [source]:
        raise ValueError(
            f"{source} is a folder of checkpoints; give one of them: {', '.join(inner)}"
        )
    goal, path = storage_of(target)
    parent = path.rsplit("/", 1)[0] or "/"
    if isinstance(goal, LocalStorage) and not goal.is_folder(parent):
        raise FileNotFoundError(f"There is no folder {parent}; create it first")

    from lightning_dist.checkpoint import reading  # torch

    with Console(stderr=True).status(f"reading {_name_of(source)}"):
        nbytes = reading.consolidate(source, target)
    if as_json:
        print_json(source=source, path=target, nbytes=nbytes)
        return
    local = isinstance(goal, LocalStorage)
    opened = repr(target) if local else f"fsspec.open({target!r}).open()"
    typer.echo(f"{target}: {decimal(nbytes)}")
    typer.echo(
        f"load it with torch.load({opened}, map_location='cpu'); add weights_only=False if it "
        "holds more than tensors and you trust it"
    )


def _require_folder(folder: str) -> tuple[Storage, str]:
    """The storage of a folder of checkpoints, and the path within it."""
    storage, inside = storage_of(folder)
    if not storage.exists(inside):
        raise FileNotFoundError(
            f"There is no folder {folder}; give the one that checkpoints are saved to (dirpath)"
        )
    if not storage.is_folder(inside):
        raise ValueError(f"{folder} is a file, not a folder of checkpoints")
    if storage.exists(f"{inside}/{NAME}"):
        raise ValueError(f"{folder} is one checkpoint, not a folder of checkpoints")
    return storage, inside


def _checkpoints_at(path: str) -> list[str]:
    """``path`` if it is a checkpoint or should be one, else the paths of those in this folder."""
    storage, inside = storage_of(path)
    if not storage.exists(inside):
        raise FileNotFoundError(
            f"There is no checkpoint or folder at {path}; lightning-dist ckpt ls DIR lists the "
            "checkpoints of a folder"
        )
    is_one = is_checkpoint(storage, inside) or not storage.is_folder(inside)
    if is_one or any(map(_SHARD.fullmatch, storage.names(inside))):
        return [path]
    paths = [checkpoint.path for checkpoint in checkpoints(path)]
    if not paths:
        raise ValueError(
            f"There are no checkpoints in {path}; give the folder that they are saved to (dirpath)"
        )
    return paths


def _print_item(word: str, path: str, text: str, *, color: str | None = None) -> None:
    line = Text.assemble((f"{word:<7}", color or ""), f" {path}: {text}")
    stdout_console().print(line, soft_wrap=True)


def _name_of(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rsplit("/", 1)[-1]


def _fields(checkpoint: Found) -> dict[str, Any]:
    """A checkpoint for JSON."""
    description = checkpoint.description
    origin = None if description is None else description.origin
    created = origin and datetime.fromtimestamp(origin.created_ns / 1e9).astimezone()
    return {
        "name": _name_of(checkpoint.path),
        "path": checkpoint.path,
        "kind": description and description.kind,
        "nbytes": description and description.nbytes,
        "step": origin and origin.step,
        "created": created and created.isoformat(),
        "ranks": origin and origin.ranks,
        "problem": without_path(checkpoint.problem, checkpoint.path) or None,
        "verified": checkpoint.verified,
    }


def _cells(checkpoint: Found) -> tuple[str, ...]:
    row = _fields(checkpoint)
    text = {name: "" if value is None else str(value) for name, value in row.items()}
    created = text["created"][:19].replace("T", " ")
    size = "" if row["nbytes"] is None else decimal(row["nbytes"])
    status = text["problem"] or "not verified"
    return text["name"], text["step"], created, size, text["kind"], text["ranks"], status


def _summary(description: Description) -> str:
    """Step, kind and size of a checkpoint."""
    parts = [description.kind, decimal(description.nbytes)]
    if description.origin is not None:
        parts.insert(0, f"step {description.origin.step}")
    return ", ".join(parts)
