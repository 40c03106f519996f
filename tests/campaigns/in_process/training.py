"""A training whose ranks are struck as its plan says; see `drawing.py`.

    training.py FOLDER

``FOLDER/plan.json`` has ``codec``, ``epochs``, ``strikes`` and ``spared``. A worker writes what it
computes, what it has committed and what it holds to ``FOLDER/<worker>.jsonl``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from recovering_loops import Net, await_newcomers, digest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from lightning_dist import ElasticLoop, compress_ddp, init_process_group
from lightning_dist.elastic.recovery.groups import GenerationGroups
from lightning_dist.exchange.channel import Channel
from lightning_dist.integrations.loop.placement import LoopPlacement
from tests.campaigns.in_process.drawing import BATCH, RANKS, SAVES, SIZE, Strike

PAUSE, LONG_PAUSE = 0.5, 3.0
"""Seconds of a straggler, and of a worker that is continued when it has been left out."""


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(6, generator=generator, dtype=torch.float64)


class Strikes:
    """Those that this process may meet; each is met once in a job."""

    def __init__(self, folder: Path, strikes: list[Strike], spared: int | None) -> None:
        self._folder, self._strikes = folder, strikes
        own = os.environ.get("LIGHTNING_DIST_WORKER", "")
        self.local_rank = int(own.split(".")[1]) if own else -2
        self._is_spared = self.local_rank == spared
        self.step = -1

    def met(self, place: str) -> None:
        """This process is at ``place``."""
        for each in self._strikes:
            here = each.local_rank in (self.local_rank, -1) and not self._is_spared
            if not here or each.place != place or (each.after < 0 and self.step < each.step):
                continue
            if each.after >= 0 and not self._marker(each.after).exists():
                continue
            try:
                self._marker(each.number).open("x").close()
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
            raise RuntimeError("planted")
        if action in ("pause", "stop for long"):
            seconds = PAUSE if action == "pause" else LONG_PAUSE
            wakes = ["sh", "-c", f"sleep {seconds}; kill -CONT {own}"]
            subprocess.Popen(wakes, start_new_session=True)
        os.kill(own, signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def watch(self) -> None:
        """Meet those in places that are not the user's."""
        launch, made = Channel.all_reduce, GenerationGroups.made
        write, handover = LoopPlacement.write, LoopPlacement._handover
        strikes = self

        def all_reduce(channel: Channel, *arguments: Any, **named: Any) -> Any:
            if channel.name != "control":
                return launch(channel, *arguments, **named)
            strikes.met("before the vote")
            work = launch(channel, *arguments, **named)
            wait = work.wait

            class Answer:
                def wait(self) -> object:
                    found = wait()
                    strikes.met("after the answer")
                    return found

            return Answer()

        def making(groups: GenerationGroups, *arguments: Any, **named: Any) -> Any:
            strikes.met("groups")
            return made(groups, *arguments, **named)

        def writing(placement: LoopPlacement, *arguments: Any) -> None:
            strikes.met("saving")
            write(placement, *arguments)

        def handing(placement: LoopPlacement) -> Any:
            strikes.met("source")
            return handover(placement)

        Channel.all_reduce = all_reduce  # type: ignore[method-assign]
        GenerationGroups.made = making  # type: ignore[method-assign]
        LoopPlacement.write = writing  # type: ignore[method-assign]
        LoopPlacement._handover = handing  # type: ignore[method-assign]
        self._watch_healing()

    def _watch_healing(self) -> None:
        from lightning_dist.integrations.torch import recovery

        receive: Callable[..., Any] = recovery.from_rank

        def receiving(state: Any, *, rank: int, to: Sequence[int] | None = None) -> Any:
            if to is not None and torch.distributed.get_rank() in to:
                self.met("healed")
            return receive(state, rank=rank, to=to)

        recovery.from_rank = receiving


def holds() -> dict[str, int]:
    """What this process has of the system."""
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (line.split()[1] for line in status if line.startswith("VmRSS:"))
    counts = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}
    return {"resident_kb": int(resident), **counts}


def train(folder: Path) -> nn.Module:
    told = json.loads((folder / "plan.json").read_text())
    own = os.environ.get("LIGHTNING_DIST_WORKER", "")
    if own:  # where it hangs, should it hang
        trace = (folder / f"{own}.trace").open("w")
        faulthandler.dump_traceback_later(told["limit"], exit=True, file=trace)
    strikes = Strikes(folder, [Strike(**each) for each in told["strikes"]], told["spared"])
    strikes.watch()
    joins = {each.step - before for each in strikes._strikes for before in (1, 2)}
    module = Net()
    model: nn.Module = module
    if own:
        init_process_group("gloo", recovery="in_process")
        model = DistributedDataParallel(module, bucket_cap_mb=0.0001)
        compress_ddp(
            model, told["codec"], min_compress_numel=0, commit="deferred", compile_kernels=False
        )
    module.layers[1].weight.register_hook(lambda _: strikes.met("between buckets"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    register_optimizer_step_pre_hook(lambda *_: strikes.met("after the vote"))
    log = (folder / f"{own or 'alone'}.jsonl").open("a", buffering=1)

    def note(**facts: Any) -> None:
        print(json.dumps({**facts, "time": time.time()}), file=log)

    note(process=os.getpid())
    with ElasticLoop(
        folder / ("ckpt" if own else "ckpt-alone"),
        loader=DataLoader(Samples(), batch_size=BATCH, shuffle=True),
        state={"model": model, "optimizer": optimizer},
        every_n_train_steps=SAVES,
        gradient_accumulation_steps=1 if own else RANKS,
        seed=5,
        recovery="in_process" if own else "restart",
    ) as loop:
        recovery = loop._run.recovery
        ids: list[int] = []
        last = -2
        for epoch in loop.epochs(told["epochs"]):
            for numbers, x in loop.batches():
                begun = strikes.step = loop.steps
                number = -1 if recovery is None else recovery.generations.now.number
                if recovery is not None and begun in joins:
                    missing = RANKS - loop._run.session.members.world_size
                    await_newcomers(recovery.generations, missing=missing)
                strikes.met("forward")
                loss = (model(x) - x.flip(1)).square().mean()
                if loop.micro_batch is not None and loop.micro_batch.weight:
                    ids = ids + numbers.tolist()
                if loop.sync_gradients:
                    note(computed=begun + 1, ids=ids, generation=number, epoch=epoch)
                    ids = []
                loop.scale_loss(loss).backward()
                if not loop.sync_gradients:
                    continue
                optimizer.step()
                if recovery is None or not recovery.is_given_up:
                    found = {"generation": number, "hash": digest(module)}
                    if number != last:
                        found |= {**holds(), "world_size": loop._run.session.members.world_size}
                    note(committed=begun + 1, **found)
                    last = number
                strikes.met("after the step")
                optimizer.zero_grad()
                loop.step_done()
            strikes.met("end of an epoch")
    is_finite = all(bool(each.isfinite().all()) for each in module.parameters())
    note(end=loop.steps, hash=digest(module), finite=is_finite)
    faulthandler.cancel_dump_traceback_later()
    torch.save(module.state_dict(), folder / f"weights-{own or 'alone'}.pt")
    return module


if __name__ == "__main__":
    train(Path(sys.argv[1]))
