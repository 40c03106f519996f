"""Work of all ranks between two steps, in a loop of the user's own and under a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_dist.elastic.data.plan import lr_factor
from lightning_dist.elastic.progress import ElasticState, scale_learning_rates
from lightning_dist.elastic.recovery.protocol import Generation, Outage, leader_of
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.elastic.recovery.worker import WorkerRecovery
from lightning_dist.elastic.session import ElasticSession, TrainingLoop
from lightning_dist.ranks.agreement import Membership


class RecoverableLoop(TrainingLoop):
    """A session whose ranks may be lost: what all ranks do between two steps, until they can."""

    session: ElasticSession
    _has_old_shards = False  # of an earlier generation, until this rank is as far as the others
    recovery: WorkerRecovery | None = None
    """None where lost ranks mean a restart of all."""

    # What a Trainer and a loop of the user's own do differently.

    def export_state(self) -> Any:
        """All states that a worker needs to be where this one is, beside :meth:`here`."""
        raise NotImplementedError

    def import_state(self, handed: Any, state: ElasticState, members: Membership) -> None:
        """Be where the member is whose :meth:`export_state` and :meth:`here` these are."""
        raise NotImplementedError

    def resume(self, state: ElasticState, *, is_new: bool) -> None:
        """Shard what is left, from ``state`` on, over the present members; no collective."""
        raise NotImplementedError

    def rates(self) -> tuple[Sequence[Optimizer], Sequence[Any]]:
        """Optimizers and schedulers."""
        raise NotImplementedError

    # What is the same for both.

    def here(self) -> ElasticState:
        """State of this rank, see :meth:`.ElasticSession.here`."""
        return self.session.here()

    def close_step(self) -> None:
        """:meth:`.ElasticSession.close_step` at the position of this rank."""
        position = self.position
        if position.samples or position.epoch:
            self.session.close_step(None if position.samples else position.epoch - 1)

    def take_again(self, *, has_computed: bool = True) -> None:
        """This step cannot be completed: go on with those who are left, from its begin.

        Args:
            has_computed: something of it was computed here.
        """
        assert isinstance(self.recovery, StepRecovery)
        self.recovery.undo()
        self.recovery.outage.is_redone |= has_computed
        self.sync_point()

    def sync_point(self) -> None:
        """Between steps: what all ranks do there, with those who are left where some are lost."""
        recovery = self.recovery
        if recovery is None:
            self.close_step()
            return
        while True:
            try:
                if recovery.must_change:
                    self.enter(*recovery.change())
                if recovery.is_behind:  # its next step needs nobody
                    self.report_outage(recovery)
                    return
                if self._has_old_shards:
                    self._go_on(self.here(), is_new=False)
                recovery.synchronize()
                if recovery.must_change:  # what it has exchanged may end this generation
                    continue
                self.close_step()
                break
            except RuntimeError as error:
                recovery.generations.lost(error)
        self.report_outage(recovery)
        self.begin_step(recovery)

    def report_outage(self, recovery: WorkerRecovery) -> None:
        """Report the generations since the last call, if there were any."""
        if recovery.outage.reasons:
            generation = recovery.generations.member.generation
            report = recovery.outage.report(generation, step=self.steps)
            recovery.outage = Outage(generation.members)
            recovery.reducer.notify_regrouped(generation.number, reason=report.reason)
            self.session.report_outage(report)

    def begin_step(self, recovery: WorkerRecovery) -> None:
        """Remember what a step changes before it is applied."""
        recovery.begin_step()

    def enter(self, generation: Generation, members: Membership) -> None:
        """Go on as a member of ``generation``; collective among them."""
        recovery = self.recovery
        assert recovery is not None
        handed = recovery.transfer_state(generation, members, self._handover)
        members.ranks.leader = leader_of(generation)
        if handed is not None:
            self.import_state(handed["states"], handed["here"], members)
            recovery.join(handed["shared"])
        self.session.move(self, members, facts=None if handed is None else handed["session"])
        state: ElasticState = self.here() if handed is None else handed["here"]
        self._has_old_shards = recovery.is_behind
        if not self._has_old_shards:
            self._go_on(state, is_new=handed is not None)
        recovery.outage.enter(generation, members.ranks.gather(recovery.facts))
        if handed is not None:
            recovery.has_state()

    def _go_on(self, state: ElasticState, *, is_new: bool) -> None:
        """Take the shards of the present members from ``state`` on; no collective."""
        self._has_old_shards = False
        self.resume(state, is_new=is_new)
        before, (_, now) = state.layout, self.data.layouts
        factor = lr_factor(self.session.settings.batch_policy, before=before, now=now)
        optimizers, schedulers = self.rates()
        scale_learning_rates(optimizers, schedulers, factor=factor)

    def _handover(self) -> dict[str, Any]:
        assert self.recovery is not None
        return {
            "states": self.export_state(),
            "shared": self.recovery.shared_state(),
            "session": self.session.facts(),
            "here": self.here(),
        }
