"""``Sync``: what keeps the replicas of a model equal while it trains, whichever framework asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, overload
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist.base.private import loss_scale_of, map_tensors
from lightning_dist.ranks.facts import Read, Spread, read_whole, run_of
from lightning_dist.ranks.failures import is_of_collective

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.amp import GradScaler
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_dist.ranks import Topology
    from lightning_dist.reducer.reducer import Reducer
    from lightning_dist.settings.exchange import ExchangeSettings
    from lightning_dist.settings.local_updates import Replicas


Groups: TypeAlias = Sequence["dist.ProcessGroup"]
"""Process groups that a user has made, see :func:`~lightning_dist.compress_ddp`."""


@dataclass(frozen=True)
class Environment:
    """Facts about a training that the caller knows, and neither settings nor the model say.

    Args:
        grad_scaler: the GradScaler in use, so that residuals are kept unscaled.
        mesh: of a sharded model, with the dimensions replicas and shards; with ``parameters`` all
            ranks.
        groups: see :func:`~lightning_dist.compress_ddp`. None: made when they are needed.
        before: that of an earlier fit, whose groups are used again; if it was of this model, its
            state goes on.
        several_models: whether the settings are for other models too.
        wraps: whether a framework has put the model in DDP by itself.
        clips: whether gradients are clipped between the backward pass and the step.
        saves_shards: whether a checkpoint can hold parts that several ranks have of one worker.
        steps_itself: whether the user's code, and not the framework, calls optimizers.
        replicas: what keeps a replica of its own: a rank, or a node whose ranks have DDP between
            them.
    """

    grad_scaler: GradScaler | None = None
    mesh: DeviceMesh | None = None
    groups: Groups | None = None
    before: Sync | None = None
    several_models: bool = False
    wraps: bool = False
    clips: bool = False
    saves_shards: bool = True
    steps_itself: bool = False
    replicas: Replicas = "rank"

    @property
    def grad_scale(self) -> Callable[[], Tensor | None] | None:
        """Scale of the GradScaler, as of :class:`.Reducer`."""
        return loss_scale_of(self.grad_scaler)


class Sync(ABC):
    """Keeps the replicas of one model equal.

    A framework makes one for each model with :meth:`attach`, gives it the optimizers with
    :meth:`connect`, and forwards its hooks. It knows nothing of what is sent. Methods that are not
    abstract do nothing where there is nothing to do.
    """

    key: ClassVar[str] = "lightning_dist"
    """Key of the state in a checkpoint."""
    entry: ClassVar[str]
    """Function of plain PyTorch that attaches it."""
    of_one_model: ClassVar[bool] = False
    """Whether a training has one model; its state in a checkpoint is then no list."""
    is_own_object: ClassVar[bool] = False
    """Whether Accelerate and ElasticLoop save it under a name of its own, and not with a model."""
    continues: ClassVar[bool] = True
    """Whether the next fit of a Trainer goes on from its state."""
    loads_scaler: ClassVar[bool] = False
    """Whether the state of the GradScaler is a part of this state: workers have different ones."""
    counts_samples: bool = False
    """Whether :meth:`count_samples` must be called."""

    settings: ExchangeSettings
    reducer: Reducer | None = None
    """Averages flat tensors; None where other collectives are replaced."""

    @classmethod
    @abstractmethod
    def attach(cls, model: nn.Module, settings: Any, environment: Environment) -> Self:
        """Begin to keep replicas of ``model`` equal. Collective.

        Raises:
            ValueError: the model cannot be trained like this, or ranks differ.
        """

    @classmethod
    def ddp_arguments(
        cls, settings: Any, environment: Environment, device: torch.device
    ) -> Mapping[str, Any] | None:
        """Arguments with which a framework puts the model in DDP; None: it does not. Collective."""
        return {}

    def connect(self, optimizers: Sequence[Optimizer], environment: Environment) -> None:
        """Take the optimizers that step parameters of the model, all in their order. Collective.

        Raises:
            ValueError: an optimizer that cannot be used with these settings.
        """
        self._optimizers = [*map(ref, optimizers)]

    def trains(self, optimizer: Optimizer) -> bool:
        """True if ``optimizer`` steps a parameter that is kept equal."""
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return not stepped.isdisjoint(self.names)

    @property
    def names(self) -> Mapping[Tensor, str]:
        """Names of the parameters that are kept equal."""
        return self._reporter.names

    # Weakly: the model, whose hooks hold this object, must not keep optimizers alive.
    _optimizers: Sequence[ref[Optimizer]] = ()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of :meth:`connect` that are still there."""
        optimizers = (optimizer() for optimizer in self._optimizers)
        return [optimizer for optimizer in optimizers if optimizer is not None]

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module itself, without DDP, while it is there."""

    def is_of(self, model: nn.Module) -> bool:
        """True if this is what keeps ``model`` equal, which may be in DDP."""
        return any(attached() is self for attached in _attached_to(model))

    # Reports, which are those of the reducer unless there is none.

    @property
    def _reporter(self) -> Reducer:
        assert self.reducer is not None, "or all that follows is overridden"
        return self.reducer

    @property
    def has_failed(self) -> bool:
        """Whether a collective of an exchange failed. DDP raises its error without its class."""
        failure = None if self.reducer is None else self.reducer.failure
        return failure is not None and is_of_collective(failure)

    @property
    def closed(self) -> bool:
        """True once nothing is exchanged any more."""
        return self._reporter.closed

    @property
    def topology(self) -> Topology:
        """Nodes and groups of the ranks."""
        return self._reporter.topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent: totals, ``last_step`` and ``per_codec``."""
        return self._reporter.comm_stats()

    def comm_config(self) -> dict[str, Any]:
        """Codec, exchange, nodes and versions, for the configuration of a tracked run."""
        return self._reporter.comm_config()

    def close(self) -> None:
        """Exchange nothing more."""
        self._reporter.close()

    def metrics(self) -> Mapping[str, float]:
        """Values for a logger beside the bytes; empty before the first exchange."""
        return {}

    # A step.

    def expect_steps(self, steps: int | None, *, done: int, is_trial: bool) -> None:
        """Note how many optimizer steps the training has in total, before its first one.

        Args:
            steps: None: unknown.
            done: by an earlier start.
            is_trial: a part of a training, as of a tuner.

        Raises:
            ValueError: nothing would be compressed in them.
        """

    def begin_step(self) -> None:
        """A batch begins; a Trainer may call methods of its module, and not the module itself."""

    def before_backward(self, loss: Tensor) -> None:
        """A backward pass begins at ``loss``."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes exchange nothing and gradients accumulate."""
        return nullcontext()

    def count_samples(self, samples: float) -> None:
        """Count samples, or tokens, of the optimizer step to come, where settings weigh by them.

        Raises:
            ValueError: nothing is weighed by them.
        """
        raise ValueError(
            f"Samples are counted for the weights of local updates, got {samples!r} with "
            f"{self.settings.kind}; leave the call out"
        )

    def step_done(self) -> None:
        """The first of the optimizers was stepped, or its step skipped by a GradScaler."""

    def finish(self) -> None:
        """The last step of the training is over. Collective."""

    # Weights and state of a checkpoint.

    def shared_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has weights that are equal on all ranks."""
        return nullcontext()

    def weights_to_save(
        self, gather: Callable[[], dict[str, Any]], *, leaves_shards: bool = True
    ) -> dict[str, Any]:
        """The model's ``state_dict`` for a checkpoint.

        Args:
            gather: the framework's own way to it.
            leaves_shards: ``gather`` leaves sharded tensors as they are, on their ranks.
        """
        return gather()

    @property
    def saves_optimizers(self) -> bool:
        """True if states of this rank's optimizers are those that other trainings can load."""
        return True

    def optimizer_states_in(self, state: Mapping[str, Any]) -> list[Any] | None:
        """States of optimizers, for other trainings, within :meth:`spread_state_dict`."""
        return None

    @abstractmethod
    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all ranks, beside the model's, on rank ``to``; None elsewhere. Collective."""

    @abstractmethod
    def spread_state_dict(self) -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with its tensors left where they are. Collective.

        The tensors of the state are empty memory; the spreads are the parts that this rank has.
        """

    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> Mapping[str, Any]:
        """Part of :meth:`state_dict` for this rank, for :meth:`load_own_state`.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.
        """
        part: dict[str, Any] = map_tensors(partial(read_whole, read=read), state)
        return part

    @abstractmethod
    def load_own_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`own_state`; None: from the model's weights alone. Collective."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh."""
        self.load_own_state(None if state is None else self.own_state(state))


