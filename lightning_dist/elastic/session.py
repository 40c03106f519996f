"""One process of a run: it opens its folder, loads, saves, stops with all others, and completes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_dist.base.features import RESTART
from lightning_dist.checkpoint.checkpointer import Metrics
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.elastic.data.plan import Layout, Position, lr_factor
from lightning_dist.elastic.data.sharding import DataShards
from lightning_dist.elastic.history import FINISHED, RunHistory, cost_line, start_line
from lightning_dist.elastic.process.lifecycle import Ended, ProcessLifecycle, stop_line
from lightning_dist.elastic.process.outcome import Outcome, forget_outcome
from lightning_dist.elastic.progress import ElasticState, scale_learning_rates
from lightning_dist.elastic.recovery.protocol import OutageReport
from lightning_dist.elastic.retention import Retention
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.failures import is_of_collective, is_of_loader
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.run import RunSettings

_TO_EXIT = 10.0
"""Seconds for a process whose grace period is over."""


class TrainingLoop:
    """Operations that a session leaves to a Trainer or a loop, and its position in the data."""

    data: DataShards
    stopped: type[SystemExit] = Ended
    """Exception that ends this process where all ranks stop, with its exit code."""

    @property
    def position(self) -> Position:
        """Position of the last optimizer step."""
        raise NotImplementedError

    @property
    def total_samples(self) -> int:
        """Samples that optimizer steps have used, of all epochs."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Optimizer steps so far, of all starts."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Epochs so far, for the names of checkpoints."""
        raise NotImplementedError

    def write(self, path: str) -> None:
        """Hand the state of the training to the checkpointer, if this rank writes. Collective."""
        raise NotImplementedError

    def info(self, text: str) -> None:
        """Tell the user, on the leader."""
        raise NotImplementedError

    def warn(self, text: str) -> None:
        """Warn the user, on the leader."""
        raise NotImplementedError

    @property
    def script(self) -> dict[str, Any]:
        """Settings of the user's script that must be equal on all ranks, by name."""
        raise NotImplementedError

    @property
    def has_failed(self) -> bool:
        """Whether an exchange of gradients has failed."""
        return False

    def committed(self, event: Committed) -> None:
        """A checkpoint is durable; on the leader."""

    def all_saved(self) -> None:
        """All ranks stop, and what can be saved is: signals may end this process now."""

    def stopping(self, reasons: list[str]) -> None:
        """All ranks stop, for ``reasons`` by rank; empty for those without a notice."""


