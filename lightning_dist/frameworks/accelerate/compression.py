"""Compression attached to an Accelerator: compresses its models, saves, loads and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.private import loss_scale_of
from lightning_dist.frameworks.accelerate import private, residuals
from lightning_dist.frameworks.accelerate.attach import (
    CompressionHandler,
    handler_of,
    wrap_method,
)
from lightning_dist.frameworks.accelerate.roll_call import RollCall
from lightning_dist.frameworks.strategies.arguments import CONFIG_KEY
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import run_config
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.ddp import (
    attach,
    connect_to_own,
    reducer_of,
    refuse_clipping,
)
from lightning_dist.sync.onebit_adam import OneBitAdam
from lightning_dist.sync.report import CommReport, comm_metrics

if TYPE_CHECKING:
    from accelerate import Accelerator


class Compression(CommReport):
    """The compression of one Accelerator; made by :meth:`CompressedDDPPlugin.attach`.

    Args:
        accelerator: which has prepared nothing yet.
        settings: of every model.

    """

    def __init__(self, accelerator: Accelerator, settings: ExchangeSettings) -> None:
        self._accelerator, self._settings = accelerator, settings
        self._roll_call: RollCall | None = None  # from the first model in DDP on
        self.take_place()
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def take_place(self) -> None:
        """Stand where Accelerate asks for the arguments of DDP, around those that are there."""
        if handler_of(self._accelerator) is None:
            found = private.ddp_handler(self._accelerator)
            private.set_ddp_handler(self._accelerator, CompressionHandler(found, self.compress))

    def compress(self, model: DistributedDataParallel) -> Reducer:
        """Compress a model that Accelerate has just wrapped. Collective."""
        before = reducer_of(model.module)
        if before is not None:  # of a training that is over: Accelerate has wrapped it anew
            before.close()
        reducer = attach(
            model,
            self._settings,
            grad_scale=loss_scale_of(self._accelerator.scaler),
            one_of_several=True,
        )
        if reducer.network.world_size == 1:
            return reducer
        if self._roll_call is None:
            self._roll_call = RollCall(
                reducer.network.data.group,
                steps=self._steps,
                each="residuals",
                instead=", or use a codec without them (bf16, fp16, error_feedback=False)",
            )
        reducer.network.limit.waits_long = self._roll_call.waits
        return reducer

    def _steps(self) -> int:
        return sum(each.step for each in self.reducers)

    def register_optimizers(self, *optimizers: Any) -> None:
        """Let prepared optimizers work with the compression: OneBitAdam sends its momentum.

        ``lightning_dist.accelerate.Accelerator`` does it in ``prepare``. Collective.

        Raises:
            ValueError: a codec brings momentum and the optimizer has its own.
        """
        for prepared in optimizers:
            optimizer = getattr(prepared, "optimizer", prepared)
            connect_to_own(optimizer, self.reducers)
            if isinstance(optimizer, OneBitAdam):
                for name in ("clip_grad_norm_", "clip_grad_value_"):
                    wrap_method(self._accelerator, name, partial(_refuse_to_clip, optimizer))

    @property
    def reducers(self) -> list[Reducer]:
        """Of the prepared models, in their order; empty with one process."""
        found = map(reducer_of, private.prepared_models(self._accelerator))
        return [reducer for reducer in found if reducer is not None]

    @property
    def _reports(self) -> list[Any]:
        return residuals.owners(self._accelerator)

    def metrics(self) -> dict[str, float]:
        """``comm/*`` of this rank, over all models; empty before the first step."""
        return comm_metrics(self.comm_stats())

    def log(self, step: int | None = None) -> None:
        """Give :meth:`metrics` of rank 0 to Accelerate's trackers. Call it on every rank."""
        metrics = self.metrics()
        if metrics:
            self._accelerator.log(metrics, step=step)

    def configuration(self) -> dict[str, str | int | float]:
        """Configuration of a run for trackers: for ``accelerator.init_trackers(config=...)``.

        ``comm_config()`` as ``lightning_dist/codec`` and so on, in one level and without None:
        TensorBoard takes no others. Exchange, nodes and ranks are in it after ``prepare``.
        """
        config = self.comm_config() or run_config(self._settings, None)
        return dict(_flat(CONFIG_KEY, config))

    def close(self) -> None:
        """Stop the threads of all models. ``lightning_dist.accelerate.Accelerator`` does it."""
        for owner in residuals.owners(self._accelerator):
            owner.close()

    def save(self, folder: str) -> None:
        """Write the residuals of all ranks beside the other files. Collective, if there are any."""
        together = [each for each in self.reducers if each.gathers_state and not each.recovers]
        if together and self._roll_call is not None:
            self._roll_call.meet("accelerator.save_state()")
        owners = residuals.owners(self._accelerator)
        if owners and self._accelerator.project_configuration.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True cannot take effect: rank 0 writes the residuals of all "
                "ranks; leave it out, and save to a folder that all nodes see"
            )
        residuals.write([owner.state_dict() for owner in owners], folder)

    def load(self, folder: str) -> None:
        """Go on from what :meth:`save` has written, by any number of ranks. Collective.

        Raises:
            ValueError: the ranks do not see the same folder.
        """
        residuals.require_one_folder(self._accelerator, folder)
        residuals.load(self._accelerator, folder, says=self._accelerator.is_main_process)

    def _save(self, models: Iterable[nn.Module], weights: Any, folder: str) -> None:
        if self._is_asked():
            self.save(folder)

    def _load(self, models: Iterable[nn.Module], folder: str) -> None:
        if self._is_asked():
            self.load(folder)

    def _is_asked(self) -> bool:
        handler = handler_of(self._accelerator)
        return handler is None or not handler.saved_by_another


def _refuse_to_clip(optimizer: object, *_: Any, **__: Any) -> None:
    refuse_clipping(optimizer)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str | int | float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    else:
        yield name, value if isinstance(value, str | int | float) else repr(value)
