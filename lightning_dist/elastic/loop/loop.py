"""``ElasticLoop``: elastic restart for Accelerate, Fabric and plain DDP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor

from lightning_dist.elastic.data.plan import MicroBatch
from lightning_dist.elastic.history import RestartCosts
from lightning_dist.elastic.loop.user_loop import UserLoop
from lightning_dist.elastic.progress import ElasticState
from lightning_dist.elastic.session import ElasticSession
from lightning_dist.settings.run import CheckpointSettings, RecoverySettings, RunSettings
from lightning_dist.settings.signatures import takes


class ElasticLoop:
    """Saves checkpoints and resumes from the newest complete one, in a loop of your own.

    The equivalent of :class:`~lightning_dist.ElasticRestart` for Accelerate, Fabric and plain DDP::

        state = {"model": model, "optimizer": optimizer}
        with ElasticLoop("ckpts/", loader=loader, state=state, every_n_train_steps=50) as loop:
            for epoch in loop.epochs(3):
                for x, y in loop.batches():
                    loss = criterion(model(x), y)
                    loop.scale_loss(loss).backward()  # or {accelerator,fabric}.backward(...)
                    if loop.sync_gradients:
                        optimizer.step()
                        optimizer.zero_grad()
                        loop.step_done()

    Every rank creates one. Entering it is collective and loads the checkpoint. Leave it at the end
    or after a :meth:`step_done`, on all ranks; an exception leaves it without a save. Gradients are
    exchanged in the last micro-batch of a step: no ``no_sync`` is needed. Time between epochs
    counts for ``hang_timeout``; call :meth:`heartbeat` there if it takes longer.
    """

    @takes(RunSettings)
    @takes(CheckpointSettings, "saving")
    @takes(RecoverySettings, "recovering")
    def __init__(
        self,
        settings: RunSettings,
        saving: CheckpointSettings,
        recovering: RecoverySettings,
        *,
        loader: Any,
        state: Mapping[str, Any],
        gradient_accumulation_steps: int = 1,
        device: Any = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        """Check the arguments.

        Args:
            settings: each an argument of the loop.
            saving: each an argument of the loop; ``snapshot="auto"`` is ``"blocking"``.
            recovering: each an argument of the loop; ``"in_process"`` needs
                ``init_process_group(recovery="in_process")``, checkpoints in one file, and one
                model in DDP with ``compress_ddp``, or on the CPU with ``local_updates``.
            loader: as for one process: not from ``accelerator.prepare``, nor
                ``setup_dataloaders``.
            state: what is saved, by name: models (as ``prepare``, ``setup`` or DDP returned them),
                optimizers, schedulers, a GradScaler, anything with a ``state_dict``. Residuals of
                compressed models go with them.
            gradient_accumulation_steps: micro-batches per optimizer step of the first start; leave
                that of an ``Accelerator`` at 1.
            device: device that batches are moved to. None: they are not moved.
            signals: signals after which all ranks write a checkpoint and exit.

        Raises:
            ValueError: a setting that is out of range or cannot take effect.
        """
        if gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps must be positive; got {gradient_accumulation_steps}"
            )
        if saving.snapshot == "auto":
            saving = replace(saving, snapshot="blocking")
        self._settings = replace(settings, saving=saving)
        if recovering.recovery == "in_process":
            self._settings.require_recoverable()
        self._loader, self._given = loader, state
        self._move = None if device is None else _mover(device)
        self._run = UserLoop(
            ElasticSession(self._settings),
            accumulate=gradient_accumulation_steps,
            signals=signals,
            recovering=recovering,
        )
        self._in_epoch = self._has_batches = False
        self._this: MicroBatch | None = None
        self._index = -1  # of this micro-batch in its epoch
        self._is_weighted = self._has_stepped = self._is_given_up = False

    def __enter__(self) -> ElasticLoop:
        run = self._run
        if run.is_open or run.is_complete:
            raise ValueError("An ElasticLoop can be entered only once; create a new one")
        try:
            run.open(self._loader, self._given)
        except BaseException as error:
            run.close(error)
            raise
        return self

    @property
    def resumed(self) -> ElasticState | None:
        """State of the checkpoint that this start resumes from; None for a fresh start."""
        return self._run.session.resumed

    @property
    def steps(self) -> int:
        """Optimizer steps so far, of all starts."""
        return self._run.steps

    @property
    def micro_batch(self) -> MicroBatch | None:
        """Samples that this rank computes, and their weight; None outside an epoch."""
        return self._this

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer must step after this micro-batch."""
        return self._this is not None and self._this.ends_step

    @property
    def summary(self) -> RestartCosts:
        """Cost of restarts of this run so far; on rank 0."""
        return self._run.session.history.summary

    @property
    def run_id(self) -> str:
        """Name of the run, the same after restarts: ``id=`` of a wandb run, with
        ``resume="allow"``."""
        return self._run.session.history.run_id

    def metrics(self) -> dict[str, float]:
        """``elastic/*`` and ``checkpoint/*`` of the run so far, under the names of a Trainer's.

        For ``accelerator.log``, ``fabric.log_dict`` or ``wandb.log``, as often as you log, and once
        more after the ``with``. Empty on other ranks than 0, and before ``epochs()``. Unknown
        values are left out: times of saves before the first, and ``elastic/lost_time_s`` until
        training reaches the step before the restart.
        """
        costs = self._run.session.costs
        return {**costs, **self._run.session.metrics.by_name()} if costs else {}

    def heartbeat(self) -> None:
        """Report progress outside of batches; see ``hang_timeout``."""
        self._run.session.lifecycle.heartbeat()

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs left of the ``count`` of the training."""
        if not self._run.is_open:
            raise ValueError("epochs() must be called inside `with ElasticLoop(...) as loop:`")
        if not self._run.begin(epochs=count):
            return
        for epoch in range(self._run.position.epoch, count):
            self._begin_epoch(epoch)
            yield epoch
            self._end_epoch(epoch)
        self._run.complete()

    def _begin_epoch(self, epoch: int) -> None:
        self._run.data.cursor.set_epoch(epoch)
        self._in_epoch, self._has_batches = True, False
        self._run.session.lifecycle.heartbeat()
        if self._run.data.cursor.begin.samples == 0:
            self._run.generators.restore()

    def _end_epoch(self, epoch: int) -> None:
        if self._in_epoch:
            raise ValueError(
                f"Epoch {epoch} has batches left, which the next one would skip; to end training "
                "early, leave epochs() too, with break or return"
            )
        self._run.end_epoch(epoch)
        self._run.sync_point()

    def batches(self) -> Iterator[Any]:
        """Batches left for this rank in the epoch.

        Between two steps this is collective: it saves if that is due, and ends the process if a
        rank was asked to stop.

        Raises:
            CheckpointError: an earlier save has failed, on all ranks.
            SystemExit: a rank was asked to stop; code 74 where the last checkpoint was not written.
            ValueError: the micro-batch before had no :meth:`scale_loss`, or its step no
                :meth:`step_done`.
        """
        if not self._in_epoch or self._has_batches:
            raise ValueError("batches() must be called inside a loop over epochs(), once per epoch")
        self._has_batches = True
        self._run.is_current = False
        while not self._run.is_current:  # what is left of the epoch is resharded over other members
            yield from self._batches_of_members()
        self._this, self._in_epoch = None, False

    def _batches_of_members(self) -> Iterator[Any]:
        """Batches until the end of the epoch, or until the members are others."""
        run = self._run
        run.is_current = True
        plan = run.data.plan()
        run.generators.restore()
        if run.recovery is not None:
            run.recovery.begin_step()
        for index, batch in enumerate(run.batches, start=plan.first_micro_batch):
            micro_batch = plan.micro_batch_at(index)
            if run.recovery is not None and run.recovery.must_repeat:
                # Whatever else of this step is computed is computed for nothing.
                run.take_again(has_computed=not micro_batch.begins_step)
                return
            self._this = micro_batch
            self._is_weighted = self._has_stepped = self._is_given_up = False
            self._index = index
            with run.objects.exchanging(self._this.ends_step):
                yield batch if self._move is None else self._move(batch)
            self._require_step_done()
            if self.sync_gradients:
                # Only now: what the user has changed after step_done() is of this step too.
                run.end_step(is_given_up=self._is_given_up)
                self._is_given_up = False
            run.session.lifecycle.heartbeat()
            if not run.is_current:
                return

    def _require_step_done(self) -> None:
        if not self._is_weighted:
            raise ValueError(
                "The loss of a micro-batch was not scaled, so gradients would be wrong on another "
                "number of ranks; use loop.scale_loss(loss).backward()"
            )
        if self.sync_gradients and not self._has_stepped:
            raise ValueError(
                "A step ended without loop.step_done(), so it would not be in a checkpoint; call "
                "it after the optimizer's step(), where loop.sync_gradients"
            )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Loss for ``backward``: ``loss``, a mean over the batch, times its share of the step.

        With it the gradient of a step is the mean over its samples, however many micro-batches and
        ranks there are.
        """
        if self._this is None:
            raise ValueError("scale_loss() must be called for the loss of a batch of batches()")
        self._is_weighted = True
        weight = self._this.weight / self._run.data.layouts[1].accumulate
        return loss if weight == 1.0 else loss * weight

    def step_done(self) -> None:
        """Count an optimizer step.

        It is saved, if that is due, when the next batch is taken.

        Raises:
            ValueError: the optimizer should not have stepped after this micro-batch.
        """
        if not self.sync_gradients or self._has_stepped:
            raise ValueError(
                "step_done() must be called once, for the last micro-batch of a step; check "
                "loop.sync_gradients before the optimizer steps"
            )
        self._has_stepped = True
        recovery = self._run.recovery
        self._is_given_up = recovery is not None and recovery.is_given_up
        if not self._is_given_up:
            self._run.step(self._run.data.plan().after(self._index + 1))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._run.is_complete:
                if self._is_given_up:
                    self._run.end_step(is_given_up=True)
                self._run.complete()  # the user has left the loop early
        except BaseException as second:
            error = second
            raise
        finally:
            self._this = None
            self._run.close(error)


def _mover(device: Any) -> Callable[[Any], Any]:
    # Imported where it is needed: Lightning is half of what a process imports that takes the place
    # of a lost one.
    from lightning.fabric.utilities import move_data_to_device

    return partial(move_data_to_device, device=device)
