"""A worker whose exchanges may fail: it enters generations, and goes on in their groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.recovery.frameworks import set_framework_rank
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.member import StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Outage, WorkerReport
from lightning_dist.elastic.recovery.regroup import ResidualMirror, from_rank, regroup
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.channel import WaitLimit
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.ddp import describe_parameters


class WorkerRecovery:
    """One worker of a training whose exchanges are those of a reducer.

    Args:
        generations: of this worker.
        module: that is trained.
        reducer: of its exchanges.
        device: of the module.
        steps: number of steps that this worker has taken, of those that all take together.
        script: what the script says of the training; a newcomer must say the same.
        mirror: of the residuals, if they are copied to the next rank.

    Raises:
        ValueError: an exchange that cannot be made again.
    """

    def __init__(
        self,
        generations: Generations,
        module: nn.Module,
        reducer: Reducer,
        *,
        device: torch.device,
        steps: Callable[[], int],
        script: Mapping[str, Any],
        mirror: ResidualMirror | None = None,
    ) -> None:
        self.generations, self.reducer = generations, reducer
        self.outage = Outage()
        self._module, self._device, self._steps = module, device, steps
        self._mirror = mirror
        # Of the begin: layers may be frozen later, and a newcomer is at its begin.
        facts = {**reducer.settings.fingerprint(), **script}
        facts["parameters"] = describe_parameters(module)
        self._facts = {name: repr(value) for name, value in facts.items()}
        reducer.leave_failures_to(self)
        self._arrivals = 0
        self._limit = reducer.network.limit  # of the groups that are being connected
        generations.member.progress = lambda: self._arrivals + reducer.arrivals
        generations.on_broken = self._break
        self._taken_over = ""  # the lost worker whose residuals this rank has
        self._has_state = False
        self._next: Generation | None = None  # made while the reducer's thread has waited
        self._store_lost: StoreLostError | None = None

    # What the reducer asks, on its thread.

    def pauses(self) -> bool:
        """Newcomers wait."""
        return self.generations.member.waiting > 0

    def failed(self, error: RuntimeError) -> None:
        """The exchange of this generation has failed."""
        self.generations.member.abort(str(error))

    def vote_result(self) -> bool | None:
        """Decision of the next generation on the step whose payloads are complete."""
        try:
            self._next = self.generations.member.report(self._report(holds=True, failed=True))
        except StoreLostError as error:
            self._store_lost = error
            return None
        return self._next.finite if self.generations.member.name in self._next.applies else None

    # Steps, on the thread of the training.

    def begin_step(self) -> None:
        """A step begins."""
        self._arrivals += 1

    @property
    def must_repeat(self) -> bool:
        """Whether this step cannot be completed, whatever else of it is computed."""
        return False

    @property
    def is_given_up(self) -> bool:
        """Whether the exchange of this step has failed, and nothing of it is applied."""
        return False

    @property
    def is_broken(self) -> bool:
        """Whether this generation is known to be at its end, because a rank is lost."""
        return (
            self._next is not None
            or self._store_lost is not None
            or self.generations.member.is_broken
            or self.reducer.failure is not None
        )

    @property
    def must_change(self) -> bool:
        """Whether this generation is at its end here."""
        return self.is_broken or self.reducer.answer.pauses

    @property
    def is_behind(self) -> bool:
        """Whether this worker has steps to take alone, which others have taken."""
        return False

    def arrive(self) -> None:
        """This rank waits for others now."""
        self._arrivals += 1

    def synchronize(self) -> None:
        """Do what is left between two steps that needs others. Collective."""
        self.arrive()

    # Generations.

    def begin(self) -> tuple[Generation, Membership]:
        """Wait for the first generation with this worker, and enter it."""
        return self._enter_one_from(self.generations.announce(self._facts))

    def change(self) -> tuple[Generation, Membership]:
        """End this generation here, and enter the next one."""
        if self._store_lost is not None:
            self.generations.end(str(self._store_lost), code=EXIT_RESTART)
        self.outage.begin()
        generation, self._next = self._next, None
        if generation is None:
            failed = self.generations.member.is_broken or self.reducer.failure is not None
            generation = self.generations.after(self._report(failed=failed))
        return self._enter_one_from(generation)

    def _enter_one_from(self, generation: Generation) -> tuple[Generation, Membership]:
        while True:
            try:
                self._arrivals = -self.reducer.arrivals
                members, data, control = self.generations.enter(
                    generation, has_state=self._has_state, failure=self.reducer.failure
                )
                if self.outage.norm is None and self._has_state:
                    self.outage.norm = self.reducer.residual_norm()
                limit = self._limit = WaitLimit(
                    self.reducer.settings.exchange_timeout, on_host=True
                )
                regroup(
                    self.reducer,
                    self.generations.groups,
                    device=self._device,
                    data=data,
                    control=control,
                    limit=limit,
                    begins=generation.source is None,
                    flat=self._mirror is not None,
                )
                self._regrouped()
                set_framework_rank(rank=members.rank, world_size=members.world_size)
                if self._mirror is not None and (taken := self._mirror.regroup(generation.members)):
                    self._taken_over = taken
                return generation, members
            except RuntimeError as error:  # another worker is lost meanwhile
                self.generations.lost(error)
                generation = self.generations.after(self._report(failed=True))

    def _regrouped(self) -> None:
        """The reducer is in the groups of another generation."""

    def transfer_state(
        self, generation: Generation, members: Membership, give: Callable[[], Any]
    ) -> Any:
        """Value of ``give`` on the source of a generation, None where it is known. Collective."""
        if generation.source is None:  # all begin, from the weights of rank 0 as under DDP
            self._module.load_state_dict(from_rank(self._module.state_dict(), rank=0))
            return None
        source = self._source(generation, members)
        if not generation.heals:
            return None
        is_source, rank_of = members.rank == source, generation.members.index
        heals = [*map(rank_of, generation.heals)]
        state = from_rank(give() if is_source else None, rank=source, to=heals)
        return None if is_source else state

    def _source(self, generation: Generation, members: Membership) -> int:
        """Rank whose state others get. Collective."""
        assert generation.source is not None
        return list(generation.members).index(generation.source)

    def shared_state(self) -> dict[str, Any]:
        """State that is equal on all ranks between steps, for a rank that joins them."""
        return self.reducer.shared_state()

    def join(self, shared: Mapping[str, Any]) -> None:
        """Take over :meth:`shared_state` of another rank."""
        self.reducer.join(shared)

    def has_state(self) -> None:
        """This worker is where the training is."""
        self._has_state = True
        if not self.outage.reasons:  # all begin
            self.outage = Outage(self.generations.member.generation.members)
            if self._mirror is not None:  # where the caller has made the first generation
                self._mirror.regroup(self.generations.member.generation.members)

    @property
    def facts(self) -> tuple[float | None, str, bool]:
        """Facts of this rank for :meth:`.Outage.enter`."""
        return self.outage.norm, self._taken_over, self.outage.is_redone

    def _report(self, *, failed: bool, holds: bool = False) -> WorkerReport:
        failure = self.reducer.failure
        return WorkerReport(
            self.generations.member.name,
            generation=self.generations.member.generation.number,
            step=self._steps() if self._has_state else -1,
            holds=holds,
            finite=self.reducer.answer.finite,
            failed=failed,
            reason="" if failure is None else str(failure)[:300],
            facts=self._facts,
        )

    def _break(self) -> None:
        self.outage.begin()
        for limit in (self.reducer.network.limit, self._limit):
            limit.give_up()

    def close(self) -> None:
        """The training is over; this worker beats until its process ends."""
