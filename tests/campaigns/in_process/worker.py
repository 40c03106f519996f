"""A worker of a job: it is struck as the plan says, and notes what it computes."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recovering_loops import Samples, await_newcomers, digest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist.elastic.recovery import worker as recovery
from lightning_dist.elastic.recovery.generations import GenerationGroups, Generations
from lightning_dist.elastic.recovery.loop import RecoverableLoop
from lightning_dist.ranks.channel import Channel, PendingWork
from tests.campaigns.in_process.drawing import BATCH, RANKS, SIZE, Strike

PAUSE, LONG_PAUSE = 0.5, 3.0
"""Seconds of a straggler, and of a worker that is continued when it has been left out."""
COMPRESSION: dict[str, Any] = {"min_compress_numel": 0, "compile_kernels": False}
BUCKET_CAP_MB: Any = 0.0001
SEED, RATE, MOMENTUM = 5, 0.05, 0.9


def loader_of_samples(*, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(Samples(SIZE), batch_size=BATCH, shuffle=shuffle)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) - x.flip(1)).square().mean()
    return loss


@dataclass
class _Vote:
    """The vote on a step, under way. No class for each: it would hold the work until collected."""

    work: PendingWork
    strikes: Strikes

    def wait(self) -> object:
        found = self.work.wait()
        self.strikes.met("after the answer")
        return found


class Strikes:
    """Strikes that this process may meet; each is met once in a job."""

    def __init__(self, folder: Path, strikes: list[Strike], *, worker: str, spared: int | None):
        self._folder, self._strikes, self._worker = folder, strikes, worker
        self._local_rank = int(worker.split(".")[1]) if worker else -2
        self._is_spared = self._local_rank == spared
        self.step = -1
        self.raises: type[Exception] = RuntimeError
        self.joins = {each.step - before for each in strikes for before in (1, 2)}
        """Steps that begin when all newcomers wait, so that the next strikes find all ranks."""

    def met(self, place: str) -> None:
        """This process is at ``place``."""
        for each in self._strikes:
            here = each.local_rank in (self._local_rank, -1) and not self._is_spared
            if not here or each.place != place or (each.after < 0 and self.step < each.step):
                continue
            if each.after >= 0 and not self._marker(each.after).exists():
                continue
            try:
                with self._marker(each.number).open("x") as marker:
                    marker.write(self._worker)
            except FileExistsError:
                continue
            self._do(each.action)

    def _marker(self, number: int) -> Path:
        return self._folder / f"struck-{number}"

    def _do(self, action: str) -> None:
        own = os.getpid()
        if action == "exit":
            os._exit(3)
        if action == "raise":
            raise self.raises("planted")
        if action in ("pause", "stop for long"):
            seconds = PAUSE if action == "pause" else LONG_PAUSE
            wakes = ["sh", "-c", f"sleep {seconds}; kill -CONT {own}"]
            subprocess.Popen(wakes, start_new_session=True)
        os.kill(own, signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def watch(self, loop: type[RecoverableLoop]) -> None:
        """Meet those in places that are not the user's; ``loop`` is the adapter's."""
        launch, made = Channel.all_reduce, GenerationGroups.enter
        write, handover = loop.write, loop._handover
        strikes = self

        def all_reduce(channel: Channel, *arguments: Any, **named: Any) -> Any:
            if channel.name != "control":
                return launch(channel, *arguments, **named)
            strikes.met("before the vote")
            return _Vote(launch(channel, *arguments, **named), strikes)

        def making(groups: GenerationGroups, *arguments: Any, **named: Any) -> Any:
            strikes.met("groups")
            return made(groups, *arguments, **named)

        def writing(loop: RecoverableLoop, *arguments: Any) -> None:
            strikes.met("saving")
            write(loop, *arguments)

        def handing(loop: RecoverableLoop) -> Any:
            strikes.met("source")
            return handover(loop)

        Channel.all_reduce = all_reduce  # type: ignore[method-assign]
        GenerationGroups.enter = making  # type: ignore[method-assign]
        loop.write = writing  # type: ignore[method-assign]
        loop._handover = handing  # type: ignore[method-assign]
        self._watch_healing()

    def _watch_healing(self) -> None:
        receive: Callable[..., Any] = recovery.from_rank

        def receiving(state: Any, *, rank: int, to: Sequence[int] | None = None) -> Any:
            if to is not None and torch.distributed.get_rank() in to:
                self.met("healed")
            return receive(state, rank=rank, to=to)

        recovery.from_rank = receiving


class Worker:
    """This process of a job, or the process without a fault.

    Args:
        folder: with ``plan.json``: ``codec``, ``epochs``, ``strikes``, ``spared`` and ``limit``.
            Notes are written to ``<worker>.jsonl``, the weights at the end beside it.
        loop: of the adapter.
    """

    def __init__(self, folder: Path, loop: type[RecoverableLoop]) -> None:
        self.folder, self.plan = folder, json.loads((folder / "plan.json").read_text())
        self.name = os.environ.get("LIGHTNING_DIST_WORKER", "")
        """Empty in the process without a fault."""
        if self.name:  # where it hangs, should it hang
            trace = (folder / f"{self.name}.trace").open("w")
            faulthandler.dump_traceback_later(self.plan["limit"], exit=True, file=trace)
        strikes = [Strike(**each) for each in self.plan["strikes"]]
        self.strikes = Strikes(folder, strikes, worker=self.name, spared=self.plan["spared"])
        self.strikes.watch(loop)
        self._log = (folder / f"{self.name or 'alone'}.jsonl").open("a", buffering=1)
        self._noted = -2
        self.note(process=os.getpid())

    def note(self, **facts: Any) -> None:
        print(json.dumps({**facts, "time": time.time()}), file=self._log)

    def begin(self, step: int, generations: Generations | None, *, world_size: int) -> None:
        """``step`` begins."""
        self.strikes.step = step
        if generations is not None and step in self.strikes.joins:
            await_newcomers(generations, missing=RANKS - world_size)

    def committed(self, step: int, *, generation: int, world_size: int, net: nn.Module) -> None:
        """The optimizer has stepped; ``step`` is counted from 1."""
        found = {"generation": generation, "hash": digest(net)}
        if generation != self._noted:
            found |= {**holds(), "world_size": world_size}
        self._noted = generation
        self.note(committed=step, **found)

    def end(self, step: int, net: nn.Module) -> None:
        """The training is over."""
        is_finite = all(bool(each.isfinite().all()) for each in net.parameters())
        self.note(end=step, hash=digest(net), finite=is_finite)
        faulthandler.cancel_dump_traceback_later()
        torch.save(net.state_dict(), self.folder / f"weights-{self.name or 'alone'}.pt")


def holds() -> dict[str, int]:
    """What this process has of the system."""
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (line.split()[1] for line in status if line.startswith("VmRSS:"))
    counts = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}
    return {"resident_kb": int(resident), **counts}
