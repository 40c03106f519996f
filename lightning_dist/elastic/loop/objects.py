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
        for name, each in self._given.items():
            _require_state(name, each)
            _require_plain_counting(name, each)
        modules = [each for each in self._given.values() if isinstance(each, nn.Module)]
        if not modules:
            raise ValueError(
                "state= has no model, so no run could resume; give "
                'state={"model": model, "optimizer": optimizer}'
            )
        self._wrapped = [ddp for each in modules if (ddp := _ddp_in(each)) is not None]
        self.updates = [each for each in self._given.values() if isinstance(each, LocalUpdates)]
        if world_size > 1 and not self._wrapped and not self.updates:
            raise ValueError(
                f"No model in state= is in DistributedDataParallel, so {world_size} ranks would "
                "train independently; give the one that prepare(), fabric.setup() or DDP returned, "
                "or the updates that local_updates() returned beside the model"
            )
        for name, each in given.items():
            if isinstance(each, LocalUpdates):  # at the end: they load into models and optimizers
                self._given.pop(name)
                environment = Environment(grad_scaler=self._scaler, saves_shards=False)
                each.sync.connect(self.optimizers, environment)
                self._given[name] = each.sync
        self.device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Torch's own."""
        inner = map(_without_wrapper, self._given.values())
        return [each for each in inner if isinstance(each, Optimizer)]

    @property
    def _scaler(self) -> GradScaler | None:
        """GradScaler among the objects; each local worker keeps its own scale."""
        inner = map(_without_wrapper, self._given.values())
        return next((each for each in inner if isinstance(each, GradScaler)), None)

    @property
    def schedulers(self) -> list[Any]:
        """Whatever has learning rates and is no optimizer."""
        return [each for each in self._given.values() if hasattr(each, "get_last_lr")]

    def model_to_recover(self) -> DistributedDataParallel:
        """The model whose steps are taken again where a rank is lost.

        Raises:
            ValueError: there is not just one, or workers take steps of their own.
        """
        if self.updates:
            raise ValueError(
                "recovery='in_process' repeats a step on all ranks, and a local step belongs to "
                "one worker; use recovery='restart'"
            )
        if len(self._wrapped) != 1:
            raise ValueError(
                "recovery='in_process' is for one model in DistributedDataParallel, got "
                f"{len(self._wrapped)}; use recovery='restart'"
            )
        return self._wrapped[0]

    def states(self) -> dict[str, Any]:
        """Of all objects, by name."""
        return {name: self._state_of(each) for name, each in self._given.items()}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Take over what :meth:`states` has returned, on another rank or in another process."""
        for name, each in self._given.items():
            _inside(each).load_state_dict(states[name])

    @property
    def counters(self) -> dict[str, Any]:
        """Objects that a step changes beside models and optimizers, such as schedulers, by name."""
        inner = {name: _without_wrapper(each) for name, each in self._given.items()}
        kinds = (nn.Module, Optimizer)
        return {n: self._given[n] for n, each in inner.items() if not isinstance(each, kinds)}

    @property
    def _syncs(self) -> list[Sync]:
        """What keeps replicas of models in DDP equal, and is no object of its own."""
        found = (sync_of(ddp) for ddp in self._wrapped)
        return [each for each in found if each is not None and not each.is_own_object]

    def require_loadable(self) -> None:
        """Raise ValueError if a state cannot be read by ``torch.load(weights_only=True)``."""
        require_loadable(self.states(), name="state")

    def _state_of(self, each: Any) -> Any:
        inside = _inside(each)
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
            state, found = sync.spread_state_dict()
            spreads += found
            reducers.append(state)
        return {"objects": self.states(), "reducers": reducers}

    def take_up(self, checkpoint: Any, *, path: str) -> ElasticState:
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
        for name, each in self._given.items():
            if isinstance(optimizer := _without_wrapper(each), Optimizer):
                require_same_optimizer(optimizer, saved[name], path=path)
        self.load_states(saved)
        states = checkpoint["reducers"]
        for sync, own in zip_longest(self._syncs, states[: len(self._syncs)]):
            sync.load_state_dict(own)
        return place

    @contextmanager
    def exchanging(self, exchange: bool) -> Iterator[None]:
        """Whether micro-batches inside exchange gradients, or leave them for a later one."""
        with ExitStack() as stack:
            for ddp in () if exchange else self._wrapped:
                stack.enter_context(ddp.no_sync())
            yield


def _ddp_in(module: nn.Module) -> DistributedDataParallel | None:
    found = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
    return next(found, None)


def _inside(each: Any) -> Any:
    wrapped = _ddp_in(each) if isinstance(each, nn.Module) else None
    return each if wrapped is None else wrapped.module


def _without_wrapper(each: Any) -> Any:
    """Accelerate's and Fabric's optimizers have torch's in them."""
    if isinstance(each, nn.Module) or hasattr(each, "get_last_lr"):
        return each
    inner = getattr(each, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else each


def _require_state(name: str, each: Any) -> None:
    if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
        raise ValueError(
            f"state[{name!r}] has no state_dict() and load_state_dict(), so it could not be saved: "
            f"{type(each).__name__}; give them to it, or leave it out"
        )


def _require_plain_counting(name: str, each: Any) -> None:
    """Refuse what Accelerate would do itself with steps, by the number of ranks of this start."""
    passes = getattr(getattr(each, "gradient_state", None), "num_steps", 1)
    if passes != 1:
        raise ValueError(
            "ElasticLoop decides how many micro-batches a step takes, so "
            f"gradient_accumulation_steps={passes} of the Accelerator would divide losses once "
            "more; leave it out, and give it to ElasticLoop"
        )
    if getattr(each, "step_with_optimizer", False) and not getattr(each, "split_batches", True):
        raise ValueError(
            f"state[{name!r}] is a scheduler that Accelerate steps once for every rank, so it "
            "would run at another speed on another number of ranks; do not prepare() it"
        )
