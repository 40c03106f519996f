"""Local steps whose exchange is made again where a worker is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.protocol import Generation
from lightning_dist.elastic.recovery.regroup import require_no_names_of_ranks, require_passes
from lightning_dist.elastic.recovery.worker import WorkerRecovery
from lightning_dist.ranks.agreement import Membership
from lightning_dist.sync.local.outer_steps import LocalUpdates, NotAppliedError


class LocalStepRecovery(WorkerRecovery):
    """One worker of a training in local steps.

    When another is lost those that are left keep their weights, and the next outer step is the mean
    of theirs; one that has failed is taken again. What the lost one has changed since the last
    outer step is gone. Workers may differ by two steps then: those that are behind take these
    alone, so that no sample of theirs is lost and schedulers stay equal.

    Workers that join begin from the anchor. They have the rest of the state, such as moments of
    optimizers, from a worker that is not behind, and no part in means before their first step.

    Args:
        generations: of this worker.
        updates: of the model.
        steps: optimizer steps so far.
        script: what the script says of the training; a newcomer must say the same.

    Raises:
        ValueError: exchanges that cannot be made again.
    """

    def __init__(
        self,
        generations: Generations,
        updates: LocalUpdates,
        *,
        steps: Callable[[], int],
        script: Mapping[str, Any],
    ) -> None:
        require_recoverable_updates(updates)
        reducer = updates.reducer
        super().__init__(
            generations,
            updates.module,
            reducer,
            device=reducer.network.device,
            steps=lambda: reducer.step,
            script={**script, **updates.settings.outer},
        )
        self._updates, self._taken = updates, steps
        self._farthest = 0  # step of the worker that was
        self._meets: Membership | None = None  # members some of whom were behind

    @property
    @override
    def is_behind(self) -> bool:
        return self._taken() < self._farthest

    @override
    def begin_step(self) -> None:
        if not self.is_behind:  # the others did so in the generation before
            super().begin_step()

    @override
    def synchronize(self) -> None:
        """Take an outer step that has failed, and wait for those that were behind.

        If the generation ended before, they would still have the shards of the one before, and the
        others have used some of theirs.
        """
        super().synchronize()
        try:
            self._updates.exchange_again()
        except NotAppliedError as error:
            self.generations.end(str(error), code=EXIT_RESTART)
        if self._meets is not None and not self.must_change:
            self._meets.ranks.gather(None)
            self._meets = None

    @override
    def transfer_state(
        self, generation: Generation, members: Membership, give: Callable[[], Any]
    ) -> Any:
        state = super().transfer_state(generation, members, give)
        if generation.source is None:
            self._updates.anchor_from_weights()
        return state

    @override
    def _source(self, generation: Generation, members: Membership) -> int:
        taken = members.ranks.gather(self._taken() if self._has_state else None)
        known = [steps for steps in taken if steps is not None]
        self._farthest = max(known)
        self._meets = members if min(known) < self._farthest else None
        return taken.index(self._farthest)

    @override
    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "updates": self._updates.state_for_newcomer()}

    @override
    def join(self, shared: Mapping[str, Any]) -> None:
        super().join(shared)
        self._updates.join(shared["updates"])


def require_recoverable_updates(updates: LocalUpdates) -> None:
    """Raise ValueError unless an outer step of ``updates`` can be taken without a lost worker."""
    settings, device = updates.settings, updates.reducer.network.device
    if device.type != "cpu":
        raise ValueError(
            f"recovery='in_process' of local steps is for models on the CPU, got one on {device}; "
            "use recovery='restart'"
        )
    if settings.overlap_steps or settings.ddp_steps:
        named = "overlap_steps" if settings.overlap_steps else "ddp_steps"
        raise ValueError(
            "recovery='in_process' takes an outer step again that has failed, and neither an "
            "exchange over which workers go on nor a step of plain DDP can be, got "
            f"{named}={getattr(settings, named)}; set it to 0, or use recovery='restart'"
        )
    if updates.is_in_ddp or updates.shards is not None:
        raise ValueError(
            "recovery='in_process' of local steps needs a model that each rank has as a whole, and "
            "not in DistributedDataParallel, which communicates in its forward pass; give "
            "local_updates() the model itself, or use recovery='restart'"
        )
    require_passes(updates.module)
    require_no_names_of_ranks(settings)
