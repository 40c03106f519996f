"""Compression attached to an Accelerator: compresses its models, saves, loads and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported silently
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.private import store_of, timeout_of
from lightning_dist.frameworks.accelerate import private, residuals
from lightning_dist.frameworks.accelerate.attach import (
    CompressionHandler,
    handler_of,
    wrap_method,
)
from lightning_dist.ranks import Topology
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import run_config
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.arguments import CONFIG_KEY, comm_metrics
from lightning_dist.sync.base import Environment, Sync
from lightning_dist.sync.ddp import GradientSync
from lightning_dist.sync.rules import Case, check

if TYPE_CHECKING:
    from accelerate import Accelerator


_PAUSE = (0.002, 0.5)
"""First and longest, in seconds, between two looks."""
_SURE = 2.0
"""Seconds after which a wait that goes on is not one that is just over."""


class RollCall:
    """Lets ranks meet before they communicate in a call of the user's.

    ``if accelerator.is_main_process: accelerator.save_state()`` works where only rank 0 has
    anything to save. Where each rank has, rank 0 would wait for the others, which train on and wait
    for rank 0.

    Args:
        group: of all ranks, made for this; whoever has made it may end it.
        steps: number of steps that this rank has exchanged.
        each: what each rank has to save, for messages.
        instead: another way, for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        steps: Callable[[], int],
        each: str,
        instead: str = "",
    ) -> None:
        self._rank, self._size, self._limit = group.rank(), group.size(), timeout_of(group)
        self._steps, self._each, self._instead, self._meetings = steps, each, instead, 0
        self._store = PrefixStore("lightning_dist/roll call", store_of(group))

    def waits(self) -> Callable[[], None]:
        """This rank waits long for an exchange. Returns a call for the end. From any thread."""
        key = f"waiting {self._rank}"
        self._store.set(key, str(1 + self._steps()))
        return lambda: self._store.set(key, "0")

    def rendezvous(self, call: str) -> None:
        """Wait until all ranks have called it.

        Args:
            call: of the user, for messages.

        Raises:
            ValueError: one of them waits for this rank in a step.
            TimeoutError: some have not come within the timeout of the group.
        """
        size, seconds, key = self._size, self._limit.total_seconds(), f"meeting {self._meetings}"
        rule = f"{call} must be called on all ranks, because each has {self._each} to save"
        begin, (pause, longest) = time.monotonic(), _PAUSE
        waiting: dict[int, float] = {}
        came = self._store.add(key, 1)
        while came < size:
            now = time.monotonic()
            # One that waits in a step before this rank's has what this rank had to send it.
            steps = {rank: self._store.add(f"waiting {rank}", 0) - 1 for rank in range(size)}
            stuck = [rank for rank, step in steps.items() if step >= self._steps()]
            waiting = {rank: waiting.get(rank, now) for rank in stuck}
            for rank, since in waiting.items():
                if now - since > _SURE:
                    raise ValueError(
                        f"{rule}; rank {rank} trains on, and waits for this one in step "
                        f"{steps[rank]}. Call it outside of `if accelerator.is_main_process`"
                        f"{self._instead}"
                    )
            if now - begin > seconds:
                raise TimeoutError(f"{rule}; {came} of {size} have come within {seconds:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, longest)
            came = self._store.add(key, 0)
        self._meetings += 1


class Compression:
    """The compression of one Accelerator; made by :meth:`CompressedDDPPlugin.attach`.

    Args:
        accelerator: which has prepared nothing yet.
        settings: of every model.
        kind: class of what keeps the replicas of each equal.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: ExchangeSettings,
        kind: type[Sync] = GradientSync,
    ) -> None:
        self._accelerator, self._settings, self._kind = accelerator, settings, kind
        self._attached: WeakKeyDictionary[nn.Module, Sync] = WeakKeyDictionary()
        self._roll_call: RollCall | None = None  # from the first model in DDP on
        self.take_place()
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap_method(accelerator, name, self._clip)
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def take_place(self) -> None:
        """Stand where Accelerate asks for the arguments of DDP, around those that are there."""
        if handler_of(self._accelerator) is None:
            found = private.ddp_handler(self._accelerator)
            private.set_ddp_handler(self._accelerator, CompressionHandler(found, self.compress))

    def compress(self, model: DistributedDataParallel) -> Sync:
        """Compress a model that Accelerate has just wrapped. Collective."""
        before = self._attached.get(model.module)
        if before is not None:  # of a training that is over: Accelerate has wrapped it anew
            before.close()
        return self._attach(model)

    def _attach(self, model: nn.Module, **facts: Any) -> Sync:
        sync = self._kind.attach(model, self._settings, self._environment(**facts))
        self._attached[sync.model] = sync
        reducer = sync.reducer
        if reducer is None or reducer.network.world_size == 1:
            return sync
        if self._roll_call is None:
            self._roll_call = RollCall(
                reducer.network.data.group,
                steps=self._steps,
                each="residuals",
                instead=", or use a codec without them (bf16, fp16, error_feedback=False)",
            )
        reducer.network.limit.waits_long = self._roll_call.waits
        return sync

    def _environment(self, **facts: Any) -> Environment:
        scaler = self._accelerator.scaler
        return Environment(grad_scaler=scaler, wraps=True, several_models=True, **facts)

    def _steps(self) -> int:
        return sum(reducer.step for reducer in self.reducers)

    def register_optimizers(self, *optimizers: Any) -> None:
        """Let prepared optimizers work with the compression: OneBitAdam sends its momentum.

        ``lightning_dist.accelerate.Accelerator`` does it in ``prepare``. Collective.

        Raises:
            ValueError: a codec brings momentum and the optimizer has its own.
        """
        for prepared in optimizers:
            optimizer = getattr(prepared, "optimizer", prepared)
            for sync in self.syncs:
                if sync.trains(optimizer):
                    sync.connect([optimizer], self._environment())

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizers = [optimizer for sync in self.syncs for optimizer in sync.optimizers]
        check(Case(self._settings, optimizers=optimizers), at="clipping")
        return clip(*args, **kwargs)

    @property
    def syncs(self) -> list[Sync]:
        """What keeps replicas of the prepared models equal, in their order."""
        return residuals.owners(self._accelerator)

    @property
    def reducers(self) -> list[Reducer]:
        """Reducers of the prepared models, in their order; empty with one process."""
        return [sync.reducer for sync in self.syncs if sync.reducer is not None]

    @property
    def topology(self) -> Topology | None:
        """Nodes and groups of the ranks; None before the first model."""
        return self.syncs[0].topology if self.syncs else None

    def comm_stats(self) -> list[Mapping[str, Any]]:
        """Bytes this rank sent, for each model in the order in which they were given."""
        return [sync.comm_stats() for sync in self.syncs]

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions; empty before the first model."""
        return self.syncs[0].comm_config() if self.syncs else {}

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
        for sync in self.syncs:
            sync.close()

    def save(self, folder: str) -> None:
        """Write the residuals of all ranks beside the other files. Collective, if there are any."""
        together = [
            reducer for reducer in self.reducers if reducer.gathers_state and not reducer.recovers
        ]
        if together and self._roll_call is not None:
            self._roll_call.rendezvous("accelerator.save_state()")
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


def _flat(name: str, value: Any) -> Iterator[tuple[str, str | int | float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    else:
        yield name, value if isinstance(value, str | int | float) else repr(value)
