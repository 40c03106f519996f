"""A loop whose ranks die where they are told to, and go on within their processes.

    recovering_loops.py FOLDER SETTINGS

SETTINGS is JSON: ``codec``, ``faults`` as ``[worker, place, step]`` or ``[worker, place, step,
action]`` (step null: any), ``joins`` (from a step on, or at some, wait for all newcomers that
replace lost ranks), ``spare`` (wait until that worker does, at a step), ``waits`` (for a file, at
a step), ``profile`` (a CommProfiler watches), ``mirror`` (of residuals), ``ranks``, ``per_host``
(ranks of a node),
``framework``, ``overflows`` (a GradScaler scales, and a step has an inf until it is taken again),
``dropout`` (of the inputs of a worker), ``accumulate``, ``notices`` (wait in a pass of this step
until it is known that a rank is lost), ``loads`` (a worker that dies while all load a batch of a
step), ``averages`` (of weights; ``"early"``: before the optimizer steps), ``other`` (a worker
whose script saves after other steps), ``epochs``, ``hang_timeout`` and
``accelerated`` (on the simulated device). Every rank writes what it
computes and what it has committed to ``FOLDER/<worker>.jsonl``.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from lightning_dist import CommProfiler, ElasticLoop, compress_ddp, init_process_group
from lightning_dist.elastic.loop.user_loop import UserLoop
from lightning_dist.elastic.process.lifecycle import ProcessLifecycle
from lightning_dist.elastic.recovery import worker as recovery
from lightning_dist.elastic.recovery.generations import GenerationGroups, Generations
from lightning_dist.elastic.recovery.loop import RecoverableLoop
from lightning_dist.elastic.recovery.protocol import Keys
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.failures import CollectiveError

SIZE, BATCH, EPOCHS = 60, 4, 3
LIMIT = 80.0
"""Seconds to wait for a newcomer."""


class Samples(Dataset[Any]):
    def __init__(self, size: int = SIZE, load: Callable[[], None] = lambda: None) -> None:
        self._size, self._load = size, load

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self._load()
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(6, generator=generator, dtype=torch.float64)


class Net(nn.Module):
    """Three layers in two buckets, and buffers that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def written(**facts: Any) -> str:
    """A line of what this process computes, with its start and the time."""
    start = os.environ.get("LIGHTNING_DIST_RECOVERY_STORE", "")
    return json.dumps({**facts, "start": start, "time": time.time()})


def digest(module: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()[:16]


SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
}


class Faults:
    """Kills, stops, hangs or terminates this process, or raises, where it is told to.

    Once: where all are started again, nothing happens to processes of the same names.
    """

    def __init__(self, folder: Path, told: list[list[Any]]) -> None:
        self.lifecycle: ProcessLifecycle
        self._folder = folder
        self._own = os.environ.get("LIGHTNING_DIST_WORKER", "")
        self._told = {
            (place, step): action[0] if action else "kill"
            for worker, place, step, *action in told
            if worker == self._own and not self._marker(place, step).exists()
        }
        self.step = -1

    def _marker(self, place: str, step: int | None) -> Path:
        return self._folder / f"struck-{self._own}-{step}-{place.replace(' ', '-')}"

    def begin(self, step: int, *, world: int, is_broken: Callable[[], bool]) -> None:
        """``step`` has begun here; a rank that is lost in it waits until all have begun it.

        Otherwise they could learn of its loss between two steps.
        """
        self.step = step
        begun = self._folder / f"begun-{step}"
        begun.mkdir(exist_ok=True)
        (begun / self._own).touch()
        if any(at == step for _, at in self._told):
            await_true(
                lambda: len(os.listdir(begun)) >= world or is_broken(),
                f"{world} ranks have begun step {step}",
            )

    def strike(self, place: str) -> None:
        step = self.step if (place, self.step) in self._told else None
        if (action := self._told.get((place, step))) is not None:
            self._marker(place, step).touch()
        if action == "hang":
            threading.Event().wait()
        elif action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            await_true(lambda: self.lifecycle.stop_requested, "the signal is noted")
        elif action == "out of memory":
            raise MemoryError("[test]")
        elif action == "hold":
            hold_lock(9.0)
        elif action == "wait":
            (self._folder / "waiting").touch()
            await_file(self._folder / "go on")
        elif action is not None:
            os.kill(os.getpid(), SIGNALS[action])


