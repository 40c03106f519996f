"""Where a fit under ElasticRestart is, what a checkpoint says of it, and how it goes on there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dist.elastic import rng
from lightning_dist.elastic.plan import Pass, Position
from lightning_dist.elastic.seeds import derive_seed
from lightning_dist.elastic.state import KEY, ElasticState, require_same_data
from lightning_dist.elastic.vote import Vote
from lightning_dist.integrations.lightning import private
from lightning_dist.integrations.lightning.elastic.data import ElasticData
from lightning_dist.integrations.lightning.elastic.resume import (
    place_at_epoch_begin,
    place_within_epoch,
)


class ElasticPosition:
    """Follows the passes of one fit.

    Args:
        trainer: of the fit.
        data: its train dataloader.
        resumed: what the checkpoint said; None for a fresh start.
        path: of that checkpoint.
        vote: reaches the other ranks.
        run_id: of the run.
        seed: of the run.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        *,
        data: ElasticData,
        resumed: ElasticState | None,
        path: str,
        vote: Vote,
        run_id: str,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._data = data
        self._resumed = resumed
        self._path = path
        self._vote = vote
        self._run_id = run_id
        self._seed = seed
        self._rng = None if resumed is None else self._rng_in(resumed)
        self._epoch: int | None = None
        self._before_iteration: int | None = None  # batches of this epoch, of other iterations
        self._before_epoch = self._in_epoch = 0  # samples
        self._validated_step = -1
        if resumed is not None:
            self._before_epoch = resumed.total_samples - resumed.position.samples
            self._validated_step = resumed.total_steps if resumed.validated else -1
        self._rng_of_step: dict[str, Any] | None = None
        self.validates_first = False
        """Whether the loop begins with a validation that a fault has cut short."""
        self.this_pass: Pass | None = None
        """What this rank is computing; None where samples are not counted."""

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop

    @property
    def _processed(self) -> int:
        """Batches of this epoch whose pass is over; asked when needed: hooks have any order."""
        return int(self._loop.epoch_loop.batch_progress.current.processed)

    @property
    def has_begun(self) -> bool:
        """Whether a batch was taken in this process."""
        return self._epoch is not None

    def begin_epoch(self) -> None:
        """A new epoch; the loader is about to be iterated."""
        self._before_epoch += self._in_epoch
        self._in_epoch = 0
        self._before_iteration = None
        self._data.cursor.set_epoch(self._trainer.current_epoch)
        self._data.refresh()
        self.restore_rng()

    def begin_pass(self, index: int) -> None:
        """Batch ``index`` of the epoch is there."""
        self.restore_rng()
        self._epoch = self._trainer.current_epoch
        if self._before_iteration is None:
            self._before_iteration = self._processed
        self.this_pass = self._data.plan().pass_at(index) if self._data.is_dealt else None

    def end_pass(self) -> None:
        """The optimizer has stepped, or gradients are accumulated."""
        if self._data.is_dealt:
            self._in_epoch = self._data.plan().after(self._processed).samples
        # A validation that is cut short begins anew, so it has to draw the same again.
        due = private.is_validation_due(self._trainer)
        self._rng_of_step = rng.capture(self._trainer.strategy.root_device) if due else None

    def end_validation(self) -> None:
        """What was due at this step is over."""
        self._validated_step = self._trainer.global_step
        self._rng_of_step = None

    @property
    def position(self) -> Position:
        """Of the last optimizer step."""
        ended = self._loop.epoch_progress.current.processed
        if not self._data.is_dealt:
            return Position(ended)
        if self._epoch is None:
            return self._data.cursor.begin
        if self._has_ended:
            return Position(ended)
        return self._data.plan().after(self._processed)

    @property
    def _has_ended(self) -> bool:
        """Whether the epoch of the last batch is over; one that max_steps has cut short is not."""
        if self._epoch is None or self._loop.epoch_progress.current.processed <= self._epoch:
            return False
        return bool(self._loop.epoch_loop.batch_progress.is_last_batch)

    @property
    def total_samples(self) -> int:
        """Samples that optimizer steps have used, of all epochs."""
        if not self._data.is_dealt:
            return 0
        return self._before_epoch + (self._in_epoch if self._has_ended else self.position.samples)

    def _rng_in(self, state: ElasticState) -> dict[str, Any]:
        """What this rank's generators were, if there were as many ranks; or a seed of its own."""
        rank = self._trainer.global_rank
        if len(state.rng) == self._trainer.world_size:
            return state.rng[rank]
        return {"seed": derive_seed(state.seed, "rng", state.total_steps, rank)}

    def restore_rng(self) -> None:
        """Once, where the generators were saved: before anything draws from them."""
        state, self._rng = self._rng, None
        device = self._trainer.strategy.root_device
        if state is not None and "seed" in state:
            rng.seed_all(state["seed"], device)
        elif state is not None:
            rng.restore(state, device)

    def place_loops(self) -> None:
        """Let Lightning's loops, just restored, count as this number of ranks does."""
        state, data, loop = self._resumed, self._data, self._loop
        if state is None:
            return
        if state.stopped:
            self._trainer.should_stop = True
            rank_zero_info(
                f"elastic: the training was stopped at step {state.total_steps} before its last "
                "epoch; nothing is left to do"
            )
        private.forget_loader_states(self._trainer)
        loop.setup_data()
        if data.goes_on_by_itself:
            return  # within an epoch, as Lightning counts it
        if not data.is_dealt:
            steps = state.total_steps
            place_at_epoch_begin(self._trainer, state.position.epoch, steps=steps, passes=0)
            return
        require_same_data(state, size=data.size, path=self._path)
        self._place(state)

    def _place(self, state: ElasticState) -> None:
        position, plan, steps = state.position, self._data.plan(), state.total_steps
        before = position.epoch * len(plan)
        if position.samples == 0:
            place_at_epoch_begin(self._trainer, position.epoch, steps=steps, passes=before)
            return
        passes = plan.passes_after(position.steps)
        self.validates_first = place_within_epoch(
            self._trainer,
            position,
            steps=steps,
            passes=passes,
            total_passes=before + passes,
            validated=state.validated,
        )

    def _loader_state(self) -> Any:
        """Of a loader that keeps its position itself; None between epochs."""
        loader = self._data.remembered
        if loader is None or self._has_ended:
            return None
        if self._before_iteration is None:
            return self._data.resumed_loader
        done = self._processed
        accumulate = self._trainer.accumulate_grad_batches
        beyond = done % accumulate if private.is_accumulating(self._trainer) else 0
        return loader.state_after(done - beyond - self._before_iteration)

    def restore_metrics(self) -> None:
        """What had been logged at the checkpoint: schedulers and callbacks may wait for it."""
        saved = [] if self._resumed is None else self._resumed.metrics
        if saved:
            own = saved[self._trainer.global_rank % len(saved)]
            metrics = {name: torch.tensor(value) for name, value in own.items()}
            self._trainer.callback_metrics.update(metrics)

    def _logged(self) -> dict[str, float]:
        metrics = self._trainer.callback_metrics
        return {name: float(value) for name, value in metrics.items() if value.numel() == 1}

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Put all of this into a checkpoint. Collective.

        Nothing where the train dataloader has not been made yet: no position is known then.
        """
        trainer, data = self._trainer, self._data
        if not data.is_known:
            return
        own = self._rng or self._rng_of_step or rng.capture(trainer.strategy.root_device)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        gathered = self._vote.gather((own, self._loader_state(), self._logged()))
        states, of_loaders, metrics = (list(each) for each in zip(*gathered, strict=True))
        first, layout = data.layouts()
        position = self.position
        validated = position.samples == 0 or self._validated_step == trainer.global_step
        checkpoint[KEY] = ElasticState(
            run_id=self._run_id,
            seed=self._seed,
            first=first,
            layout=layout,
            position=position,
            total_samples=self.total_samples,
            total_steps=trainer.global_step,
            size=data.size,
            validated=validated,
            rng=[] if any("seed" in each for each in states) else states,
            loaders=[] if any(each is None for each in of_loaders) else of_loaders,
            metrics=metrics,
            stopped=trainer.should_stop and private.may_stop_early(trainer),
        ).as_dict()
