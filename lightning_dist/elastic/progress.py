"""Position of training in a checkpoint, from which any number of ranks can resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from lightning_dist.elastic import rng
from lightning_dist.elastic.data.plan import Layout, Position
from lightning_dist.elastic.private import LAST_LEARNING_RATES, inner_schedulers
from lightning_dist.elastic.rng import derive_seed

KEY = "lightning_dist_elastic"
_VERSION = 1


@dataclass(frozen=True)
class ElasticState:
    """Position of training, in samples, and settings that must not change.

    Args:
        run_id: drawn when the run began.
        seed: of the order of the samples.
        first: the layout that the run began with.
        layout: the one at the time of the checkpoint.
        position: of the last optimizer step.
        total_samples: samples that optimizer steps have used, of all epochs.
        total_steps: optimizer steps of all epochs.
        size: samples of an epoch; None if nobody knows.
        validated: whether the validation that is due at this position is over.
        rng: generator states of every rank.
        loaders: states of the loaders of every rank that takes samples of its own, where those keep
            the position themselves.
        metrics: what every rank had logged, which callbacks and schedulers may wait for.
        stopped: whether the training was stopped before its last epoch or step.
    """

    run_id: str
    seed: int
    first: Layout
    layout: Layout
    position: Position
    total_samples: int
    total_steps: int
    size: int | None = None
    validated: bool = True
    rng: list[dict[str, Any]] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False

    @property
    def world_size(self) -> int:
        """Ranks that saved it, also those that take the samples of another."""
        return len(self.metrics) or self.layout.world_size

    def as_dict(self) -> dict[str, Any]:
        """Plain values and tensors. ``rng`` is not copied: it has 1,249 numbers for every rank."""
        return {"version": _VERSION, **asdict(replace(self, rng=[])), "rng": self.rng}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, path: str) -> ElasticState:
        """The state in a checkpoint.

        Raises:
            ValueError: a newer version of this package has written it.
        """
        values = dict(state)
        version = values.pop("version")
        if version > _VERSION:
            raise ValueError(
                f"{path} was written by a newer lightning_dist (elastic state version {version}, "
                f"this one reads up to {_VERSION}); upgrade lightning_dist"
            )
        values["first"], values["layout"] = Layout(**values["first"]), Layout(**values["layout"])
        values["position"] = Position(**values["position"])
        return cls(**values)


def require_same_data(state: ElasticState, *, size: int | None, path: str) -> None:
    """Raise a ValueError unless a checkpoint is of a run over as many samples."""
    if state.size != size:
        raise ValueError(
            f"{path} is of another run: its epochs have {state.size} samples, the train dataloader "
            f"has {size}. Give another folder, or restore the dataset"
        )


def require_same_optimizer(optimizer: Any, state: Any, *, path: str) -> None:
    """Raise a ValueError if ``state``, of a checkpoint, is that of an optimizer of another kind.

    Its groups would replace those of this one, whose settings would then be missing.
    """
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], Mapping):
        return
    # Switches, off by default, come with new versions of torch.
    missing = [
        name
        for name, default in optimizer.defaults.items()
        if name not in groups[0] and default is not None and not isinstance(default, bool)
    ]
    if missing:
        raise ValueError(
            f"{path} has the state of another optimizer than {type(optimizer).__name__}: its "
            f"parameter groups have no {', '.join(missing)}; go on with the optimizer of that run, "
            "or give another folder"
        )


class Generators:
    """Random generators of this process, which go on where they were saved.

    With another number of ranks, or of those that take samples of their own, they get seeds from
    step and rank: one seed for ranks that take the same samples.

    Args:
        resumed: state of the checkpoint; None for a fresh start.
        rank: this one.
        world_size: ranks.
        device: whose generator is kept too.
        data_ranks: as ``rank`` and ``world_size``, among those that take samples of their own;
            None: all do.
    """

    def __init__(
        self,
        resumed: ElasticState | None,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        data_ranks: tuple[int, int] | None = None,
    ) -> None:
        self._device = device
        self._pending: dict[str, Any] | None = None
        if resumed is not None:
            data_rank, data_size = data_ranks or (rank, world_size)
            seed = derive_seed(resumed.seed, "rng", resumed.total_steps, data_rank)
            before = len(resumed.rng), resumed.layout.world_size
            same = before == (world_size, data_size)
            self._pending = resumed.rng[rank] if same else {"seed": seed}

    def capture(self) -> dict[str, Any]:
        """States to save: those to be restored, if they are not yet."""
        return self._pending or rng.capture(self._device)

    def forget(self) -> None:
        """Leave the generators as they are, and forget what was saved."""
        self._pending = None

    def restore(self) -> None:
        """Once, where the generators were saved: before anything draws from them."""
        state, self._pending = self._pending, None
        if state is not None and "seed" in state:
            rng.seed_all(state["seed"], self._device)
        elif state is not None:
            rng.restore(state, self._device)


_OF_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULER = ("base_lrs", LAST_LEARNING_RATES, "base_lr", "max_lrs", "eta_min", "min_lrs")


def scale_learning_rates(
    optimizers: Iterable[Any], schedulers: Iterable[Any], *, factor: float
) -> None:
    """Multiply the learning rates, and what schedulers compute them from, with ``factor``.

    Schedulers keep theirs as numbers or lists under the names that torch's use; those inside a
    ``SequentialLR`` or ``ChainedScheduler`` too.
    """
    if factor == 1.0:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _OF_GROUP:
                if group.get(name) is not None:
                    group[name] = group[name] * factor
    for scheduler in schedulers:
        _scale(scheduler, factor)


def _scale(scheduler: Any, factor: float) -> None:
    for name in _OF_SCHEDULER:
        value = getattr(scheduler, name, None)
        if isinstance(value, list):
            setattr(scheduler, name, [rate * factor for rate in value])
        elif isinstance(value, int | float):
            setattr(scheduler, name, value * factor)
    for inner in inner_schedulers(scheduler):
        _scale(inner, factor)
