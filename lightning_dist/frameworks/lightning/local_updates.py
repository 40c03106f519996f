"""``Trainer(strategy="compressed_diloco")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from lightning_dist.base.log import get_logger
from lightning_dist.frameworks.lightning.base import CompressingStrategy
from lightning_dist.frameworks.lightning.checkpoint.session_io import CheckpointerIO
from lightning_dist.frameworks.lightning.strategy import CompressedDDPStrategy
from lightning_dist.frameworks.strategies.local_updates import LOCAL_KEY, LocalUpdateArguments
from lightning_dist.sync.rules import require_compressible

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from torch import nn
    from torch.optim import Optimizer

    from lightning_dist.reducer.reducer import Reducer

log = get_logger(__name__)


class LocalSteps(LocalUpdateArguments, CompressingStrategy):
    """Mixin before a strategy for the Trainer: local steps, outer steps, evaluation and the end."""

    if TYPE_CHECKING:
        global_rank: int

    def __init__(
        self, *args: Any, evaluate: Literal["anchor", "worker"] = "anchor", **kwargs: Any
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            *args: see :class:`.LocalUpdateArguments`.
            **kwargs: see the same.
            evaluate: validation during the fit uses the anchor, equal on all ranks, or each
                worker's own weights.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        if evaluate not in ("anchor", "worker"):
            raise ValueError(f"evaluate must be 'anchor' or 'worker', got {evaluate!r}")
        self._evaluates_anchor = evaluate == "anchor"
        self._evaluation = ExitStack()
        super().__init__(*args, **kwargs)

    def _begin_updates(self, trainer: pl.Trainer, model: nn.Module) -> None:
        """Take local steps of ``model`` from now on, where this is a fit. Collective."""
        self._logged_step = 0
        self._attach(model, self.optimizers, trainer.precision_plugin)
        assert self._updates is not None
        self._reducer = self._updates.reducer

    @override
    def _require_begun(self, trainer: pl.Trainer) -> None:
        """Raise ValueError where no outer step would come, and warn where few would.

        The last step of a known number is followed by the mean of the workers, before any callback
        can save its checkpoint.
        """
        is_trial = trainer.fast_dev_run or trainer.max_steps != self._max_steps  # type: ignore[attr-defined]
        assert self._updates is not None
        assert self.lightning_module is not None
        if is_trial or not self.lightning_module.automatic_optimization:
            return
        steps, settings = trainer.estimated_stepping_batches, self._local
        if steps <= 0 or steps == float("inf"):
            return
        self._updates.total_steps = int(steps)
        if trainer.global_step:
            return
        outer = int(steps - settings.ddp_steps) // settings.sync_every
        if outer < 1:
            raise ValueError(
                f"A training of {steps:g} steps must have an outer step, got sync_every="
                f"{settings.sync_every} and ddp_steps={settings.ddp_steps}; set them lower"
            )
        few = settings.few(steps - settings.ddp_steps)
        if few and self.global_rank == 0:
            log.warning("%s", few)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        # Attempted steps count, also where a GradScaler skips one; of several optimizers the first.
        if self._updates is not None and optimizer is self.optimizers[0]:
            self._count_step()
            self._samples = 0.0 if self._local.weigh_by == "samples" else None
        return output

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._local.weigh_by == "samples":
            self.count_samples(extract_batch_size(batch))

    @override
    def _comm_metrics(self, stats: Mapping[str, Any]) -> dict[str, float]:
        assert self._updates is not None
        return {**super()._comm_metrics(stats), **self._updates.metrics()}

    @override
    def comm_config(self) -> dict[str, Any]:
        config = super().comm_config()
        return {**config, "local_updates": self._local.outer} if config else {}

    def on_validation_start(self) -> None:
        super().on_validation_start()  # type: ignore[misc]
        if self._updates is not None and self._evaluates_anchor:
            self._evaluation.enter_context(self._updates.anchor_weights())

    def on_validation_end(self) -> None:
        super().on_validation_end()  # type: ignore[misc]
        self._evaluation.close()

    @override
    def on_train_end(self) -> None:
        if self._updates is not None:
            self._updates.finish()
        super().on_train_end()

    def _add_workers(self, checkpoint: dict[str, Any], io: CheckpointIO) -> None:
        """Add the state of all workers: on rank 0, or left where it is. Collective."""
        if self._states is None:
            return
        if not isinstance(io, CheckpointerIO) or not io.sharded:
            if (state := self._states.state_dict()) is not None:
                checkpoint[LOCAL_KEY] = state
            return

        checkpoint[LOCAL_KEY], found = self._states.spread_state_dict()
        io.spreads += found
        # Of the first worker for other strategies; the same tensors: a worker's are its own.
        checkpoint["optimizer_states"] = checkpoint[LOCAL_KEY]["workers"][0]["optimizer_states"]

    @override
    def teardown(self) -> None:
        self._evaluation.close()
        super().teardown()


class LocalUpdateStrategy(LocalSteps, CompressedDDPStrategy):
    """Optimizer steps of every rank alone, and outer steps on the compressed mean of what changed.

    A checkpoint holds the anchor as the model's weights, so that it loads anywhere, and under
    ``"lightning_dist_local_updates"`` what every worker has of its own: weights inside a window and
    optimizer states, collected by rank 0, or written by each rank with
    ``AsyncCheckpoint(format="sharded")``. With another number of workers those who join take the
    anchor, and those who leave take with them what they have not sent.
    """

    _can_recover = False

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        require_compressible(self.model)
        self._reducer = None
        if self._wraps(self._ddp_kwargs, self.root_device):
            self.model = self._setup_model(self.model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._updates = self._states = (
            None  # of an earlier fit; Lightning calls configure_ddp for a fit alone
        )
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        assert self.lightning_module is not None
        if self._local.ddp_steps and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "With manual optimization Lightning decides itself when DDP averages gradients; "
                "leave ddp_steps out"
            )
        self._begin_updates(trainer, self.model)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._updates is None:
            return super().lightning_module_state_dict()
        return self._updates.anchor_state_dict()

    @override
    def _add_state(self, checkpoint: dict[str, Any], reducer: Reducer) -> None:
        self._add_workers(checkpoint, self.checkpoint_io)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(LOCAL_KEY)
        if self._states is not None and state is not None:
            self._states.load_state_dict(state)