def hold_lock(seconds: float) -> None:
    """Let no other thread of this process run, as a long call into C does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    sys.setswitchinterval(before)


def await_true(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < end, f"not true after {LIMIT:g} s: {what}"
        time.sleep(0.005)


def await_file(path: Path) -> None:
    await_true(path.exists, f"{path} exists")


def await_newcomers(
    generations: Generations, *, missing: int, heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Wait until the next generation admits as many as are missing."""

    def are_here() -> bool:
        heartbeat()
        return generations.member.waiting >= missing

    await_true(are_here, f"{missing} newcomers wait")


def watch_groups(faults: Faults) -> None:
    """Strike where the groups of a generation are made."""
    made = GenerationGroups.enter

    def making(groups: GenerationGroups, *arguments: Any, **named: Any) -> Any:
        faults.strike("groups")
        return made(groups, *arguments, **named)

    GenerationGroups.enter = making  # type: ignore[method-assign]


def watch_places(faults: Faults, loop: type[RecoverableLoop]) -> None:
    """Strike where a state is sent and received, and where a checkpoint is written."""
    handover, receive, write = loop._handover, recovery.from_rank, loop.write

    def handing(loop: RecoverableLoop) -> Any:
        faults.strike("source")
        return handover(loop)

    def receiving(state: Any, *, rank: int, to: Sequence[int] | None = None) -> Any:
        if to is not None and dist.get_rank() in to:
            faults.strike("healed")
        return receive(state, rank=rank, to=to)

    def writing(loop: RecoverableLoop, path: str) -> None:
        faults.strike("saving")
        write(loop, path)

    loop._handover = handing  # type: ignore[method-assign]
    loop.write = writing  # type: ignore[method-assign]
    recovery.from_rank = receiving


def watch_votes(folder: Path, faults: Faults, lost: list[Any]) -> None:
    """Strike before votes; ``lost``: who does not hear an answer, of which step, and who must.

    Also before each call of the group of votes, counted within a step; ``lost`` may end with which.
    """
    launch = Channel.all_reduce
    calls: Counter[int] = Counter()
    own = os.environ.get("LIGHTNING_DIST_WORKER", "")

    def all_reduce(channel: Channel, *arguments: Any, **named: Any) -> Any:
        if channel.name != "control":
            return launch(channel, *arguments, **named)
        step = faults.step
        calls[step] += 1
        call = calls[step]
        faults.strike("before the vote")
        faults.strike(f"call {call}")
        work = launch(channel, *arguments, **named)
        wait = work.wait

        class Answer:
            def wait(self) -> object:
                found = wait()
                (folder / f"heard-{own}-{step}").touch()
                (folder / f"heard-{own}-{step}-{call}").touch()
                for worker, number, hears, *which in lost:
                    if (worker, number) == (own, step) and which in ([], [call]):
                        heard = "-".join(map(str, ("heard", hears, step, *which)))
                        await_file(folder / heard)
                        raise CollectiveError("[test] Connection closed by peer")
                return found

        return Answer()

    Channel.all_reduce = all_reduce  # type: ignore[method-assign]


@dataclass(frozen=True)
class Made:
    """What a framework has made of a model and its optimizer."""

    model: nn.Module
    optimizer: Any
    backward: Callable[[Tensor], object] = torch.Tensor.backward
    ranks: Callable[[], list[int]] = lambda: [dist.get_rank(), dist.get_world_size()]
    """Rank and world size, as the framework tells them."""
    gather: Callable[[], None] = lambda: None
    """A collective of the framework's."""


COMPRESSION: dict[str, Any] = {"min_compress_numel": 0, "compile_kernels": False}
BUCKETS = {"bucket_cap_mb": 0.0001}


def plain(module: nn.Module, optimizer: Any, codec: str, scaler: Any = None) -> Made:
    model = DistributedDataParallel(module, **BUCKETS)  # type: ignore[arg-type]
    compress_ddp(model, codec, grad_scaler=scaler, **COMPRESSION)
    return Made(model, optimizer)


