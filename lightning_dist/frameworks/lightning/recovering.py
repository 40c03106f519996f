"""A strategy whose ranks may be lost, and whose process group is made anew without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART, is_of_a_peer
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.groups import init_alone
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.frameworks.lightning.launcher import MembersEnvironment
from lightning_dist.ranks.membership import Membership
from lightning_dist.settings.run import RecoveryMode

_T = TypeVar("_T")


def meet(strategy: Any, body: Callable[[], _T]) -> _T:
    """Result of a collective ``body``; see :meth:`RecoversInProcess.meet`."""
    return strategy.meet(body) if isinstance(strategy, RecoversInProcess) else body()


class RecoversInProcess:
    """Mixin before a ``DDPStrategy`` of Lightning's, which takes part in generations of workers.

    Workers that are there at the start are in the first generation from the set-up of the process
    group on. One that comes later sets up a Trainer alone, as a rank that is not the leader, until
    its ElasticRestart meets the others.
    """

    recovery: RecoveryMode = "restart"
    """The user's setting."""
    mirror_every: int | None = None
    """As of :class:`.StepRecovery`."""
    generations: Generations | None = None
    """None where lost ranks mean a restart of all."""
    members: Membership | None = None
    """Of the first generation; None in a worker that has come later."""
    complete_step: Callable[[Callable[[], Any]], Any] | None = None
    """Computes a closure of an optimizer until its gradients were exchanged."""
    together: Callable[..., Any] | None = None
    """Computes a collective until all ranks have its result; see :meth:`.Sections.run`."""
    _groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    _is_apart = False
    _leader = 0

    if TYPE_CHECKING:
        cluster_environment: Any
        model: Any

        def set_world_ranks(self) -> None: ...

    def begin_recovery(self, environment: RecoveryEnvironment) -> None:
        """Make the process group: of all that are there at the start, or of this process alone."""
        if dist.is_initialized():
            raise ValueError(
                "recovery='in_process' creates the process group itself, and one exists already; "
                "leave out init_process_group, and call fit() once per process"
            )
        self.generations = generations = Generations(environment)
        self.cluster_environment = MembersEnvironment()
        if generations.finds_others():
            init_alone()
            self.cluster_environment.is_apart = self._is_apart = True
            return
        generation = generations.announce("")
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
    def joins(self) -> bool:
        """Whether this worker has come later, and has not met the others."""
        return self._is_apart

    def become(self, members: Membership) -> None:
        """Be a rank of ``members``."""
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

    def meet(self, body: Callable[[], _T], *, instead: Callable[[], _T] | None = None) -> _T:
        """Result of a collective ``body``, among those who are left where a rank is lost.

        Args:
            instead: result in a step that is taken again anyway.
        """
        if self.together is None:
            return body()
        found: _T = self.together(body, instead=instead)
        return found

    # What Lightning asks of all ranks, by the rank that it knows.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.generations is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return kwargs
        count = dist.get_world_size()
        return {"num_replicas": count, "rank": self.cluster_environment.global_rank() % count}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_apart:
            usual = super().barrier  # type: ignore[misc]
            self.meet(lambda: usual(*args, **kwargs), instead=lambda: None)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        if self._is_apart:
            return obj
        usual = super().broadcast  # type: ignore[misc]

        def broadcast() -> _T:
            if self.generations is None:
                return usual(obj, src)  # type: ignore[no-any-return]
            return usual(obj, (src + self._leader) % dist.get_world_size())  # type: ignore[no-any-return]

        return self.meet(broadcast, instead=lambda: obj)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._is_apart:
            return tensor
        usual = super().reduce  # type: ignore[misc]
        if self.together is None or group is not None or not isinstance(tensor, Tensor):
            return usual(tensor, group, reduce_op)
        # In place: a try that has failed must leave nothing.
        return self.meet(lambda: usual(tensor.clone(), None, reduce_op), instead=lambda: tensor)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._is_apart:
            return tensor.unsqueeze(0)
        usual = super().all_gather  # type: ignore[misc]
        if group is not None:
            return usual(tensor, group, sync_grads)  # type: ignore[no-any-return]
        found: Tensor = self.meet(
            lambda: usual(tensor, None, sync_grads),
            instead=lambda: torch.stack([tensor] * dist.get_world_size()),
        )
        return found

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        complete = self.complete_step
        if complete is not None:
            usual = closure

            def closure() -> Any:
                return complete(usual)

        return super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        generations = self.generations
        if generations is None or not isinstance(exception, RuntimeError):
            return
        if generations.is_broken or is_of_a_peer(exception):
            generations.break_off(str(exception))
            generations.end(
                "a rank was lost outside training steps and validation, in a collective that "
                "cannot be repeated; use those of trainer.strategy, and validate between two "
                f"optimizer steps: {str(exception)[:200]}",
                code=EXIT_RESTART,
            )
