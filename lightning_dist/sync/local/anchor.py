"""Anchor of the workers: the weights that all know, in fragments, and their outer optimizer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_dist.base.log import get_logger
from lightning_dist.exchange.rounds import replicate
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real, slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.local_updates import LocalUpdateSettings, Replicas
from lightning_dist.sync.buckets import flags_of
from lightning_dist.sync.fsdp.replicas import local_of

log = get_logger(__name__)


_STABLE_OUTER_LR = 0.1
"""Rate with which 1,000 outer steps of a small model stay finite; see the guide on local steps."""


def warn_of_bursts(settings: LocalUpdateSettings) -> None:
    """Log a warning where the residual of many windows is applied at once, which may diverge."""
    for codec in settings.inter.leaves():
        kept = "residual" in settings.memory_of(codec).kinds
        if codec.seldom and kept and settings.outer_lr > _STABLE_OUTER_LR:
            log.warning(
                "codec %s sends an element once in many outer steps, and then the changes of all "
                "of them: with outer_lr=%g the weights may diverge. Set outer_lr=%g, or use 'topk' "
                "or error_feedback=False",
                codec,
                settings.outer_lr,
                _STABLE_OUTER_LR,
            )


def require_replicas(replicas: Replicas, settings: LocalUpdateSettings) -> None:
    """Raise ValueError unless frameworks know what is a worker."""
    if replicas not in ("rank", "node"):
        raise ValueError(f"replicas must be 'rank' or 'node', got {replicas!r}")
    if replicas == "node" and settings.ddp_steps:
        raise ValueError(
            "ddp_steps are steps of DDP over all ranks, and replicas='node' has DDP inside the "
            "nodes; give one of the two"
        )


def evaluates_anchor(evaluate: str) -> bool:
    """True for ``"anchor"``; raises ValueError unless it is that or ``"worker"``."""
    if evaluate not in ("anchor", "worker"):
        raise ValueError(f"evaluate must be 'anchor' or 'worker', got {evaluate!r}")
    return evaluate == "anchor"


def require_shards_as_workers(replicas: Replicas) -> None:
    """Raise ValueError unless a worker is what holds a sharded model."""
    if replicas != "rank":
        raise ValueError(
            f"replicas={replicas!r} is for models that each rank has as a whole, and "
            "here all ranks of a node are one worker; leave it out"
        )


def require_scheduler(made: object, *, outer: Optimizer) -> None:
    """Raise ValueError unless it is None or a scheduler of ``outer`` that counts steps alone."""
    if made is not None and (
        not isinstance(made, LRScheduler)
        or isinstance(made, ReduceLROnPlateau)
        or made.optimizer is not outer
    ):
        raise ValueError(
            "outer_schedule must make, from the outer optimizer, a torch LRScheduler that depends "
            f"on the number of outer steps alone, got {type(made).__name__}; for a factor of the "
            "rate use lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"
        )


def require_stepped(gradients: float) -> None:
    """Raise ValueError where finite gradients wait for the first step of an optimizer.

    A GradScaler skips a step whose gradients are not finite, and a worker without a batch has none.

    Args:
        gradients: norm of all gradients of the worker.
    """
    if 0 < gradients < float("inf"):
        raise ValueError(
            "updates.step() must follow a step of the optimizer, and some gradients are not used "
            "yet, as in the middle of gradient accumulation; call it once after every "
            "optimizer.step(), and give local_updates the optimizer that steps"
        )


@dataclass
class Fragment:
    """Parameters that are exchanged together, and what all workers agree on of them."""

    parameters: Sequence[nn.Parameter]
    anchors: Sequence[nn.Parameter]  # of this rank's parts, real and in float32 or wider
    slices: Sequence[ParameterSlice]  # of the flat pseudo-gradient of these parts

    @property
    def numel(self) -> int:
        """Elements of the pseudo-gradient on this rank."""
        return sum(part.numel for part in self.slices)

    def rows(self) -> Iterable[tuple[nn.Parameter, nn.Parameter, ParameterSlice]]:
        """Each parameter with its anchor and its place in the pseudo-gradient."""
        return zip(self.parameters, self.anchors, self.slices, strict=True)


def cut(
    trained: Mapping[str, nn.Parameter], anchors: Mapping[str, nn.Parameter], count: int
) -> list[Fragment]:
    """Fragments of about as many elements each, of parameters that follow each other.

    With fewer parameters than ``count`` the last ones have none.
    """
    # By all elements, not this rank's alone: the cut is equal on all ranks.
    ends = list(accumulate(p.numel() for p in trained.values()))
    middles = [end - p.numel() / 2 for end, p in zip(ends, trained.values(), strict=True)]
    bounds, parts = [0], min(count, len(trained))
    for index in range(1, parts):
        bound = bisect_left(middles, ends[-1] * index / parts)
        # Every fragment before and every one to come needs a parameter.
        bounds.append(min(max(bound, bounds[-1] + 1), len(trained) - parts + index))
    names, bounds = list(trained), [*bounds, *[len(trained)] * (count - parts + 1)]
    return [
        fragment_of({name: trained[name] for name in names[start:end]}, anchors)
        for start, end in pairwise(bounds)
    ]


def fragment_of(
    parameters: Mapping[str, nn.Parameter], anchors: Mapping[str, nn.Parameter]
) -> Fragment:
    """These parameters with their anchors, one after the other in a pseudo-gradient."""
    names, tensors = list(parameters), list(parameters.values())
    return Fragment(tensors, [anchors[name] for name in names], slices_of_parts(names, tensors))


def own_part(parameter: Tensor) -> Tensor:
    """Part of a parameter on this rank, in real numbers; all of it where it is not sharded."""
    return as_real(local_of(parameter.detach()))


def first_row(sharded: DTensor) -> int:
    """Row of a tensor, sharded over one dimension, at which this rank's part begins."""
    mesh, count = sharded.device_mesh, sharded.shape[0]
    return min(mesh.get_local_rank() * -(-count // mesh.size()), count)


def slices_of_parts(names: Sequence[str], parameters: Sequence[Tensor]) -> list[ParameterSlice]:
    """Parts of parameters on this rank, one after the other in a flat tensor."""
    slices = slices_of(names, [own_part(parameter) for parameter in parameters])
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            part = slices[index]
            row = prod(part.shape[1:])
            start = first_row(parameter) * row
            rest = parameter.shape[0] * row - start - part.numel
            slices[index] = replace(part, start=start, rest=rest)
    return slices


class Anchor:
    """Trained parameters as all workers know them, in fragments that are exchanged in turn.

    Args:
        parameters: all of the model, by name; those that require a gradient have an anchor.
        settings: of the outer steps.
        reducer: which averages, and keeps residuals.
        among: the ranks that have the same part of each parameter; None: those of ``reducer``.

    Raises:
        ValueError: there are fewer trained parameters than fragments; or see
            :func:`.require_scheduler`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: LocalUpdateSettings,
        *,
        reducer: Reducer,
        among: Network | None = None,
    ) -> None:
        self._parameters, self._settings = parameters, settings
        self._reducer, self._shard_network = reducer, among
        self._make_optimizer = settings.outer_optimizer or self._sgd
        self._make_scheduler = settings.outer_schedule
        trained = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        if settings.fragments > len(trained):
            raise ValueError(
                "fragments must be at most the number of trained parameters, "
                f"{len(trained)}, got {settings.fragments}"
            )
        wide = all(own_part(parameter).dtype == torch.float64 for parameter in trained.values())
        self.dtype = torch.float64 if wide else torch.float32
        self.tensors: dict[str, nn.Parameter] = {}
        """Anchors of this rank's parts by name: real numbers in :attr:`dtype`."""
        self.fragments: Sequence[Fragment] = ()
        self._flags: list[bool] = []
        self._trained: set[str] = set()  # by this worker, since their last exchange
        self.look()
        self._cut(trained)
        self.optimizer, self.scheduler = self._outer()

    def _sgd(self, anchors: Sequence[Tensor]) -> Optimizer:
        momentum = self._settings.outer_momentum
        return torch.optim.SGD(
            anchors, lr=self._settings.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def look(self) -> bool:
        """Note what is trained now, before an optimizer changes it. Returns whether some is new.

        The anchor of a parameter that was frozen until now are its weights.
        """
        flags = flags_of(self._parameters.values())
        if flags == self._flags:
            return False
        self._flags = flags
        self._trained |= {
            name for name, parameter in self._parameters.items() if parameter.requires_grad
        }
        new = self._trained - self.tensors.keys()
        self._hold(self.tensors.keys() | new)
        return bool(new)

    def trained(self) -> list[bool]:
        """Flags of the model's parameters: trained by this worker since their last exchange."""
        return [name in self._trained for name in self._parameters]

    def _hold(self, names: Collection[str]) -> None:
        kept = self.tensors
        # With the strides of the parameters, which an outer optimizer may keep in its state.
        self.tensors = {
            name: kept[name]
            if name in kept
            else nn.Parameter(
                own_part(parameter).to(
                    "cpu" if self._settings.offload else parameter.device, self.dtype, copy=True
                )
            )
            for name, parameter in self._parameters.items()
            if name in names
        }

    def begin_exchange(self, fragment: Fragment) -> list[bool]:
        """Flags of :meth:`trained`, at the beginning of an exchange of ``fragment``."""
        trained = self.trained()
        self._trained -= {
            part.name for parameter, _, part in fragment.rows() if not parameter.requires_grad
        }
        return trained

    def mark_trained(self, flags: Sequence[bool]) -> None:
        """Note again what :meth:`trained` has returned: its exchange has failed."""
        self._trained |= {name for name, flag in zip(self._parameters, flags, strict=True) if flag}

    def agree(self) -> list[str]:
        """Exchange from now on what any worker trains. Collective, while nothing is under way.

        Returns:
            What a worker has trained since its last exchange.
        """
        network = self._reducer.network
        counts = torch.tensor(self.trained(), dtype=torch.int32, device=network.device)
        network.control.all_reduce(counts).wait()
        trained = counts.bool().tolist()
        self.follow(trained)
        return [name for name, of_any in zip(self._parameters, trained, strict=True) if of_any]

    def follow(self, trained: Sequence[bool], sent: Fragment | None = None) -> None:
        """Exchange from now on what any worker trains. Collective.

        Args:
            trained: which parameters of the model a worker has trained; equal on all workers.
            sent: which of them were exchanged since; what nobody had trained there is left out.
        """
        used = {name for name, flag in zip(self._parameters, trained, strict=True) if flag}
        idle = set() if sent is None else {part.name for part in sent.slices} - used
        before = self.names
        names = (before - idle) | used
        if names == before or not names:  # an optimizer of nothing cannot be made
            return
        among = self._shard_network or self._reducer.network
        joined = {}
        for name, parameter in self._parameters.items():
            if name in names - before:  # all begin alike, also where one has changed its own
                own = self.tensors.get(name, parameter).detach()
                joined[name] = own_part(own).to(among.device, self.dtype, copy=True)
        replicate(joined, among.data)  # before anything is changed: it may fail
        self._use(names)
        for name, value in joined.items():
            self.tensors[name].data.copy_(value)

    def _use(self, names: Collection[str]) -> None:
        """Exchange these parameters from now on; the outer optimizer keeps its state of them."""
        joined = [name for name in self._parameters if name in {*names} - self.names]
        self._cut(names)
        if joined:
            self._reducer.reserve(self.fragment_of(joined).slices, self.dtype)
        before, scheduler = self.optimizer, self.scheduler
        self.optimizer, self.scheduler = self._outer()
        groups, held = self.optimizer.param_groups, before.param_groups
        if len(groups) == len(held):  # the user's may depend on the parameters
            for group, old in zip(groups, held, strict=True):
                group.update({key: value for key, value in old.items() if key != "params"})
        for anchor in (anchor for fragment in self.fragments for anchor in fragment.anchors):
            if anchor in before.state:
                self.optimizer.state[anchor] = before.state[anchor]
        if self.scheduler is not None and scheduler is not None:
            self.scheduler.load_state_dict(scheduler.state_dict())

    def _cut(self, names: Collection[str]) -> None:
        self._hold({*names, *(self._trained & self.tensors.keys())})
        self.fragments = cut(
            {name: parameter for name, parameter in self._parameters.items() if name in names},
            self.tensors,
            self._settings.fragments,
        )

    def _outer(self) -> tuple[Optimizer, LRScheduler | None]:
        """The optimizer of the anchors in fragments, and the scheduler of its learning rate."""
        optimizer = self._make_optimizer(
            [a for fragment in self.fragments for a in fragment.anchors]
        )
        make = self._make_scheduler
        scheduler = make(optimizer) if callable(make) else make
        require_scheduler(scheduler, outer=optimizer)
        return optimizer, scheduler

    def restart(self, names: AbstractSet[str], *, trained: Collection[str]) -> None:
        """Exchange the parameters of a state that is loaded; :meth:`look` adds those it lacks.

        Args:
            trained: those that a worker had trained since their last exchange.

        Raises:
            ValueError: it is the state of another model.
        """
        if unknown := sorted(names - self._parameters.keys()):
            raise ValueError(
                "The state must be of parameters of this model, got that of "
                f"{', '.join(unknown[:3])}; use the model that it was saved with"
            )
        self._flags, self._trained = [], set(trained)
        if names != self.names or names != self.tensors.keys():
            self.tensors = {}
            self._use(names)

    def fragment_of(self, names: Sequence[str]) -> Fragment:
        """Parameters that are in one exchange."""
        return fragment_of({name: self._parameters[name] for name in names}, self.tensors)

    @property
    def names(self) -> set[str]:
        """Parameters that are exchanged."""
        return {part.name for fragment in self.fragments for part in fragment.slices}

    @property
    def last(self) -> int:
        """Number of the fragment with which a window ends."""
        return max(number for number, fragment in enumerate(self.fragments) if fragment.slices)

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each trained parameter with its anchor."""
        for name, anchor in self.tensors.items():
            yield self._parameters[name], anchor

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by name."""
        return {name: self._parameters[name] for name in self.tensors}

    def state_dict_of(self, module: nn.Module) -> dict[str, Any]:
        """The module's ``state_dict`` with the anchor in the place of trained parameters."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        state = {}
        for key, value in module.state_dict(keep_vars=True).items():
            name = names.get(id(value))
            if name is None:
                state[key] = value.detach() if isinstance(value, Tensor) else value
                continue
            state[key] = torch.empty_like(value, requires_grad=False)
            own_part(state[key]).copy_(self.tensors[name].detach())
        return state

    def from_weights(self) -> None:
        """Let the anchor be the model's weights, which must be equal on all ranks."""
        for parameter, anchor in self.pairs():
            anchor.data.copy_(own_part(parameter))