_S = TypeVar("_S", bound=Sync)

# Beside the modules: Accelerate keeps a model as it was before DDP wrapped it, from where nothing
# leads to a hook; and a module must stay copyable, so nothing may be hung on it.
_attached: WeakKeyDictionary[nn.Module, list[ref[Sync]]] = WeakKeyDictionary()


def remember(model: nn.Module, sync: Sync) -> None:
    """Let :func:`sync_of` find ``sync``; ``model`` is without DDP."""
    held = [attached for attached in _attached.get(model, ()) if attached() is not None]
    _attached[model] = [*held, ref(sync)]


@overload
def sync_of(model: nn.Module) -> Sync | None: ...


@overload
def sync_of(model: nn.Module, kind: type[_S]) -> _S | None: ...


def sync_of(model: nn.Module, kind: type[Any] = Sync) -> Any:
    """Sync of ``model``: the newest one of this kind that is not closed.

    ``model`` may be in DDP.
    """
    return next((sync for sync in syncs_of(model) if isinstance(sync, kind)), None)


def sync_within(model: nn.Module, kind: type[_S]) -> _S | None:
    """:func:`sync_of` of ``model``, or else of the ``module`` that a wrapper of Fabric's has."""
    inner: object = getattr(model, "module", None)
    sync = sync_of(model, kind)
    return sync_of(inner, kind) if sync is None and isinstance(inner, nn.Module) else sync


def syncs_of(model: nn.Module) -> list[Sync]:
    """All that keep replicas of ``model`` equal and are not closed, the newest first."""
    syncs = (attached() for attached in reversed(_attached_to(model)))
    return [sync for sync in syncs if sync is not None and not sync.closed]


def continued(model: nn.Module, before: Sync | None) -> Sync | None:
    """``before`` if it is the last one that was attached to ``model``, closed or not, else None."""
    syncs = [attached() for attached in _attached_to(model)]
    return before if before is not None and syncs and syncs[-1] is before else None


def _attached_to(model: nn.Module) -> Sequence[ref[Sync]]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return _attached.get(module, ())
