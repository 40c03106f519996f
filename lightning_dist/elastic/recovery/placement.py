"""Session of a training whose ranks may be lost: what all ranks do between two steps.

The same for a loop of the user's own and for a Trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_dist.elastic.data.plan import lr_factor
from lightning_dist.elastic.progress import ElasticState, scale_learning_rates
from lightning_dist.elastic.recovery.change import Pause
from lightning_dist.elastic.recovery.protocol import Generation, leader_of
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.elastic.session import Placement, Session
from lightning_dist.ranks.membership import Membership


class RecoverablePlacement(Placement):
    """A session whose ranks may be lost: what all ranks do between two steps, until they can."""

    session: Session
    recovery: StepRecovery | None = None
    """None where lost ranks mean a restart of all."""

    # What a Trainer and a loop of the user's own do differently.

    def handed_over(self) -> Any:
        """All states that a worker needs to be where this one is, beside :meth:`here`."""
        raise NotImplementedError

    def take_over(self, handed: Any, state: ElasticState, members: Membership) -> None:
        """Be where the member is whose :meth:`handed_over` and :meth:`here` these are."""
        raise NotImplementedError

    def go_on(self, state: ElasticState, *, is_new: bool) -> None:
        """Deal what is left, from ``state`` on, to the present members; no collective."""
        raise NotImplementedError

    def rates(self) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        """Optimizers and schedulers."""
        raise NotImplementedError

    # What is the same for both.

    def here(self) -> ElasticState:
        """State of this rank, see :meth:`.Session.here`."""
        return self.session.here()

    def close_step(self) -> None:
        """:meth:`.Session.close_step` at the position of this rank."""
        position = self.position
        if position.samples or position.epoch:
            self.session.close_step(None if position.samples else position.epoch - 1)

    def complete(self) -> None:
        """:meth:`.Session.complete`, with those who are left where some are lost."""
        while True:
            try:
                self.session.complete()
                return
            except RuntimeError as error:
                if self.recovery is None:
                    raise
                self.recovery.generations.lost(error)
                self.settle()

    def take_again(self, *, has_computed: bool = True) -> None:
        """This step cannot be completed: go on with those who are left, from its begin.

        Args:
            has_computed: something of it was computed here.
        """
        assert self.recovery is not None
        self.recovery.undo()
        self.recovery.pause.is_redone |= has_computed
        self.settle()

    def settle(self) -> None:
        """Between steps: what all ranks do there, with those who are left where some are lost."""
        recovery = self.recovery
        if recovery is None:
            self.close_step()
            return
        while True:
            try:
                if recovery.must_change:
                    self.enter(*recovery.change())
                recovery.level()
                self.close_step()
                break
            except RuntimeError as error:
                recovery.generations.lost(error)
        self.report_change(recovery)
        self.begin_step(recovery)

    def report_change(self, recovery: StepRecovery) -> None:
        """Report the generations since the last call, if there were any."""
        if recovery.pause.reasons:
            generation = recovery.generations.now
            change = recovery.pause.change(generation, step=self.steps)
            recovery.pause = Pause(generation.members)
            recovery.reducer.notify_regrouped(generation.number, reason=change.reason)
            self.session.change(change)

    def begin_step(self, recovery: StepRecovery) -> None:
        """Remember what a step changes before it is committed."""
        recovery.begin_step()

    def enter(self, generation: Generation, members: Membership) -> None:
        """Go on as a member of ``generation``; collective among them."""
        recovery = self.recovery
        assert recovery is not None
        handed = recovery.handed_over(generation, self._handover)
        members.ranks.leader = leader_of(generation)
        if handed is not None:
            self.take_over(handed["states"], handed["here"], members)
            recovery.reducer.join(handed["reducer"])
        self.session.move(self, members, facts=None if handed is None else handed["session"])
        state: ElasticState = self.here() if handed is None else handed["here"]
        self.go_on(state, is_new=handed is not None)
        before, (_, now) = state.layout, self.data.layouts
        factor = lr_factor(self.session.settings.batch_policy, before=before, now=now)
        optimizers, schedulers = self.rates()
        scale_learning_rates(optimizers, schedulers, factor=factor)
        recovery.pause.enter(generation, members.ranks.gather(recovery.facts))
        if handed is not None:
            recovery.has_state()

    def _handover(self) -> dict[str, Any]:
        assert self.recovery is not None
        return {
            "states": self.handed_over(),
            "reducer": self.recovery.reducer.shared_state(),
            "session": self.session.facts(),
            "here": self.here(),
        }
