"""Files of a saved state, and the scratch folders where Accelerate writes them.

The lowest rank that writes a file has accelerate's name for it. Where another rank writes one with
the same name, it is that rank's own state: ``custom_checkpoint_0.pkl`` of rank 1 is kept as
``custom_checkpoint_0.rank1.pkl``. Accelerate by itself does not read those.

``accelerator.load_state`` reads optimizers, schedulers and loaders with the restricted unpickler,
but registered objects without it: those are read with it here first, which runs no code of theirs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.reading import problem_with
from lightning_dist.frameworks.accelerate import private, residuals
from lightning_dist.ranks.agreement import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

log = get_logger(__name__)


_MEMORY = "/dev/shm"
_PREFIX = "lightning_dist-state-"
_MARK = "handed_over"
_MARGIN = 64 << 20
_FRESH_S = 60.0
_ABANDONED_S = 24 * 3600.0


class Scratch:
    """A folder that lives until :meth:`remove`, or as long as somebody needs it.

    While its process lives it is locked. Once handed over it belongs to the writer, which removes
    it even where the process has been killed. What neither could remove, :func:`sweep` does.
    """

    def __init__(self, base: str) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.files = os.path.join(self.path, "files")
        os.mkdir(self.files)

    def hand_over(self, folder: str) -> None:
        """From now on a writer reads the files, which puts them in ``folder``."""
        Path(self.path, _MARK).write_text(folder)

    def remove(self) -> None:
        """Remove it, if nobody has."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def base_for(nbytes: int, given: str | None) -> str:
    """Parent for a folder of about ``nbytes``: in memory if there is room, else on disk."""
    if given is not None:
        return given
    room = 0
    if os.access(_MEMORY, os.W_OK | os.X_OK):
        room = min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available)
    return _MEMORY if nbytes + nbytes // 10 + _MARGIN <= room else tempfile.gettempdir()


def sweep(given: str | None, *, released: str = "") -> None:
    """Remove what killed processes of this user have left.

    Args:
        given: where; None: wherever :func:`base_for` puts scratch folders.
        released: a folder to which no writer of a dead process writes any more.
    """
    bases = [_MEMORY, tempfile.gettempdir()] if given is None else [given]
    for path in chain.from_iterable(Path(base).glob(f"{_PREFIX}*") for base in bases):
        with suppress(OSError):
            state, mark = path.stat(), path / _MARK
            limit = _FRESH_S  # somebody might be making it
            if mark.exists():
                limit = -1.0 if mark.read_text() == released else _ABANDONED_S
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > limit:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


OBJECTS = re.compile(r"custom_checkpoint_\d+\.pkl")
_PICKLED = re.compile(r"(custom_checkpoint_|optimizer|scheduler|dl_state_dict).*\.(pkl|bin)")


def stage(
    accelerator: Accelerator,
    *,
    ranks: Ranks,
    staging_dir: str | None,
    restricted: bool,
    arguments: Mapping[str, Any],
) -> tuple[Scratch, list[tuple[str, str]]]:
    """Have accelerate write its files into a scratch folder. Collective.

    Args:
        staging_dir: where to make the scratch folder; None: in memory if there is room.
        restricted: whether ``weights_only=True`` has to be able to read it.
        arguments: of ``accelerator.save_state``.

    Returns:
        The folder, and this rank's part of the checkpoint: ``(name in it, path)``.

    Raises:
        ValueError: on all ranks, if it is not; nothing is left.
        CheckpointError: on all ranks, if one of them could not; nothing is left.
    """
    states = [owner.state_dict() for owner in residuals.owners(accelerator)]  # collective
    names: list[str] = []
    error: Exception | None = None
    with ExitStack() as undo:
        try:
            scratch = Scratch(base_for(_nbytes(accelerator), staging_dir))
            undo.callback(scratch.remove)
            _write_accelerates_files(accelerator, scratch.files, arguments)
            _write_own_objects(accelerator, scratch.files)
            residuals.write(states, scratch.files)
            names = _names_in(scratch.files)
            error = problem_in(scratch.files, _PICKLED) if restricted else None
        except Exception as raised:
            error = CheckpointError(
                f"Rank {ranks.rank} could not write its files: {raised!r}; if the disk is full, "
                "set staging_dir= to a folder on another file system"
            )
            error.__cause__ = raised
        held = [facts["names"] for facts in ranks.all({"names": names}, error=error)]
        undo.pop_all()
    return scratch, _share_of(ranks.rank, held, folder=scratch.files)


def _write_accelerates_files(
    accelerator: Accelerator, folder: str, arguments: Mapping[str, Any]
) -> None:
    project = accelerator.project_configuration
    before = project.automatic_checkpoint_naming, project.iteration
    project.automatic_checkpoint_naming = False  # it would choose the folder
    try:
        with residuals.in_our_hands(accelerator):
            accelerator.save_state(folder, **arguments)
    finally:
        project.automatic_checkpoint_naming, project.iteration = before


