"""``accelerator.save_state`` and ``load_state``, asynchronous and crash-safe."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.checkpointer import Checkpointer, Metrics
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.saves import Failure, Saves
from lightning_dist.frameworks.accelerate.accelerator import Accelerator
from lightning_dist.frameworks.accelerate.async_state import files, folders
from lightning_dist.frameworks.accelerate.async_state.files import Scratch, sweep
from lightning_dist.ranks.agreement import Ranks, destroy, new_group_of_all
from lightning_dist.settings.run import FilesSettings
from lightning_dist.settings.signatures import takes

if TYPE_CHECKING:
    import accelerate

log = get_logger(__name__)


class AsyncStateCheckpointer:
    """Saves an Accelerator's state in the background, atomically, and loads it.

    Accelerate writes its files into memory; a writer puts them in a folder that appears under its
    name once everything is durable, with a manifest of checksums. Stock ``accelerator.load_state``
    reads that folder too. Every rank makes one, after ``accelerator.prepare``; making it, saving
    and loading are collective.

    Beyond accelerate's files it keeps, for every rank, the state of objects registered with
    ``register_for_checkpointing``, and the residuals of models given to
    :func:`lightning_dist.compress_ddp`.
    """

    @takes(FilesSettings)
    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        settings: FilesSettings,
        *,
        staging_dir: str | os.PathLike[str] | None = None,
        weights_only: bool = True,
    ) -> None:
        """Check the arguments. Collective.

        Args:
            accelerator: of one process, or of DDP.
            settings: each an argument of the checkpointer.
            staging_dir: where accelerate's files wait for the writer. None: ``/dev/shm`` if they
                fit in, else ``tempfile.gettempdir()``.
            weights_only: loading runs no code of the files, also where Accelerate unpickles
                registered objects; a first save that could not be loaded so is refused. False:
                anything is saved and loaded; only for folders whose writers you trust.

        Raises:
            ValueError: a setting that cannot take effect, or an Accelerator that writes its
                checkpoints collectively (FSDP, DeepSpeed, Megatron-LM, tensor parallelism).
        """
        folders.require_separable(accelerator)
        self._settings = settings
        self._staging_dir = folders.staging(staging_dir)
        self._weights_only = self._to_prove = weights_only
        self._accelerator = accelerator
        group = None
        if accelerator.num_processes > 1:
            group = new_group_of_all("saves")  # not the training's: it may be on the GPU
        self._ranks = Ranks(group)
        self._checkpointer = Checkpointer(self._settings, group=group)
        self._saves = Saves(
            self._checkpointer, ranks=self._ranks, warn=self._warn, ended=self._ended
        )
        self._under_way: dict[str, tuple[str, Scratch]] = {}  # target and files, by save id
        self._swept: set[str] = set()
        sweep(self._staging_dir)
        self._closed = False
        if isinstance(accelerator, Accelerator):
            accelerator.before_end(self.close)

    @property
    def last_committed(self) -> Committed | None:
        """The last checkpoint that is durable: ``target``, ``origin.step``, ``nbytes``, ...

        ``nbytes`` and ``seconds`` are of this rank.
        """
        return self._checkpointer.last_committed

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints so far, on this rank."""
        self._saves.poll()
        return self._checkpointer.metrics

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        step: int | None = None,
        *,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str | None:
        """Save, as ``accelerator.save_state``; returns when training may go on. Collective.

        Args:
            output_dir: the folder; a checkpoint of ours with that name is replaced once this one is
                complete. None: ``project_dir/checkpoints/checkpoint_n``, where
                ``ProjectConfiguration`` asks for automatic naming.
            step: for the record; None: the number of the save.
            safe_serialization: as of ``accelerator.save_state``, like all other arguments.

        Returns:
            The folder; None if it is not saved, because of ``on_busy`` or ``on_error``.

        Raises:
            CheckpointError: an earlier save has failed. This one was not begun; call again.
            ValueError: the folder belongs to another trainer, to something else, or is not one that
                all ranks see; or ``weights_only`` would not let this state be loaded.
        """
        began = time.perf_counter()
        self._require_open()
        folders.require_separable(self._accelerator)  # models may have been prepared since
        wanted = None if output_dir is None else os.fspath(output_dir)
        if not self._take_turn(wanted):
            return None
        place = folders.Destination(**self._ranks.on_first(lambda: asdict(self._choose(wanted))))
        folder = os.path.dirname(place.target)
        self._saves.open(folder, together=True)
        self._sweep(folder)
        try:
            scratch, staged = files.stage(
                self._accelerator,
                ranks=self._ranks,
                staging_dir=self._staging_dir,
                restricted=self._to_prove,
                arguments={"safe_serialization": safe_serialization, **save_model_func_kwargs},
            )
        except CheckpointError as error:
            self._checkpointer.metrics.failed += 1
            text = f"{place.target} was not saved: {error}"
            self._saves.report([Failure(place.target, text, fatal=True)])
            return None
        self._to_prove = False
        scratch.hand_over(folder)
        try:
            save_id = self._checkpointer.save_files(
                staged,
                place.target,
                step=place.number if step is None else step,
                scratch=scratch.path,
            )
        except BaseException:
            scratch.remove()  # the writer was not given it
            raise
        self._under_way[save_id] = place.target, scratch
        if self._ranks.rank == 0:
            for path in place.superseded:
                self._checkpointer.remove(path)  # never before a success
        if wanted is None:
            self._accelerator.project_configuration.iteration = place.number + 1
        if self._settings.snapshot == "sync":
            self.wait()
        self._checkpointer.metrics.blocking_ms = (time.perf_counter() - began) * 1e3
        return place.target

    def _take_turn(self, wanted: str | None) -> bool:
        """Wait until a save may begin, or skip it. Collective."""
        began = time.perf_counter()
        error = self._saves.await_turn()
        queue_ms = (time.perf_counter() - began) * 1e3
        failures, by_rank = self._saves.agree({"output_dir": wanted}, error=error)
        self._saves.report(failures)
        if len({facts["output_dir"] for facts in by_rank}) > 1:
            names = ", ".join(f"rank {r}: {f['output_dir']}" for r, f in enumerate(by_rank))
            raise ValueError(f"All ranks must save to the same folder, got {names}")
        if self._saves.skips(by_rank):
            return False
        self._checkpointer.metrics.queue_ms = queue_ms
        return True

    def _choose(self, wanted: str | None) -> folders.Destination:
        """On rank 0, which keeps other trainers from the folder."""
        project = self._accelerator.project_configuration
        if wanted is not None:
            target = folders.local(wanted)
            self._saves.open_here(os.path.dirname(target))
            folders.require_ours(target)
            return folders.Destination(target, project.iteration, [])
        folder = folders.automatic(project, needed="save_state needs output_dir=")
        self._saves.open_here(folder)  # what a killed trainer left has got its name, or is gone
        pending = [target for target, _ in self._under_way.values()]
        return folders.next_in(folder, project, pending=pending)

    def _sweep(self, folder: str) -> None:
        """Free the memory of killed trainers that wrote to ``folder``."""
        if folder not in self._swept:
            self._swept.add(folder)
            sweep(self._staging_dir, released=folder)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Load, as ``accelerator.load_state``; checked before anything is touched. Collective.

        Args:
            input_dir: a folder of ours, or of accelerate itself, which cannot be checked. None: the
                newest complete one of ours in ``project_dir/checkpoints``.
            load_kwargs: as of ``accelerator.load_state``, like all other arguments;
                ``{"weights_only": False}`` for this folder only.

        Returns:
            The folder.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: there are only damaged ones, or the given one is.
            ValueError: no folder is given and none is known, or it holds something else, or what
                ``weights_only`` does not let be read.
        """
        self._require_open()
        self._checkpointer.wait()
        wanted = None if input_dir is None else os.fspath(input_dir)
        check = self._settings.verify != "never"
        found = self._ranks.on_first(lambda: self._find(wanted, check=check))
        path: str = found["path"]
        if wanted is None:
            self._sweep(os.path.dirname(path))
        load_kwargs = {"weights_only": self._weights_only, **(load_kwargs or {})}
        files.load(
            self._accelerator,
            path,
            saved_by=found["ranks"],
            ranks=self._ranks,
            restricted=load_kwargs["weights_only"] is not False,
            arguments={"load_kwargs": load_kwargs, **load_model_func_kwargs},
        )
        return path

    def _find(self, wanted: str | None, *, check: bool) -> dict[str, Any]:
        """Path of the checkpoint to load, and how many ranks saved it; on rank 0."""
        if wanted is not None:
            path = folders.local(wanted)
            description = folders.given(path, check=check)
        else:
            project = self._accelerator.project_configuration
            folder = folders.automatic(project, needed="load_state needs input_dir=")
            if not os.path.isdir(folder):
                raise FileNotFoundError(
                    f"There is no checkpoint: {folder} does not exist; save one first, or give "
                    "another folder (input_dir=)"
                )
            self._checkpointer.open(folder)  # a writer of a dead trainer may have one to finish
            description = folders.newest(folder, check=check)
            path = description.path
        origin = None if description is None else description.origin
        return {"path": path, "ranks": None if origin is None else origin.ranks}

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save of this rank is committed or has failed.

        Raises:
            CheckpointError: one has failed, which was not reported yet.
            TimeoutError: after ``timeout`` seconds.
        """
        self._require_open()
        self._saves.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait, end the writer and destroy the process group. Saves are written without it, too.

        Raises:
            CheckpointError: a save has failed, which was not reported yet.
        """
        try:
            self._end(timeout)
        finally:
            destroy(self._ranks.group)

    def _end(self, timeout: float | None) -> None:
        if not self._closed:
            self._closed = True
            self._saves.close(timeout)

    def _ended(self, event: Committed | Failed) -> None:
        if event.origin is not None:
            _, scratch = self._under_way.pop(event.origin.save_id)
            scratch.remove()

    def _warn(self, message: str) -> None:
        if self._ranks.rank == 0:
            log.warning("%s", message)

    def __enter__(self) -> AsyncStateCheckpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # and leave the group, whose destruction would wait for a peer that hangs
            self._end(None)
        except (CheckpointError, OSError) as second:
            log.warning("%s", second)  # the error that is on its way says more

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("This AsyncStateCheckpointer is closed; make a new one")
