"""Runs of two ranks under CommProfiler, one after the other: FOLDER CASE...

Ranks are forks of this process, which has imported everything. What a rank knows that its profile
has to find out goes to FOLDER/<case>/truth-<rank>.json.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

faulthandler.dump_traceback_later(110, exit=True)
os.environ["TORCH_FR_BUFFER_SIZE"] = "200"

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, WandbLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import lightning_dist  # noqa: E402
from lightning_dist import CommProfiler, compress_ddp  # noqa: E402
from lightning_dist.codecs import Int8  # noqa: E402
from lightning_dist.reducer.block_chunk import BlockChunk  # noqa: E402

STEPS = 12
LIMIT = timedelta(seconds=60)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def tell(folder: Path, **truth: Any) -> None:
    (folder / f"truth-{dist.get_rank()}.json").write_text(json.dumps(truth))


def busy(seconds: float) -> None:
    """What a slow rank does; planted, and measured by who plants it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def train(
    model: nn.Module,
    *,
    steps: int = STEPS,
    late: Callable[[int], float] = lambda step: 0.0,
    fails_at: int | None = None,
) -> list[int]:
    """When each backward pass began on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    begun = []
    for step in range(steps):
        loss = model(torch.randn(8, 256, generator=generator)).square().mean()
        busy(late(step))
        if step == fails_at:
            raise ArithmeticError("the loss is odd")
        begun.append(time.monotonic_ns())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return begun


def digest(model: nn.Module) -> str:
    return repr([p.double().sum().item() for p in model.parameters()])


def ddp(**arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network(), bucket_cap_mb=0.3, **arguments)


def noted(call: Callable[..., Any], launched: list[int]) -> Callable[..., Any]:
    """``call``, which notes when it is called for gradients."""

    def noting(*given: Any, **named: Any) -> Any:
        if given[0].numel() > 1000 and named.get("async_op"):
            launched.append(time.monotonic_ns())
        return call(*given, **named)

    return noting


def timed(call: Callable[..., Any], planted: float, spent: list[float]) -> Callable[..., Any]:
    """``call``, which takes so many seconds longer and notes how long it took."""

    def timing(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        busy(planted)
        found = call(*given, **named)
        spent.append(time.perf_counter() - begin)
        return found

    return timing


def skew(folder: Path, *, codec: str | None) -> None:
    """One collective in each step, whose launch is seen here too."""
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    if codec is not None:
        compress_ddp(model, codec, compile_kernels=False)
    late = {4: 0.05, 6: 0.1, 8: 0.1} if dist.get_rank() == 1 else {}
    launched: list[int] = []
    for name in ("all_reduce", "all_gather_single"):
        setattr(dist, name, noted(getattr(dist, name), launched))
    with CommProfiler(model, dirpath=folder, budget=1, show=False):
        train(model, late=lambda step: late.get(step, 0.0))
    tell(folder, launched=launched)


def codec_time(folder: Path) -> None:
    """Every encoding takes a little longer, and what comes before the exchange is timed here."""
    spent: list[float] = []
    for name, planted in (("encode", 0.01), ("finite", 0.0), ("issue", 0.0)):
        setattr(BlockChunk, name, timed(getattr(BlockChunk, name), planted, spent))
    model = ddp()
    compress_ddp(model, "int8", compile_kernels=False)
    with CommProfiler(model, dirpath=folder, budget=1, show=False):
        train(model)
    tell(folder, encode_ms=1e3 * sum(spent) / STEPS)


def same_bits(folder: Path) -> None:
    found = {}
    for codec in (None, "int8"):
        for profiled in (False, True):
            model = ddp()
            if codec is not None:
                compress_ddp(model, codec, compile_kernels=False)
            if profiled:
                with CommProfiler(model, dirpath=folder, error_every=1, show=False, html=False):
                    train(model)
            else:
                train(model)
            found[f"{codec} {profiled}"] = digest(model)
    tell(folder, **found)


@dataclass(frozen=True)
class Losing(Int8):
    """Says the opposite of a fifth of what it is given: a residual grows by that in each step."""

    def decode(self, payload: Any, dtype: torch.dtype, keys: Any = None) -> torch.Tensor:
        return -0.2 * super().decode(payload, dtype, keys)


def residual(folder: Path, codec: str | Int8) -> None:
    """One bucket, so that it is looked at often."""
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    compress_ddp(model, codec, error_feedback=True, compile_kernels=False)
    with CommProfiler(model, dirpath=folder, budget=1, error_every=1, html=False):
        train(model, steps=150)
    tell(folder)


def accumulation(folder: Path) -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with CommProfiler(model, dirpath=folder, budget=1, show=False):
        for _ in range(6):
            with model.no_sync():
                model(torch.ones(2, 256)).sum().backward()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 256))
                busy(0.05)
                model(torch.ones(2, 256))
    tell(folder)


def failing(folder: Path) -> None:
    try:
        with CommProfiler(ddp(), dirpath=folder, show=False) as profiler:
            train(profiler._model, fails_at=7)
    except ArithmeticError:
        tell(folder)


def hanging(folder: Path) -> None:
    """Rank 1 does not come to one collective of the model."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = ddp(process_group=group)
    try:
        with CommProfiler(model, dirpath=folder, show=False):
            train(model, steps=4 if dist.get_rank() else 5)
            if dist.get_rank():
                raise TimeoutError("as if it hung here")
    except (RuntimeError, TimeoutError):
        tell(folder)


