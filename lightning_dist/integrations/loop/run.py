"""One process of a run whose loop is the user's: it loads, saves, stops and ends."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.elastic.account import Account, cost_line, start_line
from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.layout import lr_factor
from lightning_dist.elastic.life import Life, stop_line
from lightning_dist.elastic.plan import Position
from lightning_dist.elastic.rates import scale_learning_rates
from lightning_dist.elastic.settings import EndSettings
from lightning_dist.elastic.state import KEY, ElasticState
from lightning_dist.elastic.vote import Vote
from lightning_dist.integrations.loop.checkpoints import NewestFew
from lightning_dist.integrations.loop.data import Dealt
from lightning_dist.integrations.loop.objects import Objects
from lightning_dist.integrations.loop.progress import Progress
from lightning_dist.integrations.loop.settings import LoopSettings

log = logging.getLogger(__name__)


class Stopped(SystemExit):
    """The training has stopped on all ranks at one step; ends the process with a code."""


class LoopRun:
    """From the entering of an ElasticLoop to its end.

    Args:
        settings: of the loop.
        ending: when this process ends by itself.
        saving: how checkpoints are written.
    """

    def __init__(
        self, settings: LoopSettings, *, ending: EndSettings, saving: CheckpointSettings
    ) -> None:
        self._settings, self._saving = settings, saving
        self.account = Account()
        self.life = Life(ending, self.account)
        self._handlers: dict[signal.Signals, Any] = {}
        self._checkpoints: NewestFew | None = None
        self._costs: dict[str, float] = {}  # of restarts; rank 0 reads them from its account
        self.is_open = self.is_complete = False

    def metrics(self) -> dict[str, float]:
        """What loggers are told; empty on all ranks but 0, and before training begins."""
        if not self._costs or self._checkpoints is None:
            return {}
        return {**self._costs, **self._checkpoints.metrics.by_name()}

    def meet(self) -> None:
        """Make the groups of all ranks; collective.

        Raises:
            ValueError: there are several ranks, and no process group.
        """
        several = dist.is_initialized() and dist.get_world_size() > 1
        if Launch.from_env().world_size > 1 and not several:
            raise ValueError(
                f"the launcher started {Launch.from_env().world_size} ranks, and there is no "
                "process group; call lightning_dist.init_process_group() first (Accelerator() and "
                "fabric.launch() make one, on CPU with ACCELERATE_USE_CPU=true)"
            )
        self.life.open()
        self._ranks = Ranks(dist.new_group(backend="gloo") if several else None)
        self._vote = Vote(dist.new_group(backend="gloo") if several else None)

    def open(self, loader: Any, given: Mapping[str, Any]) -> None:
        """Find the newest checkpoint, load it and deal ``loader``; collective."""
        ranks, settings = self._ranks, self._settings
        self.objects = Objects(given, world_size=ranks.count)
        if settings.weights_only:
            self.objects.require_loadable()
        self.account.open(
            settings.folder,
            rank=ranks.rank,
            seed=settings.seed,
            broadcast=lambda value: ranks.all({"value": value})[0]["value"],
            all_agree=lambda fine: all(each["fine"] for each in ranks.all({"fine": fine})),
        )
        self._checkpoints = saves = NewestFew(
            settings.folder,
            keep=settings.keep,
            settings=self._saving,
            weights_only=settings.weights_only,
            ranks=ranks,
        )
        path = saves.open()
        resumed = None if path is None else self.objects.take_up(saves.load(path), path=path)
        self.life.beat()
        self.account.resume(resumed, is_own=True)
        saves.save_for(self.account.run_id)
        self.progress = Progress(
            resumed, rank=ranks.rank, world_size=ranks.count, device=self.objects.device
        )
        self.data = Dealt(
            loader,
            settings,
            rank=ranks.rank,
            world_size=ranks.count,
            resumed=resumed,
            path=path or "",
            begun=self.account.first,
            seed=self.account.seed,
        )
        before = self.data.first if resumed is None else resumed.layout
        factor = lr_factor(settings.batch_policy, before=before, now=self.data.layout)
        scale_learning_rates(self.objects.optimizers, self.objects.schedulers, factor=factor)
        if self._saving.snapshot in ("auto", "overlap"):
            saves.watch(self.objects.optimizers)
        if threading.current_thread() is threading.main_thread():  # where Python has handlers
            self._handlers = {each: signal.getsignal(each) for each in settings.signals}
        self.life.note(settings.signals, asks=Launch.from_env().local_rank == 0)
        self.is_open = True

    def begin(self, *, epochs: int) -> bool:
        """Say where training goes on; whether anything of so many epochs is left."""
        progress, world_size = self.progress, self._ranks.count
        line = start_line(progress.resumed, self.data.layout, world_size=world_size)
        if progress.position.epoch >= epochs:
            self._say(f"{line}; there is nothing left to do")
            self._count_costs()
            self.is_complete = True
            return False
        self._say(line)
        for missing in Launch.from_env().missing_settings():
            self._say(missing, level=logging.WARNING)
        self.account.start(progress.resumed, first=self.data.first, world_size=world_size)
        self._count_costs()
        return True

    def _count_costs(self) -> None:
        if self._ranks.rank == 0:
            self._costs = self.account.metrics(world_size=self._ranks.count)

    def step(self, position: Position) -> None:
        """The optimizer has stepped, and ``position`` is reached."""
        self.progress.step(position)
        self.life.beat()
        if self.account.step(self.progress.samples):
            self._count_costs()

    def save(self) -> None:
        """Save this step, unless ``on_busy`` says to skip it."""
        assert self._checkpoints is not None
        if not self._checkpoints.may_save():
            return
        progress = self.progress
        state = ElasticState(
            run_id=self.account.run_id,
            seed=self.account.seed,
            first=self.data.first,
            layout=self.data.layout,
            position=progress.position,
            total_samples=progress.samples,
            total_steps=progress.steps,
            size=self.data.size,
            rng=self._vote.gather(progress.capture_rng()),
        )
        name = f"epoch={progress.position.epoch}-step={progress.steps}.ckpt"
        checkpoint = {KEY: state.as_dict(), **self.objects.state_dict()}
        self._checkpoints.save(checkpoint, name, step=progress.steps)
        self.life.beat()

    def _save_for_good(self) -> int | None:
        """Save this step if it is not saved yet, and wait; the newest step that is durable then."""
        assert self._checkpoints is not None
        self._await_saves()
        if self._durable_step() != self.progress.steps:
            self.save()
            self._await_saves()
        self._checkpoints.settle()
        return self._durable_step()

    def _durable_step(self) -> int | None:
        """Step of the newest checkpoint that is durable; collective."""
        assert self._checkpoints is not None
        last, resumed = self._checkpoints.last_committed, self.progress.resumed
        step = None if resumed is None else resumed.total_steps
        if last is not None:
            step = last.origin.step
        durable: int | None = self._ranks.all({"step": step})[0]["step"]  # rank 0 writes
        return durable

    def _await_saves(self) -> None:
        """Writing may take long. That all ranks have come to a round of waiting is progress."""
        assert self._checkpoints is not None
        while not all(self._vote.gather(self._checkpoints.is_saved_within(self.life.round_s))):
            self.life.beat()
        self.life.beat()

    def stop_if_told(self) -> None:
        """Where any rank is to end: one checkpoint of all, and the end of this process."""
        if not self._vote.cast(self.life.is_told):
            return
        saved = self._save_for_good()
        # A launcher that sees a rank go tells the others once more. That must end them, also where
        # they would wait for the launcher, as functions that it has called do.
        self._give_back_handlers()
        reasons = self._vote.gather(self.life.reason)  # no rank goes before all have come here
        self._vote.end()
        is_saved = saved == self.progress.steps
        code = self.life.stop(reasons, is_saved=is_saved)
        line = stop_line(self.progress.steps, reasons, saved=saved)
        self._say(line, level=logging.INFO if is_saved else logging.WARNING)
        self.life.leave()
        raise Stopped(code)

    def complete(self) -> None:
        """The training has ended as it should."""
        self._save_for_good()
        self._vote.end()
        self.life.finish()
        self.account.complete()
        self.is_complete = True
        if self._ranks.rank == 0 and self.account.summary.restarts:
            self._say(cost_line(self.account.summary))

    def close(self, error: BaseException | None) -> None:
        """The end of this process's part, with what has ended it."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self.data.close()
        if self._checkpoints is not None:
            self._checkpoints.close(patiently=error is None or isinstance(error, Stopped))
        if isinstance(error, Stopped):
            self.life.end_listening()
        elif error is not None:
            self.life.fail(error)
        else:
            self.life.close()
        self.account.close()
        self._give_back_handlers()

    def _give_back_handlers(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._handlers = {}

    def _say(self, line: str, *, level: int = logging.INFO) -> None:
        if self._ranks.rank == 0:
            log.log(level, "%s", line)
