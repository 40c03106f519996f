"""State of a loop: the user's objects, and the residuals of their models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.checkpoint.reading import require_loadable
from lightning_dist.elastic.progress import KEY, ElasticState, require_same_optimizer
from lightning_dist.ranks.facts import Spread
from lightning_dist.sync.base import Environment, Sync, sync_of, sync_within
from lightning_dist.sync.local.outer_steps import LocalUpdates


class Objects:
    """Models, optimizers, schedulers and whatever else has a state, by the names in a checkpoint.

    Models and optimizers may be as Accelerate or Fabric return them. A model's names in a
    checkpoint are those of the module inside, so that another number of ranks can load it. Where
    there are local updates its weights in a checkpoint are the anchor's, and what each worker has
    of its own is under the name of the updates.

    Args:
        given: by name.
        world_size: ranks.

    Raises:
        ValueError: something has no state, a model is neither in DDP nor trained in local steps, or
            Accelerate counts steps.
    """

    def __init__(self, given: Mapping[str, Any], *, world_size: int) -> None:
        self._given = dict(given)
        for name, value in self._given.items():
            _require_state(name, value)
            _require_plain_counting(name, value)
        modules = [value for value in self._given.values() if isinstance(value, nn.Module)]
        if not modules:
            raise ValueError(
                "state= has no model, so no run could resume; give "
                'state={"model": model, "optimizer": optimizer}'
            )
        self._wrapped = [ddp for value in modules if (ddp := _ddp_in(value)) is not None]
        self.updates = [value for value in self._given.values() if isinstance(value, LocalUpdates)]
        if world_size > 1 and not self._wrapped and not self.updates:
            raise ValueError(
                f"No model in state= is in DistributedDataParallel, so {world_size} ranks would "
                "train independently; give the one that prepare(), fabric.setup() or DDP returned, "
                "or the updates that local_updates() returned beside the model"
            )
        for name, value in given.items():
            if isinstance(value, LocalUpdates):  # at the end: they load into models and optimizers
                self._given.pop(name)
                environment = Environment(grad_scaler=self._scaler, saves_shards=False)
                value.sync.connect(self.optimizers, environment)
                self._given[name] = value.sync
        self.device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Torch's own."""
        inner = map(_without_wrapper, self._given.values())
        return [value for value in inner if isinstance(value, Optimizer)]

    @property
    def _scaler(self) -> GradScaler | None:
        """GradScaler among the objects; each local worker keeps its own scale."""
        inner = map(_without_wrapper, self._given.values())
        return next((value for value in inner if isinstance(value, GradScaler)), None)

    @property
    def schedulers(self) -> list[Any]:
        """Whatever has learning rates and is no optimizer."""
        return [value for value in self._given.values() if hasattr(value, "get_last_lr")]

    def to_recover(self) -> DistributedDataParallel | LocalUpdates:
        """The model in DDP, or the local updates, whose exchanges go on without a lost rank.

        Raises:
            ValueError: there is not just one.
        """
        several: list[DistributedDataParallel | LocalUpdates] = [*self._wrapped, *self.updates]
        if len(several) != 1:
            raise ValueError(
                "recovery='in_process' is for one model, in DistributedDataParallel or with local "
                f"updates, got {len(self._wrapped)} in DistributedDataParallel and "
                f"{len(self.updates)} with local updates; use recovery='restart'"
            )
        return several[0]

    def states(self, *, leader: int = 0) -> dict[str, Any]:
        """States of all objects, by name; those of workers on rank ``leader``. Collective."""
        return {
            name: value.state_dict(to=leader) if isinstance(value, Sync) else self._state_of(value)
            for name, value in self._given.items()
        }

    def states_for_newcomer(self) -> dict[str, Any]:
        """States of this rank's objects, but for what workers have of their own."""
        own = {k: value for k, value in self._given.items() if not isinstance(value, Sync)}
        return {name: self._state_of(value) for name, value in own.items()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Take over such states, on another rank or in another process."""
        for name, state in states.items():
            _inside(self._given[name]).load_state_dict(state)

    @property
    def in_steps(self) -> dict[str, Any]:
        """Objects that a step may change, by name; all but optimizers."""
        return {
            name: _inside(value)
            for name, value in self._given.items()
            if not isinstance(_without_wrapper(value), Optimizer)
        }

    @property
    def has_failed(self) -> bool:
        """Whether an exchange of a model has failed."""
        own = (value for value in self._given.values() if isinstance(value, Sync))
        return any(sync.has_failed for sync in (*own, *self._syncs))

    @property
    def _syncs(self) -> list[Sync]:
        """Syncs of the models in DDP that are no objects of their own."""
        syncs = (sync_of(ddp) for ddp in self._wrapped)
        return [sync for sync in syncs if sync is not None and not sync.is_own_object]

    def require_loadable(self) -> None:
        """Raise ValueError if a state cannot be read by ``torch.load(weights_only=True)``."""
        require_loadable(self.states(), name="state")

    def _state_of(self, value: Any) -> Any:
        inside = _inside(value)
        if not isinstance(inside, nn.Module):
            return inside.state_dict()
        sync = sync_within(inside, Sync)  # type: ignore[type-abstract]  # it makes none
        return inside.state_dict() if sync is None else sync.weights_to_save(inside.state_dict)

    def state_dict(self, *, leader: int = 0, spreads: list[Spread] | None = None) -> dict[str, Any]:
        """Collective. Residuals are on rank ``leader`` only.

        Args:
            spreads: of a sharded checkpoint, to which residuals are added that each rank keeps.
        """
        reducers: list[Any] = []
        for sync in self._syncs:
            if spreads is None:
                reducers.append(sync.state_dict(to=leader))
                continue
            state, own_spreads = sync.spread_state_dict()
            spreads += own_spreads
            reducers.append(state)
        return {"objects": self.states(leader=leader), "reducers": reducers}

    def load(self, checkpoint: Any, *, path: str) -> ElasticState:
        """Load a checkpoint, on all ranks; where it was taken.

        Raises:
            ValueError: somebody else saved it, or it has other objects or the state of an optimizer
                of another kind; nothing was loaded.
        """
        if not isinstance(checkpoint, dict) or not {KEY, "objects"} <= checkpoint.keys():
            raise ValueError(
                f"{path} was not saved by an ElasticLoop; give ElasticLoop a folder of its own"
            )
        place = ElasticState.from_dict(checkpoint[KEY], path=path)
        saved = checkpoint["objects"]
        if saved.keys() != self._given.keys():
            raise ValueError(
                f"{path} holds {', '.join(saved)}, and state= has {', '.join(self._given)}; give "
                "the same names, or another folder"
            )
        for name, value in self._given.items():
            if isinstance(optimizer := _without_wrapper(value), Optimizer):
                require_same_optimizer(optimizer, saved[name], path=path)
        self.load_states(saved)
        states = checkpoint["reducers"]
        for sync, state in zip_longest(self._syncs, states[: len(self._syncs)]):
            sync.load_state_dict(state)
        return place

    @contextmanager
    def exchanging(self, exchange: bool) -> Iterator[None]:
        """Whether micro-batches inside exchange gradients, or leave them for a later one."""
        with ExitStack() as stack:
            for ddp in () if exchange else self._wrapped:
                stack.enter_context(ddp.no_sync())
            yield


def _ddp_in(module: nn.Module) -> DistributedDataParallel | None:
    wrapped = (part for part in module.modules() if isinstance(part, DistributedDataParallel))
    return next(wrapped, None)


def _inside(value: Any) -> Any:
    wrapped = _ddp_in(value) if isinstance(value, nn.Module) else None
    return value if wrapped is None else wrapped.module


def _without_wrapper(value: Any) -> Any:
    """Accelerate's and Fabric's optimizers have torch's in them."""
    if isinstance(value, nn.Module) or hasattr(value, "get_last_lr"):
        return value
    inner = getattr(value, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else value


def _require_state(name: str, value: Any) -> None:
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise ValueError(
            f"state[{name!r}] has no state_dict() and load_state_dict(), so it could not be saved: "
            f"{type(value).__name__}; give them to it, or leave it out"
        )


def _require_plain_counting(name: str, value: Any) -> None:
    """Refuse what Accelerate would do itself with steps, by the number of ranks of this start."""
    passes = getattr(getattr(value, "gradient_state", None), "num_steps", 1)
    if passes != 1:
        raise ValueError(
            "ElasticLoop decides how many micro-batches a step takes, so "
            f"gradient_accumulation_steps={passes} of the Accelerator would divide losses once "
            "more; leave it out, and give it to ElasticLoop"
        )
    if getattr(value, "step_with_optimizer", False) and not getattr(value, "split_batches", True):
        raise ValueError(
            f"state[{name!r}] is a scheduler that Accelerate steps once for every rank, so it "
            "would run at another speed on another number of ranks; do not prepare() it"
        )