class ElasticSession:
    """A training on this process, from its set-up to its end.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: RunSettings) -> None:
        RESTART.require()
        self.settings = settings
        self.history = RunHistory()
        self.lifecycle = ProcessLifecycle(settings, self.history)
        self._members: Membership | None = None
        self._retention: Retention | None = None
        self.resumed: ElasticState | None = None
        """State of the checkpoint that this start resumes from; None for a fresh start."""
        self.costs: dict[str, float] = {}
        """``elastic/*``, of restarts; empty on all ranks but 0, and before training begins."""
        self._saved_step = -1  # of the last save that this start has asked for
        self.newest = ""
        """The newest checkpoint that is known to be durable, on all ranks."""
        self._is_open = False
        self.has_joined = False
        """Whether this process has joined others in a training, and has its state from them."""

    @property
    def members(self) -> Membership:
        """All ranks, from :meth:`rendezvous` on."""
        assert self._members is not None
        return self._members

    @property
    def retention(self) -> Retention:
        """The checkpoints, from :meth:`open` on."""
        assert self._retention is not None
        return self._retention

    def rendezvous(self, members: Membership | None = None) -> None:
        """Begin to watch for progress, and make the groups of all ranks. Collective.

        Args:
            members: those that have met already.
        """
        self.lifecycle.open()
        self._members = members or Membership(sharded=self.settings.saving.sharded)

    def open(self, loop: TrainingLoop) -> str | None:
        """Own the folder; the newest complete checkpoint in it. Collective.

        Raises:
            ValueError: not all ranks see it, it cannot be written, or is not of such a run.
            CheckpointError: there are checkpoints, and none is complete.
        """
        self._loop, self._saved_step, self.resumed = loop, -1, None
        forget_outcome()
        folder = self.settings.folder
        self.history.open(folder, ranks=self.members.ranks, seed=self.settings.seed)
        self._retention = self._retained(loop)
        self._is_open = True
        newest = self.retention.open()
        self.newest = newest or ""
        return newest

    def _retained(self, loop: TrainingLoop) -> Retention:
        return Retention(
            self.settings.folder,
            keep=self.settings.max_to_keep,
            settings=self.settings.saving,
            members=self.members,
            warn=loop.warn,
            committed=self._committed,
            # Ranks of a launcher that was killed take their grace period to end.
            patience=self.settings.grace_period + _TO_EXIT if Launch.from_env().is_elastic else 0.0,
        )

    def _committed(self, event: Committed) -> None:
        self.history.saved()
        self._loop.committed(event)

    def facts(self) -> dict[str, Any]:
        """Values that are equal on all ranks, for a rank that joins them; see :meth:`move`."""
        return {
            "run_id": self.history.run_id,
            "seed": self.history.seed,
            "saved_step": self._saved_step,
            "newest": self.newest,
        }

    def move(
        self, loop: TrainingLoop, members: Membership, *, facts: dict[str, Any] | None = None
    ) -> None:
        """Go on with other ranks, maybe under another leader. Collective among them.

        Args:
            facts: of a rank that was there before; None: this one was.
        """
        self._members = members
        if facts is not None:
            self._loop, self.resumed = loop, None
            self._saved_step, self.newest = facts["saved_step"], facts["newest"]
            self._retention, self._is_open = self._retained(loop), True
            self.has_joined = True
        known = facts or self.facts()
        run, seed = known["run_id"], known["seed"]
        self.history.move(self.settings.folder, ranks=members.ranks, run_id=run, seed=seed)
        self.retention.move(members, run=run, restricted=self.settings.weights_only)
        saved = members.ranks.gather(self._saved_step)
        if len({*saved}) > 1:  # some have not come so far
            self._saved_step = -1
        if self.costs or members.ranks.is_leader:
            self._count_costs()

    def report_outage(self, report: OutageReport) -> None:
        """Tell and write down that members have changed within the process, on the leader."""
        self.lifecycle.heartbeat()
        say = self._loop.warn if report.lost else self._loop.info
        say(report.line)
        self.history.report_outage(report)
        self._count_costs()

    def load(self, state: ElasticState | None, *, is_own: bool) -> None:
        """Go on from ``state``, or begin afresh.

        Args:
            is_own: its checkpoint was in the folder of this run; or else another run begins with
                it.
        """
        self.lifecycle.heartbeat()
        self.resumed = state
        self.history.resume(state, is_own=is_own)

    def scale_rates(
        self, optimizers: Iterable[Any], schedulers: Iterable[Any], *, first: Layout, now: Layout
    ) -> None:
        """Scale learning rates where the batch policy says so and the layout has changed."""
        before = first if self.resumed is None else self.resumed.layout
        factor = lr_factor(self.settings.batch_policy, before=before, now=now)
        scale_learning_rates(optimizers, schedulers, factor=factor)

    def begin(self, first: Layout, now: Layout | None, *, foreign: str = "") -> None:
        """Say where training goes on, and write it down. Collective.

        Args:
            first: the layout that the run began with.
            now: None where samples are not counted.
            foreign: without a state, the checkpoint of somebody else that training goes on from.

        Raises:
            ValueError: ranks would take different batches.
        """
        world_size = self.members.world_size
        if not self.has_joined:  # otherwise the others are in a step
            facts = {**self._loop.data.agreed, **self._loop.script}
            rule = "All ranks must train in the same way, on batches of the same data"
            self.members.ranks.require_equal(facts, rule=rule)
        line = start_line(self.resumed, now, world_size=world_size, foreign=foreign)
        self._loop.info(line)
        for warning in (*Launch.from_env().missing_settings(), self._loop.data.left_out):
            if warning:
                self._loop.warn(warning)
        self.history.start(self.resumed, first=first, world_size=world_size)
        self._count_costs()

    def nothing_is_left(self, now: Layout | None) -> None:
        """Say that this start does not train: it is no restart, and the account is as it was."""
        line = start_line(self.resumed, now, world_size=self.members.world_size)
        self._loop.warn(
            f"{line}; there is nothing left to do: the run in {self.settings.folder} is complete, "
            "and this model has got its weights. For another training give another folder"
        )
        self._count_costs()

    def _count_costs(self) -> None:
        if self.members.ranks.is_leader:
            self.costs = self.history.metrics(world_size=self.members.world_size)

    @property
    def metrics(self) -> Metrics:
        """Cost of checkpoints on this rank."""
        return Metrics() if self._retention is None else self._retention.saves.metrics

    @property
    def last_committed(self) -> Committed | None:
        """The newest checkpoint of this start that is durable; on a rank that writes."""
        return None if self._retention is None else self._retention.saves.last_committed

    def step(self, samples: int) -> bool:
        """An optimizer step is done, of all ranks, and ``samples`` so far.

        Returns whether the run has now caught up with what it had done before the restart.
        """
        self.lifecycle.heartbeat()
        if caught_up := self.history.step(samples):
            self._count_costs()
        return caught_up

    def here(self, **facts: Any) -> ElasticState:
        """State of the training on this rank, without its generators and loader; no collective.

        Args:
            **facts: of the state, beside those that a loop and a Trainer have in common.
        """
        at = self._loop
        first, layout = at.data.layouts
        return ElasticState(
            run_id=self.history.run_id,
            seed=self.history.seed,
            first=first,
            layout=layout,
            position=at.position,
            total_samples=at.total_samples,
            total_steps=at.steps,
            size=at.data.size,
            **facts,
        )

    def describe(
        self,
        *,
        rng: dict[str, Any],
        loader: Any = None,
        metrics: dict[str, float] | None = None,
        **facts: Any,
    ) -> dict[str, Any]:
        """State of the training on all ranks, as it goes into a checkpoint. Collective.

        Args:
            rng: of this rank's generators; ``{"seed": ...}`` if they are still to be seeded.
            loader: state of this rank's loader, if it keeps one.
            metrics: logged by this rank.
            **facts: see :meth:`here`.
        """
        share = self._loop.data.rank
        gathered = self.members.ranks.gather((rng, (share, loader), metrics or {}))
        states, by_rank, logged = (list(values) for values in zip(*gathered, strict=True))
        loaders = [state for _, state in sorted(dict(by_rank).items())]  # once for each share
        return replace(
            self.here(**facts),
            rng=[] if any("seed" in state for state in states) else states,
            loaders=[] if any(state is None for state in loaders) else loaders,
            metrics=logged,
        ).as_dict()

    def close_step(self, ended: int | None = None) -> None:
        """Save if a checkpoint is due, and stop if a rank is preempted. Collective, between steps.

        Args:
            ended: the epoch that has ended after this step, counted from 0; None within one.
        """
        steps, settings = self._loop.steps, self.settings
        if ended is None:
            is_due = settings.is_due_after_step(steps)
        else:
            is_due = settings.is_due_after_epoch(ended, steps=steps)
        if is_due:
            self.save()
        self.stop_if_requested()

    def save(self) -> None:
        """Save this step, unless it is saved or ``on_busy`` says to skip it. Collective."""
        steps = self._loop.steps
        if self._saved_step == steps:
            return
        path = self.retention.begin(f"epoch={self._loop.epoch}-step={steps}.ckpt")
        if path is None:
            return
        self._loop.write(path)
        self._saved_step = steps
        self.lifecycle.heartbeat()

    def _save_for_good(self) -> int | None:
        """Save this step if it is not saved yet, and wait; the newest step that is durable then."""
        self._await_saves()
        if self._durable_step() != self._loop.steps:
            self._saved_step = -1  # a save of this step that was asked for has failed
            self.save()
            self._await_saves()
        self.retention.agree_on_failures()
        return self._durable_step()

    def _durable_step(self) -> int | None:
        """Step of the newest checkpoint that is durable; collective."""
        last = self.retention.saves.last_committed
        step = None if self.resumed is None else self.resumed.total_steps
        facts: dict[str, Any] = {"step": step, "path": self.newest}
        if last is not None:
            facts = {"step": last.origin.step, "path": last.target}
        durable = self.members.ranks.of_leader(facts)  # which publishes
        self.newest = durable["path"]
        newest: int | None = durable["step"]
        return newest

    def _await_saves(self) -> None:
        """Writing may take long. That all ranks have come to a round of waiting is progress."""
        while not all(
            self.members.ranks.gather(self.retention.is_saved_within(self.lifecycle.round_s))
        ):
            self.lifecycle.heartbeat()
        self.lifecycle.heartbeat()

    def stop_if_requested(self) -> None:
        """Stop at one checkpoint of all ranks, if any of them is preempted.

        Collective; takes effect one call later.

        Raises:
            TrainingLoop.stopped: with the exit code of this process.
            CheckpointError: a checkpoint could not be written, on all ranks.
        """
        self.retention.collect()
        if not self.members.stop.ask(self.lifecycle.stop_requested or self.retention.has_failed):
            return
        self.retention.agree_on_failures()
        saved, steps = self._save_for_good(), self._loop.steps
        # A launcher that sees a rank go tells the others once more. That must end them, also where
        # they would wait for the launcher, as functions that it has called do.
        self._loop.all_saved()
        # No rank leaves before all have come here.
        notices = self.members.ranks.gather(self.lifecycle.notice)
        self.members.stop.end()
        reasons = [reason for _, reason in notices]
        code = self.lifecycle.stop(notices, is_saved=saved == steps)
        self._loop.stopping(reasons)
        say = self._loop.info if saved == steps else self._loop.warn
        say(stop_line(steps, reasons, saved=saved))
        self.lifecycle.leave()
        raise self._loop.stopped(code)

    def complete(self, *, saves: bool = True) -> None:
        """The training has ended as it should. Collective.

        Args:
            saves: False: it took no step.
        """
        if saves:
            self._save_for_good()
        self.members.stop.end()
        self.lifecycle.finish()
        self.history.end(FINISHED)
        self._count_costs()
        if self.members.ranks.is_leader:
            summary = self.history.summary
            if summary.restarts or summary.generations:
                self._loop.info(cost_line(summary))

    def close(self, error: BaseException | None = None, *, stopped: bool = False) -> None:
        """The end of this process's part, with what has ended it.

        Args:
            stopped: it was :meth:`stop_if_requested`.
        """
        was_open, self._is_open = self._is_open, False
        step = self._loop.steps if was_open else None
        begun = 0 if self.resumed is None else self.resumed.total_steps
        if stopped:
            Outcome(step, begun=begun).write()
        elif error is not None:
            is_echo = (
                is_of_collective(error)
                or (was_open and self._loop.has_failed)
                # A launcher's signal ends workers of a loader, too.
                or (self.lifecycle.stop_requested and is_of_loader(error))
            )
            self.lifecycle.fail(error, is_echo=is_echo)
            Outcome.of(error, step=step, begun=begun, is_echo=is_echo).write(error)
        try:
            if was_open:
                self.retention.close(patiently=error is None or stopped)
        finally:
            if stopped:
                self.lifecycle.end_listening()
            elif error is None:
                self.lifecycle.close()
            self.history.close()
        if error is None and self._members is not None:
            self._members.close()
