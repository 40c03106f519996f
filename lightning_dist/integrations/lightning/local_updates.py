"""``Trainer(strategy="compressed_diloco")``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dist.codecs import Codec
from lightning_dist.integrations.lightning.strategy import CompressedDDPStrategy
from lightning_dist.integrations.strategy_names import LOCAL_NAMES, register
from lightning_dist.integrations.torch.checks import require_compressible
from lightning_dist.integrations.torch.local_settings import (
    LocalUpdateSettings,
    Method,
    default_codec,
)
from lightning_dist.integrations.torch.local_updates import attach
from lightning_dist.integrations.torch.networks import host_group
from lightning_dist.integrations.torch.outer_steps import LocalUpdates, OuterOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_dist.reducer.reducer import Reducer

log = logging.getLogger(__name__)

CHECKPOINT_KEY = "lightning_dist_local_updates"
_FEW = 20
"""Outer steps below which outer momentum has not come to its rate."""


class LocalUpdateStrategy(CompressedDDPStrategy):
    """Optimizer steps of every rank alone, and outer steps on the compressed mean of what changed.

    A checkpoint holds the anchor as the model's weights, so that it loads anywhere, and under
    ``"lightning_dist_local_updates"`` what every worker has of its own: weights inside a window and
    optimizer states, put together by rank 0. Another number of workers goes on from the anchor.
    """

    def __init__(
        self,
        method: Method = "diloco",
        sync_every: int | None = None,
        fragments: int | None = None,
        overlap_steps: int | None = None,
        mixing: float | None = None,
        ddp_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        replicas: Literal["rank", "host"] = "rank",
        evaluate: Literal["anchor", "worker"] = "anchor",
        codec: str | Codec | dict[str, str | Codec] | None = None,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            method: this and the next eight as for :func:`~lightning_dist.local_updates`.
            sync_every: attempted optimizer steps between two outer steps of a parameter.
            fragments: parts of the model that are exchanged in turn.
            overlap_steps: attempted steps that an exchange has before its mean is used.
            mixing: weight of a worker's own parameters when the anchor has moved.
            ddp_steps: steps of plain DDP before the first local one.
            outer_lr: of the outer SGD.
            outer_momentum: of the outer SGD, Nesterov.
            outer_optimizer: another one, made from the anchor's tensors.
            replicas: a worker is a rank, or all ranks of a host with DDP between them.
            evaluate: validation during the fit uses the anchor, equal on all ranks, or each
                worker's own weights.
            codec: of what is exchanged between workers: by default int8, of sparseloco its own.
            **kwargs: see :class:`~lightning_dist.CompressedDDPStrategy`.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        self._schedule = LocalUpdateSettings.check(
            method,
            sync_every=sync_every,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mixing=mixing,
            ddp_steps=ddp_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
        )
        if replicas not in ("rank", "host"):
            raise ValueError(f"replicas must be 'rank' or 'host', got {replicas!r}")
        if evaluate not in ("anchor", "worker"):
            raise ValueError(f"evaluate must be 'anchor' or 'worker', got {evaluate!r}")
        if replicas == "host" and self._schedule.ddp_steps:
            raise ValueError(
                "ddp_steps are steps of DDP over all ranks, and replicas='host' has DDP inside the "
                "hosts; give one of the two"
            )
        if "start_step" in kwargs:
            raise ValueError(
                "start_step is the first compressed step of compressed_ddp, and local updates have "
                "none; ddp_steps are steps of plain DDP before the first local one"
            )
        if kwargs.get("delay"):
            raise ValueError(
                "delay=1 delays gradients of compressed_ddp; overlap_steps are the steps that an "
                "exchange of local updates has"
            )
        self._outer_optimizer, self._replicas = outer_optimizer, replicas
        self._evaluates_anchor = evaluate == "anchor"
        self._updates: LocalUpdates | None = None
        self._evaluation = ExitStack()
        super().__init__(default_codec(method) if codec is None else codec, **kwargs)

    @property
    def updates(self) -> LocalUpdates | None:
        """The outer steps; None before the first fit."""
        return self._updates

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        require_compressible(self.model)
        self._updates = self._reducer = None
        if self._replicas == "host":
            assert dist.group.WORLD is not None
            self._ddp_kwargs["process_group"] = host_group(
                dist.group.WORLD, self._settings, device=self.root_device
            )
        if self._replicas == "host" or self._schedule.ddp_steps:
            self.model = self._setup_model(self.model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        assert self.lightning_module is not None
        if self._schedule.ddp_steps and not self.lightning_module.automatic_optimization:
            raise ValueError(
                "with manual optimization Lightning decides itself when DDP averages gradients; "
                "leave ddp_steps out"
            )
        self._logged_step = 0
        self._updates = attach(
            self.model,
            self.optimizers,
            self._schedule,
            self._settings,
            outer_optimizer=self._outer_optimizer,
        )
        self._reducer = self._updates.reducer

    @override
    def _require_begun(self, trainer: pl.Trainer) -> None:
        """Raise ValueError where no outer step would come, and warn where few would."""
        is_trial = trainer.fast_dev_run or trainer.max_steps != self._max_steps  # type: ignore[attr-defined]
        assert self.lightning_module is not None
        if is_trial or trainer.global_step or not self.lightning_module.automatic_optimization:
            return
        steps, schedule = trainer.estimated_stepping_batches, self._schedule
        if steps <= 0 or steps == float("inf"):
            return
        outer = int(steps - schedule.ddp_steps) // schedule.sync_every
        if outer < 1:
            raise ValueError(
                f"a training of {steps:g} steps must have an outer step, got sync_every="
                f"{schedule.sync_every} and ddp_steps={schedule.ddp_steps}; set them lower"
            )
        if outer < _FEW and schedule.outer_momentum and self.global_rank == 0:
            log.warning(
                "%d outer steps in a training of %d: outer momentum takes some %d to come to its "
                "rate. Lower sync_every, or set outer_momentum=0 and outer_lr=1",
                outer,
                steps,
                _FEW,
            )

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # Attempted steps count, also where a GradScaler skips one; of several optimizers the first.
        if self._updates is not None and optimizer is self.optimizers[0]:
            self._updates.step()
        return output

    @override
    def _comm_metrics(self, stats: Mapping[str, Any]) -> dict[str, float]:
        assert self._updates is not None
        return {**super()._comm_metrics(stats), **self._updates.metrics()}

    @override
    def comm_config(self) -> dict[str, Any]:
        config = super().comm_config()
        return {**config, "local_updates": asdict(self._schedule)} if config else {}

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._updates is not None and self._evaluates_anchor:
            self._evaluation.enter_context(self._updates.anchor_weights())

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._evaluation.close()

    @override
    def on_train_end(self) -> None:
        if self._updates is not None:
            self._updates.finish()
        super().on_train_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._updates is None:
            return super().lightning_module_state_dict()
        return self._updates.anchor_state_dict()

    @override
    def _add_state(self, checkpoint: dict[str, Any], reducer: Reducer) -> None:
        assert self._updates is not None
        assert self.lightning_module is not None
        shared = self._updates.state_dict()
        buffers = {name: each.cpu() for name, each in self.lightning_module.named_buffers()}
        own = {
            "parameters": {n: p.cpu() for n, p in self._updates.worker_weights().items()},
            "buffers": buffers,
            "optimizer_states": checkpoint["optimizer_states"],
        }
        workers = [None] * self.world_size if self.global_rank == 0 else None
        dist.gather_object(own, workers)
        if shared is not None:
            checkpoint[CHECKPOINT_KEY] = {"shared": shared, "workers": workers}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        state = checkpoint.get(CHECKPOINT_KEY)
        own = None
        if state is not None and len(state["workers"]) == self.world_size:
            own = state["workers"][self.global_rank]
            checkpoint = {**checkpoint, "optimizer_states": own["optimizer_states"]}
        super().load_optimizer_state_dict(checkpoint)
        if self._updates is None or state is None:
            return
        self._updates.load_state_dict(state["shared"])
        if own is None:
            self._updates.start_from_anchor()
        else:
            self._updates.load_worker(own["parameters"], own["buffers"])

    @override
    def teardown(self) -> None:
        self._evaluation.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register(strategy_registry, cls, LOCAL_NAMES, what="local updates")