def twice(folder: Path) -> None:
    model = ddp()
    for _ in range(2):
        with CommProfiler(model, dirpath=folder, show=False):
            train(model)
    tell(folder)


def zoomed(folder: Path) -> None:
    with CommProfiler(model := ddp(), dirpath=folder, budget=1, zoom=range(3, 5), show=False):
        train(model)
    with CommProfiler(model, dirpath=folder, budget=1, zoom=signal.SIGUSR2, show=False):
        train(model, steps=4)
        os.kill(os.getpid(), signal.SIGUSR2)
        train(model)
    tell(folder, usual=signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL)


def alone(folder: Path) -> None:
    """A group of one rank, as on a machine with one device."""
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = ddp()
    with CommProfiler(model, dirpath=folder / str(os.environ["RANK"]), show=False):
        train(model)
    (folder / f"truth-{os.environ['RANK']}.json").write_text("{}")


def other_hook(folder: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    with CommProfiler(model, dirpath=folder, show=False):
        train(model)
    tell(folder)


def no_folder(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "taken").touch()
    with CommProfiler(ddp(), dirpath=folder / "taken", show=False) as profiler:
        train(profiler._model)
    tell(folder, found=str(profiler.folder))


def own_folders(folder: Path) -> None:
    """Each rank has a disk of its own, as on hosts without a shared one."""
    own = folder / f"disk-{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    with CommProfiler(ddp(), dirpath="profiles", show=False) as profiler:
        train(profiler._model, steps=230)
    tell(folder, ranks=sorted(path.name for path in profiler.folder.glob("rank*")))


class Module(L.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.net, self.fails_at = network(), fails_at

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise ArithmeticError("the loss is odd")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        busy(0.02)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(96, 256)), batch_size=4)


def fit(folder: Path, profiler: CommProfiler, **settings: Any) -> L.Trainer:
    module = settings.pop("module", None) or Module(settings.pop("fails_at", -1))
    trainer = L.Trainer(
        **{
            "strategy": "compressed_ddp",
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 2,
            "log_every_n_steps": 5,
            "limit_val_batches": 2,
            "default_root_dir": folder,
            "callbacks": [profiler],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "logger": False,
            **settings,
        }
    )
    trainer.fit(module, loader(), loader())
    return trainer


def lightning(folder: Path, *, strategy: str) -> None:
    loggers = [CSVLogger(folder, name="csv", version=0)]
    if strategy == "compressed_ddp":
        loggers.append(WandbLogger(save_dir=folder, offline=True, id="profiled"))
    profiler = CommProfiler(csv=True)
    fit(folder, profiler, strategy=strategy, logger=loggers)
    if len(loggers) > 1:
        loggers[1].experiment.finish()  # forks of multiprocessing have no atexit
    tell(folder)


def lightning_failing(folder: Path) -> None:
    try:
        fit(folder, CommProfiler(), fails_at=9)
    except ArithmeticError:
        tell(folder)


def lightning_told_to_end(folder: Path) -> None:
    class Told(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 9:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit(folder, CommProfiler(), module=Told())
    except SystemExit:
        tell(folder)


def fabric(folder: Path) -> None:
    fabric = L.Fabric(strategy="compressed_ddp", accelerator="cpu", devices=2)
    fabric.launch()
    model = fabric.setup_module(network())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    with CommProfiler(model, dirpath=folder, show=False):
        for _ in range(STEPS):
            fabric.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
    tell(folder)


def accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        module := network(), torch.optim.SGD(module.parameters(), lr=0.01)
    )
    compress_ddp(model, "int8", compile_kernels=False)
    with CommProfiler(model, dirpath=folder, show=False):
        for _ in range(STEPS):
            accelerator.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
    tell(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "skew ddp": lambda folder: skew(folder, codec=None),
    "skew int8": lambda folder: skew(folder, codec="int8"),
    "codec time": codec_time,
    "same bits": same_bits,
    "residual healthy": lambda folder: residual(folder, "topk:ratio=0.05"),
    "residual growing": lambda folder: residual(folder, Losing()),
    "accumulation": accumulation,
    "failing": failing,
    "hanging": hanging,
    "twice": twice,
    "zoomed": zoomed,
    "alone": alone,
    "other hook": other_hook,
    "no folder": no_folder,
    "own folders": own_folders,
    "lightning compressed_ddp": lambda folder: lightning(folder, strategy="compressed_ddp"),
    "lightning ddp": lambda folder: lightning(folder, strategy="ddp"),
    "lightning failing": lightning_failing,
    "lightning told to end": lightning_told_to_end,
    "fabric": fabric,
    "accelerate": accelerate,
}


def run_case(name: str, folder: Path, rank: int, ports: Any) -> None:
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(ports.get()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    CASES[name](folder)
    dist.barrier()  # a rank that leaves with messages unread resets the connections of others


def main() -> None:
    fork = multiprocessing.get_context("fork")
    assert lightning_dist.__version__
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name.replace(" ", "-")
        folder.mkdir()
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            GROUP_RANK="0",
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID=name,
        )
        ports = fork.SimpleQueue()
        ranks = [fork.Process(target=run_case, args=(name, folder, r, ports)) for r in range(2)]
        for each in ranks:
            each.start()
        # Only now: a child of a process with a thread may find a lock that nobody opens any more.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        for _ in ranks:
            ports.put(store.port)
        for each in ranks:
            each.join(60)
            each.kill()
        del store
        print(name, [each.exitcode for each in ranks], flush=True)


if __name__ == "__main__":
    main()
