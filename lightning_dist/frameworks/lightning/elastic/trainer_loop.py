"""A session of a fit: where Lightning's loops are, and how its checkpoints are written."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.elastic.data.plan import MicroBatch, Position
from lightning_dist.elastic.progress import KEY, Generators
from lightning_dist.elastic.session import ElasticSession, TrainingLoop
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.checkpoint.trainer_saves import (
    log_values,
    report_committed,
    save_trainer,
    weights_may_change,
)
from lightning_dist.frameworks.lightning.elastic import private
from lightning_dist.frameworks.lightning.elastic.data import TrainerDataShards
from lightning_dist.frameworks.lightning.elastic.loops import (
    Preempted,
    asks_for_requeue,
    place_at_epoch_begin,
    place_within_epoch,
    requeue,
)
from lightning_dist.frameworks.lightning.model_parallel import SyncModelParallelStrategy
from lightning_dist.ranks.agreement import Membership

_FLAGS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "limit_val_batches"),
    *("check_val_every_n_epoch", "gradient_clip_val", "gradient_clip_algorithm", "precision"),
    "reload_dataloaders_every_n_epochs",
)
"""Settings of a trainer that ranks have in common, and that the plan of the data leaves alone."""


class TrainerLoop(TrainingLoop):
    """Operations of a fit for its session, and its position in the data.

    Args:
        trainer: of the fit.
        session: from the set-up of the fit to its end.
    """

    data: TrainerDataShards
    stopped = Preempted

    def __init__(self, trainer: pl.Trainer, session: ElasticSession) -> None:
        self._trainer, self.session = trainer, session
        self._epoch: int | None = None
        self._before_iteration: int | None = None  # batches of this epoch, of other iterations
        self._before_epoch = self._in_epoch = 0  # samples
        self._validated_step = -1
        self._rng_of_step: dict[str, Any] | None = None
        self.validates_first = False
        """Whether the loop begins with a validation that a fault has cut short."""
        self.micro_batch: MicroBatch | None = None
        """Micro-batch that this rank computes; None where samples are not counted."""

    @property
    @override
    def steps(self) -> int:
        return self._trainer.global_step

    @property
    @override
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @property
    @override
    def script(self) -> dict[str, Any]:
        trainer: Any = self._trainer
        flags = {flag: getattr(trainer, flag) for flag in _FLAGS}
        return {**self.session.settings.agreed, **flags, **self.data.given}

    @property
    @override
    def has_failed(self) -> bool:
        sync = getattr(self._trainer.strategy, "sync", None)
        return sync is not None and sync.has_failed

    @override
    def info(self, text: str) -> None:
        rank_zero.info(text)

    @override
    def warn(self, text: str) -> None:
        rank_zero.warn(text)

    @override
    def stopping(self, reasons: list[str]) -> None:
        if self._trainer.is_global_zero:
            requeue(private.cluster_environment(self._trainer), reasons)

    @override
    def all_saved(self) -> None:
        # SLURM's tasks wait for no launcher, and a second signal must not come before the requeue.
        if not asks_for_requeue(private.cluster_environment(self._trainer)):
            private.signal_connector(self._trainer).teardown()

    @override
    def write(self, path: str) -> None:
        settings = self.session.settings
        save_trainer(
            self._trainer,
            self.session.retention.saves,
            path,
            folder=settings.folder,
            sharded=settings.saving.sharded,
            at_once=weights_may_change(self._trainer),
        )

    @override
    def committed(self, event: Committed) -> None:
        report_committed(self._trainer, self.session.retention.saves, event)

    def log_costs(self) -> None:
        """Give the loggers the cost of restarts; on rank 0."""
        if self.session.costs:
            log_values(self._trainer, self.session.costs)

    @property
    def members(self) -> Membership:
        """All ranks."""
        return self.session.members

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Number of this rank among those that take samples of their own, and how many they are.

        The ranks of a tensor-parallel group have one number.
        """
        strategy = self._trainer.strategy
        if isinstance(strategy, SyncModelParallelStrategy):
            samplers = strategy.distributed_sampler_kwargs
            return samplers["rank"], samplers["num_replicas"]
        return self.members.rank, self.members.world_size

    def set_data(self, data: TrainerDataShards) -> None:
        """Train on ``data``, from where the loaded session is."""
        state = self.session.resumed
        self.data = data
        self.generators = Generators(
            state,
            rank=self.members.rank,
            world_size=self.members.world_size,
            data_ranks=self.data_ranks,
            device=self._trainer.strategy.root_device,
        )
        if state is not None:
            self._before_epoch = state.total_samples - state.position.samples
            self._validated_step = state.total_steps if state.validated else -1

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop

    @property
    def _processed(self) -> int:
        """Batches of this epoch that are computed; asked when needed: hooks have any order."""
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
        self.data.cursor.set_epoch(self._trainer.current_epoch)
        self.data.refresh()
        self.generators.restore()

    def begin_micro_batch(self, index: int) -> None:
        """Batch ``index`` of the epoch is there."""
        self.generators.restore()
        self._epoch = self._trainer.current_epoch
        if self._before_iteration is None:
            self._before_iteration = self._processed
        self.micro_batch = self.data.plan().micro_batch_at(index) if self.data.is_sharded else None

    def end_micro_batch(self) -> None:
        """The optimizer has stepped, or gradients are accumulated."""
        if self.data.is_sharded:
            self._in_epoch = self.data.plan().after(self._processed).samples
        # A validation that is cut short begins anew, so it has to draw the same again.
        due = private.is_validation_due(self._trainer)
        self._rng_of_step = self.generators.capture() if due else None

    def end_validation(self) -> None:
        """Work due at this step is over."""
        self._validated_step = self._trainer.global_step
        self._rng_of_step = None

    def end_step(self) -> None:
        """The optimizer has stepped."""

    @property
    def _is_validated(self) -> bool:
        return self.position.samples == 0 or self._validated_step == self._trainer.global_step

    @property
    @override
    def position(self) -> Position:
        ended = self._loop.epoch_progress.current.processed
        if not self.data.is_sharded:
            return Position(ended)
        if self._epoch is None:
            return self.data.cursor.begin
        if self._has_ended:
            return Position(ended)
        return self.data.plan().after(self._processed)

    @property
    def _has_ended(self) -> bool:
        """Whether the epoch of the last batch is over; one that max_steps has cut short is not."""
        if self._epoch is None or self._loop.epoch_progress.current.processed <= self._epoch:
            return False
        return bool(self._loop.epoch_loop.batch_progress.is_last_batch)

    @property
    @override
    def total_samples(self) -> int:
        if not self.data.is_sharded:
            return 0
        return self._before_epoch + (self._in_epoch if self._has_ended else self.position.samples)

    def place_loops(self) -> None:
        """Let Lightning's loops, just restored, count as this number of ranks does."""
        state, data = self.session.resumed, self.data
        if state is None:
            return
        if state.stopped:
            self._trainer.should_stop = True
            rank_zero.info(
                f"elastic: training was asked to stop at step {state.total_steps} or before; "
                "it ends once min_epochs and min_steps are reached"
            )
        private.forget_loader_states(self._trainer)
        self._loop.setup_data()
        if data.own_state is not None:
            return  # within an epoch, as Lightning counts it
        position, steps = state.position, state.total_steps
        before = position.epoch * len(data.plan()) if data.is_sharded else 0
        if not data.is_sharded or position.samples == 0:
            place_at_epoch_begin(self._trainer, position.epoch, steps=steps, passes=before)
            return
        passes = data.plan().micro_batches_after(position.steps)
        self.validates_first = place_within_epoch(
            self._trainer,
            position,
            steps=steps,
            passes=passes,
            total_passes=before + passes,
            validated=state.validated,
        )

    def _loader_state(self) -> Any:
        """State of a loader that keeps its position itself; None between epochs."""
        loader = self.data.remembered
        if loader is None or self._has_ended:
            return None
        if self._before_iteration is None:
            return self.data.own_state
        done = self._processed
        accumulate = self._trainer.accumulate_grad_batches
        beyond = done % accumulate if private.is_accumulating(self._trainer) else 0
        return loader.state_after(done - beyond - self._before_iteration)

    def restore_metrics(self) -> None:
        """Metrics logged before the checkpoint: schedulers and callbacks may need them."""
        saved = [] if self.session.resumed is None else self.session.resumed.metrics
        if saved:
            values = saved[self._trainer.global_rank % len(saved)]
            metrics = {name: torch.tensor(value) for name, value in values.items()}
            self._trainer.callback_metrics.update(metrics)

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Put all of this into a checkpoint. Collective.

        Nothing where the train dataloader has not been made yet: no position is known then.
        """
        if not self.data.is_known:
            return
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        checkpoint[KEY] = self.session.describe(
            rng=self._rng_of_step or self.generators.capture(),
            loader=self._loader_state(),
            metrics=self._logged_metrics,
            **self._facts,
        )

    @property
    def _facts(self) -> dict[str, bool]:
        """Facts of the state that a loop of the user's own does not have."""
        return {"validated": self._is_validated, "stopped": self._trainer.should_stop}

    @property
    def _logged_metrics(self) -> dict[str, float]:
        logged = self._trainer.callback_metrics
        return {name: float(value) for name, value in logged.items() if value.numel() == 1}

    def complete(self) -> None:
        """The training has ended as it should. Collective."""
        self.session.complete(saves=self.has_begun)

    def end(self) -> None:
        """The end of this process's part in the fit."""
        self.data.close()