def of_fabric(module: nn.Module, optimizer: Any, codec: str) -> Made:
    from lightning.fabric import Fabric

    from lightning_dist.fabric import CompressedDDPStrategy

    strategy = CompressedDDPStrategy(codec, **COMPRESSION, **BUCKETS)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(module, optimizer)

    def gather() -> None:
        gathered = fabric.all_gather(torch.tensor([fabric.global_rank]))
        assert gathered.flatten().tolist() == [0, 1, 2]
        assert fabric.is_global_zero == (fabric.global_rank == 0)

    return Made(
        model,
        optimizer,
        fabric.backward,
        lambda: [fabric.global_rank, fabric.world_size],
        gather,
    )


def of_accelerate(module: nn.Module, optimizer: Any, codec: str) -> Made:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate.utils import DistributedDataParallelKwargs

    from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin

    handlers = [CompressedDDPPlugin(codec, **COMPRESSION), DistributedDataParallelKwargs(**BUCKETS)]
    accelerator = Accelerator(kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(module, optimizer)

    def gather() -> None:
        gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert gathered.tolist() == list(range(accelerator.num_processes)) == [0, 1, 2]

    return Made(
        model,
        optimizer,
        accelerator.backward,
        lambda: [accelerator.process_index, accelerator.num_processes],
        gather,
    )


FRAMEWORKS = {"ddp": plain, "fabric": of_fabric, "accelerate": of_accelerate}


def profiled(model: nn.Module | None, folder: Path) -> CommProfiler:
    return CommProfiler(model, dirpath=folder, max_overhead=1.0, predict=False, trace=False)


def begin(folder: Path, told: dict[str, Any], loop: type[RecoverableLoop]) -> Faults:
    """What a worker does first; in a process alone, which may be one of tests, nothing strikes."""
    faults = Faults(folder, told.get("faults", []))
    own = os.environ.get("LIGHTNING_DIST_WORKER", "")
    if not own:
        return faults
    (folder / "store").write_text(os.environ["LIGHTNING_DIST_RECOVERY_STORE"])
    # Where it hangs, should it hang.
    trace = (folder / f"{own}.trace").open("w")
    faulthandler.dump_traceback_later(told.get("limit", 100), exit=True, file=trace)
    if "per_host" in told:  # workers of one machine on several nodes, so many on each
        node = int(own.split(".")[1]) // told["per_host"]
        os.environ["LIGHTNING_DIST_HOSTNAME"] = f"host{node}"
    faults.strike("warm-up")
    watch_groups(faults)
    watch_places(faults, loop)
    watch_votes(folder, faults, told.get("lost", []))
    return faults


def train(folder: Path, told: dict[str, Any]) -> nn.Module:
    own = os.environ.get("LIGHTNING_DIST_WORKER", "")
    faults = begin(folder, told, UserLoop)
    backend, device = "gloo", None
    module = Net()
    if own and told.get("accelerated"):
        sys.path.append(str(Path(__file__).parents[1]))
        from simulated_device.device import NAME, register_backend

        backend, device = register_backend(), torch.device(NAME, 0)
        module.to(device)
    module.layers[1].weight.register_hook(lambda _: faults.strike("between buckets"))
    sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.1, total_iters=20)
    made = Made(module, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaled: dict[str, Any] = {"scaler": scaler} if own and "overflows" in told else {}
    average = torch.optim.swa_utils.AveragedModel(module)
    averaged = {"average": average} if "averages" in told else {}
    if own:
        init_process_group(backend, recovery="in_process")
        framework, codec = told.get("framework", "ddp"), told.get("codec", "none")
        made = FRAMEWORKS[framework](module, sgd, codec, **scaled)
    model, optimizer = made.model, made.optimizer
    register_optimizer_step_pre_hook(lambda *_: faults.strike("after the vote"))
    log = (folder / f"{own}.jsonl").open("a", buffering=1)

    def note(**facts: Any) -> None:
        print(written(**facts), file=log)

    def load() -> None:
        """Where it is told to, a rank dies when all load a batch, and the others wait for that."""
        victim, step = told.get("loads", ("", -1))
        if loop.steps != step or recovery is None or recovery.generations.member.generation.number:
            return
        (folder / f"loads-{own}").touch()
        await_true(lambda: len([*folder.glob("loads-*")]) == 3, "3 ranks load")
        if own == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        await_true(lambda: recovery.is_broken, "a rank is lost")

    accumulate = told.get("accumulate", 1 if own else 3)
    batch_size = BATCH // accumulate if own else BATCH
    with (
        ElasticLoop(
            folder / "ckpt",
            loader=DataLoader(Samples(load=load), batch_size=batch_size, shuffle=True),
            state={
                "model": model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                **scaled,
                **averaged,
            },
            every_n_train_steps=told.get("saves", 4) + (own == told.get("other")),
            gradient_accumulation_steps=accumulate,
            seed=5,
            hang_timeout=told.get("hang_timeout", 600.0),
            device=device,
            recovery="in_process" if own else "restart",
            mirror_residuals=told.get("mirror", False),
        ) as loop,
        profiled(model, folder / "profile") if "profile" in told else nullcontext(),
    ):
        recovery, faults.lifecycle = loop._run.recovery, loop._run.session.lifecycle
        ids: list[int] = []
        for epoch in loop.epochs(told.get("epochs", EPOCHS)):
            for numbers, x in loop.batches():
                assert loop.micro_batch is not None
                begun, ids = loop.steps, [] if loop.micro_batch.begins_step else ids
                # step_done() may already enter the next generation.
                number, world, levels = -1, 1, False
                if recovery is not None:
                    number = recovery.generations.member.generation.number
                    world = loop._run.session.members.world_size
                    levels = recovery.reducer.network.intra is not None
                    joins = told.get("joins", 1 << 20)
                    if begun in joins if isinstance(joins, list) else begun >= joins:
                        missing = told.get("ranks", 3) - world
                        await_newcomers(
                            recovery.generations, missing=missing, heartbeat=loop.heartbeat
                        )
                faults.begin(
                    begun,
                    world=world,
                    is_broken=lambda: recovery is not None and recovery.is_broken,
                )
                if begun in (2, 12) and own:
                    made.gather()
                file, at = told.get("waits", ("", -1))
                if begun == at:
                    await_file(folder / file)
                spare, at = told.get("spare", ("", -1))
                while recovery is not None and begun == at:
                    if recovery.generations.member.store.check([Keys.report(-1, spare)]):
                        break
                    time.sleep(0.01)
                faults.strike("forward")
                if (begun, number) == (told.get("notices"), 0):
                    note(passed=begun + 1)
                    await_true(lambda: recovery.is_broken, "a rank is lost")
                given = functional.dropout(x) if told.get("dropout") == own else x
                loss = (model(given) - x.flip(1)).square().mean()
                if (begun, number) == (told.get("overflows"), 0):
                    loss = loss * torch.inf  # of a step that is given up
                loss = loop.scale_loss(loss)
                made.backward(scaler.scale(loss) if scaled else loss)
                if loop.micro_batch.weight:
                    ids = ids + numbers.tolist()
                if told.get("averages") == "early" and loop.sync_gradients:
                    average.update_parameters(module)
                if loop.sync_gradients:
                    ranks = made.ranks() if own else []
                    note(computed=begun + 1, ids=ids, generation=number, epoch=epoch, ranks=ranks)
                    if scaled:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    faults.strike("after the step")
                    scheduler.step()
                    optimizer.zero_grad()
                    if recovery is None or not recovery.is_given_up:
                        note(
                            committed=begun + 1,
                            generation=number,
                            hash=digest(module),
                            world=world,
                            levels=levels,
                            lr=scheduler.get_last_lr()[0],
                            scale=scaler.get_scale(),
                        )
                    loop.step_done()
                    if told.get("averages") == "late":
                        average.update_parameters(module)
    of_average = {"averaged": int(average.n_averaged), "average": digest(average)}
    note(end=loop.steps, hash=digest(module), metrics=loop.metrics(), **of_average)
    faulthandler.cancel_dump_traceback_later()
    if own.startswith("0."):
        torch.save(module.cpu().state_dict(), folder / f"weights-{own}.pt")
    return module


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))
