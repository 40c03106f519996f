"""A model that is trained in local steps, its anchor, and the state of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dist.base.private import name_before_compile
from lightning_dist.exchange.rounds import replicate
from lightning_dist.ranks.facts import Read, Spread, gather, run_of
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.state import require_mapping
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.sync.effect import require_effect
from lightning_dist.sync.fsdp.checks import reshard
from lightning_dist.sync.fsdp.replicas import local_of
from lightning_dist.sync.local.anchor import Anchor, own_part
from lightning_dist.sync.local.pseudo_gradients import PseudoGradients
from lightning_dist.sync.local.worker_shards import WorkerShards, own_shards, spread_shards

STATE_VERSION = 2


def require_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError for the state of outer steps that another version has saved."""
    if state["version"] != STATE_VERSION:
        raise ValueError(
            f"The state must be of version {STATE_VERSION}, got {state['version']!r}; resume "
            "with the release of lightning_dist that has saved it"
        )


class AnchoredModel:
    """A model on one of several workers, and its trained parameters as all workers know them.

    Args:
        module: of this worker.
        settings: of the outer steps.
        network: of all ranks.
        synced: the model in a DDP over all ranks, for ``ddp_steps``.
        ranks_per_worker: ranks of this rank's worker.
        shards: of this rank's worker, where the model is sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: LocalUpdateSettings,
        *,
        network: Network,
        synced: DistributedDataParallel | None = None,
        ranks_per_worker: int = 1,
        shards: WorkerShards | None = None,
    ) -> None:
        self.settings, self.module, self._synced = settings, module, synced
        self.shards = shards
        """Shards of this rank's worker; None where the model is not sharded."""
        named = {name_before_compile(name): p for name, p in module.named_parameters()}
        self.reducer = Reducer(
            {p: name for name, p in named.items()},
            settings=settings,
            network=network,
            sharded=shards is not None,
            in_order=shards is not None,  # FSDP launches collectives of its own
        )
        require_effect(
            settings, self.reducer.names, says=network.rank == 0 and network.world_size > 1
        )
        for name, tensor in {**named, **self.buffers()}.items():
            is_shard = isinstance(tensor, DTensor)
            among = shards.between if shards is not None and is_shard else network
            replicate({name: local_of(tensor.detach())}, among.data)
        self.anchor = Anchor(
            named,
            settings,
            reducer=self.reducer,
            among=None if shards is None else shards.between,
        )
        """Trained parameters as all workers know them."""
        self._gradients = PseudoGradients(
            self.anchor,
            self.reducer,
            weigh_by=settings.weigh_by,
            ranks_per_worker=ranks_per_worker,
            shards=shards,
        )
        self.attempted = 0
        """Optimizer steps that were attempted so far."""
        self._due: int | None = None  # fragment whose exchange has failed
        self._set_aside: dict[str, Tensor] | None = None  # own weights, while the anchor's are used

    @property
    def outer_optimizer(self) -> Optimizer:
        """Moves the anchor; another one when other parameters are trained."""
        return self.anchor.optimizer

    @property
    def outer_scheduler(self) -> LRScheduler | None:
        """Scheduler of its learning rate; None: constant."""
        return self.anchor.scheduler

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Parameters that local steps change, by name."""
        return self.anchor.parameters

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent, as of ``Reducer.comm_stats``; a step is one fragment's exchange."""
        return self.reducer.comm_stats()

    def close(self) -> None:
        """Exchange nothing more."""
        self.reducer.close()

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The anchor's weights in the model, equal on all ranks, for an evaluation.

        Buffers stay the worker's own; running statistics were averaged at the last outer step.
        """
        # They are there, as in a validation that saves, or before the first local step.
        if self._set_aside is not None or self._is_ddp:
            yield
            return
        self._set_aside = self.worker_weights()
        self.start_from_anchor()
        try:
            yield
        finally:
            weights, self._set_aside = self._set_aside, None
            self.load_worker(weights, {})

    def worker_weights(self) -> dict[str, Tensor]:
        """This worker's own trained parameters by name, also inside :meth:`anchor_weights`.

        Of a sharded model the shards of this rank.
        """
        if self._set_aside is not None:
            return self._set_aside
        return {name: p.detach().clone() for name, p in self.trained.items()}

    def buffers(self) -> dict[str, Tensor]:
        """This worker's own buffers by name."""
        return {name_before_compile(n): buffer for n, buffer in self.module.named_buffers()}

    def anchor_state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict`` with the anchor in the place of trained parameters."""
        self._follow_ddp()
        return self.anchor.state_dict_of(self.module)

    @torch.no_grad()
    def load_worker(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Give this worker its own weights and buffers of before.

        Of a sharded model those of this rank.
        """
        held = self.buffers()
        reshard(self.module)
        for name, value in weights.items():
            local_of(self.trained[name].detach()).copy_(local_of(value))
        for name, value in buffers.items():
            held[name_before_compile(name)].copy_(value)

    def start_from_anchor(self) -> None:
        """Give this worker the anchor's weights."""
        reshard(self.module)
        for parameter, anchor in self.anchor.pairs():
            take_anchor(parameter, anchor)

    def anchor_from_weights(self) -> None:
        """Let the anchor be the model's weights, which must be equal on all ranks."""
        self.anchor.from_weights()

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is the model that is trained, in DDP or not."""
        return getattr(module, "module", module) is self.module or module is self.module

    @property
    def _is_ddp(self) -> bool:
        """True while plain DDP keeps the models of all ranks equal: they are the anchor."""
        return self.attempted < self.settings.ddp_steps

    def _follow_ddp(self) -> None:
        """Let the anchor be what plain DDP has made of the model, while it does."""
        if self._is_ddp:
            self.anchor.from_weights()

    @torch.no_grad()
    def _differs_from_anchor(self) -> bool:
        """True if the weights of this rank differ from the anchor."""
        return not self._is_ddp and any(
            not torch.equal(own_part(p).to(anchor.dtype), anchor.to(p.device))
            for p, anchor in self.anchor.pairs()
        )

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State that the workers share, and residuals, on rank ``to``; None elsewhere. Collective.

        Parameters and optimizers differ between workers inside a window: each saves its own. Of a
        sharded model the state has whole parameters, and any number of shards loads it.
        """
        network = self.reducer.network
        is_here = network.rank == to
        state, spreads = self.spread_state_dict(device="cpu" if is_here else "meta")
        gather(spreads, network.state, device=network.device, to=to)
        return state if is_here else None

    def spread_state_dict(self, *, device: str = "cpu") -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with residuals and shards left there. Collective.

        They are empty memory in the state; the spreads say which part of each this rank has.
        """
        state = self._shared_state()
        state["residuals"], spreads = self.reducer.spread_state_dict(device=device)
        if self.shards is not None:
            state, of_shards = spread_shards(state, self.anchor, self.shards, device=device)
            spreads = [*spreads, *of_shards]
        return state, spreads

    def _shared_state(self) -> dict[str, Any]:
        """All of the state but residuals. Collective."""
        exchange, trained = self._gradients.state_dict(), self.anchor.agree()
        self._follow_ddp()
        return {**self._outer_state(), "trained": trained, **exchange}

    def _outer_state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "attempted": self.attempted,
            "anchor": {
                name: anchor.detach().cpu().clone() for name, anchor in self.anchor.tensors.items()
            },
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "outer_schedule": self.outer_scheduler and self.outer_scheduler.state_dict(),
        }

    def state_for_newcomer(self) -> dict[str, Any]:
        """State that the workers share, for one that joins them; not collective.

        Residuals are those of :meth:`.Reducer.shared_state`.
        """
        state, exchange = self._outer_state(), self._gradients.state_for_newcomer()
        # Not what is trained since the last exchange only: the outer optimizer does not have it.
        state["anchor"] = {k: v for k, v in state["anchor"].items() if k in self.anchor.names}
        return {**state, "trained": [], **exchange, "due": self._due}

    def join(self, state: Mapping[str, Any]) -> None:
        """Begin as a worker of a training whose :meth:`state_for_newcomer` this is."""
        self.anchor.restart(state["anchor"].keys(), trained=())
        self._load_shared(state)
        self._due, self._gradients.is_new = state["due"], True
        self.start_from_anchor()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank. Collective.

        Load the worker's own parameters and optimizer first; a new worker, which has none, calls
        :meth:`start_from_anchor` afterwards. With another number of workers each has the mean
        residual.

        Raises:
            ValueError: the state is of another version or model.
        """
        require_mapping(state)
        self.load_own_state(self.own_state(state))

    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> Mapping[str, Any]:
        """Part of :meth:`state_dict` for this rank, whose parameters are trained from now on.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.

        Raises:
            ValueError: the state is of another version or model.
        """
        require_version(state)
        self.anchor.restart(state["anchor"].keys(), trained=state["trained"])
        if self.shards is None:
            return state
        return own_shards(state, self.anchor, network=self.reducer.network, read=read)

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`own_state`. Collective."""
        self._load_shared(state)
        self.reducer.load_state_dict(state["residuals"])
        if self._synced is not None:
            self._synced.require_backward_grad_sync = self._is_ddp

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, anchor in self.anchor.tensors.items():
                anchor.copy_(state["anchor"][name])
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        if self.outer_scheduler and state.get("outer_schedule"):
            self.outer_scheduler.load_state_dict(state["outer_schedule"])
        self.attempted = int(state["attempted"])
        self._gradients.load_state_dict(state)


@torch.no_grad()
def take_anchor(parameter: Tensor, anchor: Tensor, *, keep: float = 0.0) -> None:
    """Give a worker's parameter the anchor's weights, mixed with ``keep`` of its own."""
    own = own_part(parameter)
    if not keep:
        own.copy_(anchor)
        return
    there = anchor.to(own.device)
    mixed = torch.lerp(there, own.to(anchor.dtype), keep)
    own.copy_(torch.where(mixed.isfinite(), mixed, there))
