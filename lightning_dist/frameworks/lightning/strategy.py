"""``Trainer(strategy="compressed_ddp")``: DDP with compressed gradients, and without lost ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.elastic.recovery.regroup import settings_to_recover
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.base import BeforeSetup
from lightning_dist.frameworks.lightning.ddp import SyncDDPStrategy
from lightning_dist.frameworks.lightning.launcher import MembersEnvironment
from lightning_dist.ranks.agreement import Membership
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.run import RecoveryMode, RecoverySettings
from lightning_dist.sync.base import Sync
from lightning_dist.sync.ddp import GradientSync

_T = TypeVar("_T")


class CompressedDDPStrategy(SyncDDPStrategy):
    """DDP with compressed gradients, on every device and backend that DDP supports.

    Arguments: those of ``compress_ddp``, and everything ``DDPStrategy`` takes.

    Checkpoints hold the residuals of all ranks under ``"lightning_dist"``. They load under plain
    ``ddp``, and checkpoints of ``ddp`` load here.

    With ``recovery="in_process"`` it takes part in generations of workers. Workers that are there
    at the start are in the first one from the set-up of the process group on. One that comes later
    sets up a Trainer alone, as a rank that is not the leader, until its ElasticRestart meets the
    others.
    """

    sync: GradientSync | None = None
    recovery: RecoveryMode = "restart"
    """The user's setting."""
    mirror_every: int | None = None
    """As of :class:`.StepRecovery`."""
    generations: Generations | None = None
    """None where lost ranks mean a restart of all."""
    members: Membership | None = None
    """Members of the first generation; None in a worker that has come later."""
    complete_step: Callable[[Callable[[], Any]], Any] | None = None
    """Computes a closure of an optimizer until its gradients were exchanged."""
    _is_apart = False

    @override
    def kind_of_sync(self) -> type[Sync]:
        return GradientSync

    @override
    def _recoverable(
        self, settings: ExchangeSettings, recovering: RecoverySettings
    ) -> ExchangeSettings:
        self.recovery, self.mirror_every = recovering.recovery, recovering.mirror_every
        return settings_to_recover(settings, recovering)

    @override
    def setup_distributed(self) -> None:
        if self.recovery == "in_process" and self._fits:
            self._begin_recovery()
        super().setup_distributed()

    @property
    def _fits(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == "fit"

    def _begin_recovery(self) -> None:
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        callbacks = (
            callback for callback in trainer.callbacks if isinstance(callback, BeforeSetup)
        )
        if trainer.fast_dev_run or not any(callback.reshards_data for callback in callbacks):
            raise ValueError(
                "recovery='in_process' needs ElasticRestart(...) among the callbacks, which "
                "reshards the data over the remaining ranks, and a fit without fast_dev_run"
            )
        environment = RecoveryEnvironment.from_env()
        if environment is not None:
            self._join_generation(environment)
            return
        rank_zero.warn(
            "recovery='in_process' takes effect under `lightning-dist launch` only; here all ranks "
            "restart if one is lost"
        )

    def _join_generation(self, environment: RecoveryEnvironment) -> None:
        """Make the process group: of all that are there at the start, or of this process alone."""
        if dist.is_initialized():
            raise ValueError(
                "recovery='in_process' creates the process group itself, and one exists already; "
                "leave out init_process_group, and call fit() once per process"
            )
        backend = self._get_process_group_backend()
        self.generations = generations = Generations(environment, backend=backend)
        self.cluster_environment = environment_of_members = MembersEnvironment()
        if generations.finds_others():
            environment_of_members.is_apart = self._is_apart = True
            return
        generation = generations.announce({})
        if generation.number > 0 and not generation.ends:  # it was made meanwhile, without us
            generations.end("it is not ready for others yet", code=EXIT_EVICTED)
        try:
            members, *groups = generations.enter(generation, has_state=False)
        except RuntimeError as error:
            generations.end(f"a rank was lost at the start: {error}", code=EXIT_RESTART)
        self._groups = (groups[0], groups[1])
        self.members = members
        self.become(members)

    @property
    def ddp(self) -> DistributedDataParallel:
        """The module in DDP, in a fit."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @property
    def joins(self) -> bool:
        """Whether this worker has come later, and has not met the others."""
        return self._is_apart

    def become(self, members: Membership) -> None:
        """Be a rank of ``members``."""
        assert isinstance(self.cluster_environment, MembersEnvironment)
        self._leader = self.cluster_environment.leader = members.ranks.leader
        self.cluster_environment.is_apart = False
        self.set_world_ranks()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, nothing is asked of other ranks: they do not set up a training."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def meets(self) -> None:
        """This worker is one of all from now on."""
        self._is_apart = False

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.joins:  # a newcomer has what regrouping gave it
            DDPStrategy.load_optimizer_state_dict(self, checkpoint)
        else:
            super().load_optimizer_state_dict(checkpoint)

    # What Lightning asks of all ranks, by the rank that it knows.

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.generations is None:
            return super().distributed_sampler_kwargs
        assert self.cluster_environment is not None
        count = dist.get_world_size()
        return {"num_replicas": count, "rank": self.cluster_environment.global_rank() % count}

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_apart:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if self._is_apart:
            return obj
        if self.generations is not None:
            src = (src + self._leader) % dist.get_world_size()
        return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._is_apart else super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._is_apart:
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, group, sync_grads)

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        complete = self.complete_step
        if complete is not None:
            usual = closure

            def closure() -> Any:
                return complete(usual)

        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.generations is not None:
            self.generations.end_if_lost(exception)
