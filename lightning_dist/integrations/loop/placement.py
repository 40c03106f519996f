"""A session of a loop of the user's own: what it has counted, and how it is saved."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.reading import load
from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.plan import Position
from lightning_dist.elastic.progress import KEY, Generators
from lightning_dist.elastic.session import Placement, Session
from lightning_dist.elastic.sharding import Deal, NotExactError
from lightning_dist.elastic.workers import keep_workers
from lightning_dist.integrations.loop.objects import Objects

log = logging.getLogger(__name__)


class Stopped(SystemExit):
    """The training has stopped on all ranks at one step; ends the process with a code."""


class LoopPlacement(Placement):
    """From the entering of an ElasticLoop to its end.

    Args:
        session: of the loop.
        accumulate: micro-batches per optimizer step of the first start.
        signals: that end the training at a checkpoint of all ranks.
    """

    def __init__(
        self, session: Session, *, accumulate: int, signals: Sequence[signal.Signals]
    ) -> None:
        self.session, self._settings = session, session.settings
        self._accumulate, self._signals = accumulate, tuple(signals)
        self._handlers: dict[signal.Signals, Any] = {}
        self.is_open = self.is_complete = False

    def open(self, loader: Any, given: Mapping[str, Any]) -> None:
        """Find the newest checkpoint, load it and deal ``loader``; collective."""
        session, settings = self.session, self._settings
        session.meet()
        rank, world_size = session.members.rank, session.members.world_size
        self.objects = Objects(given, world_size=world_size)
        if settings.weights_only:
            self.objects.require_loadable()
        path = session.open(self)
        state = None if path is None else self.objects.take_up(self._load(path), path=path)
        session.load(state, is_own=True)
        run, restricted = session.history.run_id, settings.weights_only
        session.retention.save_for(run, restricted=restricted, resumed=path)
        self.position = Position() if state is None else state.position
        self.samples = 0 if state is None else state.total_samples
        self._steps = 0 if state is None else state.total_steps
        self._before_epoch = self.samples - self.position.samples
        self.generators = Generators(
            state, rank=rank, world_size=world_size, device=self.objects.device
        )
        self.data = Deal(
            policy=settings.batch_policy,
            accumulate=self._accumulate,
            rank=rank,
            world_size=world_size,
            resumed=state,
            path=path or "",
            begun=session.history.first,
            seed=session.history.seed,
        )
        self.batches = self.data.deal(_unprepared(loader))
        """A loader of this rank's batches, from where the epoch begins or goes on."""
        keep_workers(self.batches, self._signals)
        optimizers, (first, now) = self.objects.optimizers, self.data.layouts
        session.scale_rates(optimizers, self.objects.schedulers, first=first, now=now)
        if settings.saving.snapshot in ("auto", "overlap"):
            session.retention.watch(optimizers)
        if threading.current_thread() is threading.main_thread():  # where Python has handlers
            self._handlers = {each: signal.getsignal(each) for each in self._signals}
        session.lifecycle.note(self._signals, asks=Launch.from_env().local_rank == 0)
        self.is_open = True

    def _load(self, path: str) -> Any:
        """What was saved as ``path``, which has been verified. Collective: errors are of all."""
        restricted = self._settings.weights_only
        return self.session.members.ranks.on_each(
            lambda: load(path, check=False, map_location="cpu", weights_only=restricted)
        )

    def begin(self, *, epochs: int) -> bool:
        """Say where training goes on; whether anything of so many epochs is left."""
        first, now = self.data.layouts
        if self.position.epoch >= epochs:
            self.session.nothing_is_left(now)
            self.is_complete = True
            return False
        self.session.begin(first, now)
        return True

    def step(self, position: Position) -> None:
        """The optimizer has stepped, and ``position`` is reached."""
        self.position = position
        self.samples = self._before_epoch + position.samples
        self._steps += 1
        self.session.step(self.samples)

    def end_epoch(self, epoch: int) -> None:
        """``epoch`` is over, with what the user does after its batches."""
        self.position, self._before_epoch = Position(epoch + 1), self.samples

    @property
    @override
    def steps(self) -> int:
        return self._steps

    @property
    @override
    def epoch(self) -> int:
        return self.position.epoch

    @override
    def write(self, checkpointer: Checkpointer | None, path: str) -> None:
        place = self.session.describe(
            self.data.layouts,
            self.position,
            samples=self.samples,
            steps=self._steps,
            rng=self.generators.capture(),
            size=self.data.size,
        )
        state = {KEY: place, **self.objects.state_dict()}

        def save() -> None:
            if checkpointer is not None:
                checkpointer.save(state, path, step=self._steps)

        self.session.members.ranks.on_each(save)

    @override
    def tell(self, text: str) -> None:
        self._say(text, logging.INFO)

    @override
    def warn(self, text: str) -> None:
        self._say(text, logging.WARNING)

    def _say(self, text: str, level: int) -> None:
        if self.session.members.ranks.is_leader:
            log.log(level, "%s", text)

    @override
    def all_saved(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._handlers = {}

    def stop_if_told(self) -> None:
        """Where any rank is to end: one checkpoint of all, and the end of this process."""
        code = self.session.stop_if_told()
        if code is not None:
            raise Stopped(code)

    def complete(self) -> None:
        """The training has ended as it should."""
        self.session.complete()
        self.is_complete = True

    def close(self, error: BaseException | None) -> None:
        """The end of this process's part, with what has ended it."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self.data.close()
        self.session.close(error, stopped=isinstance(error, Stopped))
        self.all_saved()


def _unprepared(loader: Any) -> Any:
    kind = type(loader)
    if kind.__module__.partition(".")[0] in ("accelerate", "lightning", "lightning_fabric"):
        raise NotExactError(
            f"a {kind.__name__} deals its batches to ranks itself; give ElasticLoop the DataLoader "
            "as it is before prepare() or setup_dataloaders(), and device="
        )
    return loader