def _write_own_objects(accelerator: Accelerator, folder: str) -> None:
    """Registered objects of the ranks for which accelerate does not do it."""
    if accelerator.num_processes == 1:
        return
    for index, registered in enumerate(private.registered_objects(accelerator)):
        state = registered.state_dict()  # on all ranks: it may be collective
        if not accelerator.is_main_process:
            torch.save(state, os.path.join(folder, f"custom_checkpoint_{index}.pkl"))


def _nbytes(accelerator: Accelerator) -> int:
    """About as much as this rank will write."""
    if not accelerator.is_main_process:
        return 0
    tensors = [
        t for m in private.prepared_models(accelerator) for t in (*m.parameters(), *m.buffers())
    ]
    for optimizer in private.prepared_optimizers(accelerator):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _names_in(folder: str) -> list[str]:
    """All files in ``folder`` and its folders, relative to it."""
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _named_for(rank: int, name: str) -> str:
    """The name under which ``rank`` keeps its own file of a name that a lower rank has too."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}.rank{rank}{suffix}"


def _share_of(rank: int, held: Sequence[Sequence[str]], *, folder: str) -> list[tuple[str, str]]:
    lower = {name for names in held[:rank] for name in names}
    return [
        (_named_for(rank, name) if name in lower else name, f"{folder}/{name}")
        for name in held[rank]
    ]


def problem_in(folder: str, files: re.Pattern[str], *, rank: int = 0) -> ValueError | None:
    """The reason why some of ``files`` could not be loaded with restrictions; None if all could.

    Args:
        rank: whose own files are looked at where there are some.
    """
    names = set(os.listdir(folder))
    for name in sorted(filter(files.fullmatch, names)):
        own = _named_for(rank, name)
        path = os.path.join(folder, own if own in names else name)
        with open(path, "rb") as file:
            # Accelerate's own function allows arrays of NumPy.
            if problem := problem_with(file, path=path, load=private.load_restricted):
                return problem
    return None


def load(
    accelerator: Accelerator,
    path: str,
    *,
    saved_by: int | None,
    ranks: Ranks,
    restricted: bool,
    arguments: Mapping[str, Any],
) -> None:
    """Load the folder ``path``, which has been checked. Collective.

    Args:
        saved_by: number of ranks that saved it; None if accelerate itself wrote it.
        restricted: whether objects that would run code are refused.
        arguments: of ``accelerator.load_state``.

    Raises:
        ValueError: a rank cannot read it, or has other objects registered, or ``restricted`` does
            not let it be read; nothing was loaded.
    """
    says = ranks.rank == 0
    resized = saved_by not in (None, ranks.count)
    rank = 0 if resized else ranks.rank  # 0 has no files of its own: as accelerate would load it
    problem = _problem_of_objects(path, accelerator, rank=ranks.rank)
    if problem is None and restricted:
        problem = problem_in(path, OBJECTS, rank=rank)
    ranks.all({}, error=problem)
    if resized and says:
        log.warning(
            "%s was saved by %s ranks and is loaded by %d: models, optimizers and schedulers are "
            "exact; registered objects and stateful dataloaders start from rank 0's state on every "
            "rank, each rank's random states are those of the same number or, where there were "
            "fewer, stay as they are, and residuals of compressed gradients start from their mean",
            path,
            saved_by,
            ranks.count,
        )
    with _as_seen_by(rank, path) as view, residuals.in_our_hands(accelerator):
        accelerator.load_state(view, **arguments)
    residuals.load(accelerator, path, says=says)


def _problem_of_objects(path: str, accelerator: Accelerator, *, rank: int) -> ValueError | None:
    """The reason that accelerate would find when half of it is loaded."""
    try:
        names = os.listdir(path)
    except OSError as error:
        return ValueError(
            f"Rank {rank} cannot read {path} ({error}); checkpoints must be in a folder that all "
            "ranks share"
        )
    saved = sum(OBJECTS.fullmatch(name) is not None for name in names)
    registered = len(private.registered_objects(accelerator))
    if saved == registered:
        return None
    return ValueError(
        f"{path} holds {saved} objects registered for checkpointing, and this accelerator has "
        f"{registered}; register the same objects in the same order"
    )


@contextmanager
def _as_seen_by(rank: int, folder: str) -> Iterator[str]:
    """``folder`` with this rank's own files under accelerate's names, as symbolic links."""
    names = set(_names_in(folder))
    own = {name: mine for name in names if (mine := _named_for(rank, name)) in names}
    if not own:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="lightning_dist-view-") as temporary:
        view = Path(temporary, Path(folder).name)
        for name in names:
            link = view / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(folder, own.get(name, name)).resolve())
        yield str(view)
