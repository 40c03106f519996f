"""A session of a loop of the user's own: what it has counted, and how it is saved."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dist.base.log import get_logger
from lightning_dist.checkpoint.reading import load
from lightning_dist.elastic.data.plan import Position
from lightning_dist.elastic.data.sampling import keep_workers
from lightning_dist.elastic.data.sharding import DataShards, NotExactError, facts_of
from lightning_dist.elastic.loop.objects import Objects
from lightning_dist.elastic.process.lifecycle import Ended
from lightning_dist.elastic.progress import KEY, ElasticState, Generators
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.local_steps import LocalStepRecovery
from lightning_dist.elastic.recovery.loop import RecoverableLoop
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.elastic.recovery.step import StepRecovery
from lightning_dist.elastic.recovery.worker import WorkerRecovery
from lightning_dist.elastic.session import ElasticSession
from lightning_dist.ranks.agreement import Membership
from lightning_dist.ranks.facts import Spread
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.run import RecoveryMode, RecoverySettings
from lightning_dist.sync.local.outer_steps import LocalUpdates
from lightning_dist.sync.local.state import NOT_SHARDED

log = get_logger(__name__)


class UserLoop(RecoverableLoop):
    """The training of an ElasticLoop, from its entering to its end.

    Args:
        session: of the loop.
        accumulate: micro-batches per optimizer step of the first start.
        signals: signals after which all ranks write a checkpoint and exit.
        recovering: what the ranks that are left do when one is lost.
    """

    position = Position()
    total_samples = 0
    steps = 0

    def __init__(
        self,
        session: ElasticSession,
        *,
        accumulate: int,
        signals: Sequence[signal.Signals],
        recovering: RecoverySettings,
    ) -> None:
        self._mirror_every = recovering.mirror_every
        self._mode: RecoveryMode = recovering.recovery
        self.is_current = True
        """Whether the loader's batches are those of the present members."""
        self.session, self._settings = session, session.settings
        self._accumulate, self._signals = accumulate, tuple(signals)
        self._handlers: dict[signal.Signals, Any] = {}
        self.is_open = self.is_complete = False

    def open(self, loader: Any, given: Mapping[str, Any]) -> None:
        """Meet the others, find the newest checkpoint, load it and shard ``loader``; collective."""
        self._loader = loader
        environment = RecoveryEnvironment.from_env() if self._mode == "in_process" else None
        if environment is None:
            self.session.rendezvous()
            if self._mode == "in_process":
                self.warn(
                    "recovery='in_process' takes effect under `lightning-dist launch` only; here "
                    "all ranks restart if one is lost"
                )
            self._open(given)
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "recovery='in_process' starts with a process group of this process alone, since "
                "ranks join and leave; create it with lightning_dist.init_process_group("
                "recovery='in_process'), before DistributedDataParallel"
            )
        self.objects = Objects(given, world_size=1)
        self.recovery = self._recovery_of(self.objects.to_recover(), Generations(environment))
        generations = self.recovery.generations
        self.session.lifecycle.waits_for_another = generations.member.waits_for_another
        self.session.lifecycle.lapsed = generations.member.lapsed
        generation, members = self.recovery.begin()
        while True:
            try:
                if generation.source is None:
                    self.recovery.transfer_state(generation, members, dict)
                    self.session.rendezvous(members)
                    self._open(given)
                else:
                    self.session.lifecycle.open()
                    self.enter(generation, members)
                break
            except RuntimeError as error:
                generations.lost(error)
                if self.is_open:  # it has gone wrong after the state came
                    break
                generation, members = self.recovery.change()
        self.recovery.has_state()
        if generation.source is not None:
            self.sync_point()

    def _recovery_of(
        self, trained: DistributedDataParallel | LocalUpdates, generations: Generations
    ) -> WorkerRecovery:
        facts: dict[str, Any] = {"steps": lambda: self.steps, "script": self.script}
        if isinstance(trained, LocalUpdates):
            if self._mirror_every is not None:
                raise ValueError(
                    "mirror_residuals is for models in DistributedDataParallel, and here workers "
                    "take local steps; leave it out"
                )
            return LocalStepRecovery(generations, trained, **facts)
        return StepRecovery(
            generations,
            trained,
            optimizers=self.objects.optimizers,
            objects=self.objects.in_steps,
            mirror_every=self._mirror_every,
            **facts,
        )

    def _open(self, given: Mapping[str, Any]) -> None:
        session, settings = self.session, self._settings
        restricted = settings.weights_only
        self.objects = Objects(given, world_size=session.members.world_size)
        if settings.saving.sharded and self.objects.updates:
            raise ValueError(NOT_SHARDED)
        if restricted:
            self.objects.require_loadable()
        path = session.open(self)
        state: ElasticState | None = None
        if path is not None:  # it has been verified
            read = partial(load, path, check=False, map_location="cpu", weights_only=restricted)
            state = self.objects.load(session.members.ranks.on_each(read), path=path)
        session.load(state, is_own=True)
        session.retention.save_for(session.history.run_id, restricted=restricted, resumed=path)
        self.position = Position() if state is None else state.position
        self.total_samples = 0 if state is None else state.total_samples
        self.steps = 0 if state is None else state.total_steps
        self._before_epoch = self.total_samples - self.position.samples
        self._shard(state, path=path or "", begun=session.history.first)
        optimizers, (first, now) = self.objects.optimizers, self.data.layouts
        session.scale_rates(optimizers, self.objects.schedulers, first=first, now=now)
        self._listen()

    def _shard(self, state: ElasticState | None, *, path: str = "", begun: Any = None) -> None:
        members = self.session.members
        rank, world_size = members.rank, members.world_size
        self.generators = Generators(
            state, rank=rank, world_size=world_size, device=self.objects.device
        )
        self.data = DataShards(
            policy=self._settings.batch_policy,
            accumulate=self._accumulate,
            rank=rank,
            world_size=world_size,
            resumed=state,
            path=path,
            begun=begun,
            seed=self.session.history.seed,
        )
        self.batches = self.data.shard(_unprepared(self._loader))
        """A loader of this rank's batches, from where the epoch begins or goes on."""
        keep_workers(self.batches, self._signals)

    def _listen(self) -> None:
        session = self.session
        session.retention.saves.watch(self.objects.optimizers)
        if threading.current_thread() is threading.main_thread():  # where Python has handlers
            self._handlers = {number: signal.getsignal(number) for number in self._signals}
        session.lifecycle.note(self._signals, asks=Launch.from_env().local_rank == 0)
        self.is_open = True

    # Recovery within the process.

    @override
    def sync_point(self) -> None:
        """Sync point of all ranks; at the end of an epoch, once the user has done what follows it.

        In between there is no collective: of members that fail there some would already have ended
        the epoch, and would not do the same ones as the others afterwards.
        """
        done = self.position.samples
        if not done or done < self.data.plan().used:
            super().sync_point()

    @override
    def import_state(self, handed: Any, state: ElasticState, members: Membership) -> None:
        self.objects.load_states(handed)
        self.position, self.total_samples = state.position, state.total_samples
        self.steps = state.total_steps
        self._before_epoch = self.total_samples - self.position.samples

    @override
    def export_state(self) -> dict[str, Any]:
        return self.objects.states_for_newcomer()

    @override
    def resume(self, state: ElasticState, *, is_new: bool) -> None:
        if not is_new:
            self.data.close()
        self._shard(state)
        if is_new:
            self._listen()
        else:
            self.generators.forget()  # they are where they were
        self.is_current = False

    @override
    def rates(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return self.objects.optimizers, self.objects.schedulers

    def begin(self, *, epochs: int) -> bool:
        """Say where training goes on; whether anything of so many epochs is left."""
        first, now = self.data.layouts
        if self.position.epoch >= epochs:
            if self.session.has_joined:  # others who have taken the last step
                self.complete()
            else:
                self.session.nothing_is_left(now)
                self.is_complete = True
            return False
        self.session.begin(first, now)
        return True

    def step(self, position: Position) -> None:
        """The optimizer has stepped, and ``position`` is reached."""
        self.position = position
        self.total_samples = self._before_epoch + position.samples
        self.steps += 1
        self.session.step(self.total_samples)
        if self.recovery is not None:
            self.recovery.generations.took_step()

    def end_step(self, *, is_given_up: bool) -> None:
        """All of a step is over, with what the user does after it; or of one that has failed."""
        if is_given_up:
            self.take_again()
        else:
            # A checkpoint after the last step waits for what the user does after the epoch.
            self.sync_point()

    def end_epoch(self, epoch: int) -> None:
        """``epoch`` is over, with what the user does after its batches."""
        self.position, self._before_epoch = Position(epoch + 1), self.total_samples

    @property
    @override
    def script(self) -> dict[str, Any]:
        loader = facts_of(_unprepared(self._loader))
        return {
            **self._settings.agreed,
            "gradient_accumulation_steps": self._accumulate,
            "batch size": loader.batch_size,
            "drop_last": loader.drop_last,
        }

    @property
    @override
    def has_failed(self) -> bool:
        return self.objects.has_failed

    @property
    @override
    def epoch(self) -> int:
        return self.position.epoch

    @override
    def write(self, path: str) -> None:
        saves = self.session.retention.saves
        place = self.session.describe(rng=self.generators.capture())
        leader, sharded = self.session.members.ranks.leader, self._settings.saving.sharded
        spreads: list[Spread] = []
        objects = self.objects.state_dict(leader=leader, spreads=spreads if sharded else None)

        def save() -> None:
            if saves.writes:
                state = {KEY: place, **objects}
                saves.checkpointer.save(
                    state, path, step=self.steps, sharded=sharded, spreads=spreads
                )

        self.session.members.ranks.on_each(save)

    @override
    def info(self, text: str) -> None:
        self._say(text, logging.INFO)

    @override
    def warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    def _say(self, text: str, level: int) -> None:
        if self.session.members.ranks.is_leader:
            log.log(level, "%s", text)

    @override
    def all_saved(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def complete(self) -> None:
        """The training has ended as it should. Collective."""
        self.session.complete()
        self.is_complete = True

    def close(self, error: BaseException | None) -> None:
        """The end of this process's part, with what has ended it."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self.data.close()
        if self.recovery is not None:
            self.recovery.close()
        if isinstance(error, Ended):
            self.session.lifecycle.leave()
        self.session.close(error, stopped=isinstance(error, Ended))
        self.all_saved()
        if error is not None and self.recovery is not None:
            self.recovery.generations.end_if_lost(error)


def _unprepared(loader: Any) -> Any:
    kind = type(loader)
    if kind.__module__.partition(".")[0] in ("accelerate", "lightning", "lightning_fabric"):
        raise NotExactError(
            f"a {kind.__name__} shards its batches itself; give ElasticLoop the DataLoader as it "
            "is before prepare() or setup_dataloaders(), and device="
        )
    return loader
