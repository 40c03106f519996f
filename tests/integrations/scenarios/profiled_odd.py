"""Runs that end badly, and settings that are not the usual ones."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from profiled_common import STEPS, ddp, digest, network, quiet_profiler, tell, train
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler
from lightning_dist.integrations.profiler import run as profile_run


def failing(folder: Path) -> None:
    try:
        with CommProfiler(ddp(), dirpath=folder, print_summary=False) as profiler:
            train(profiler._model, fails_at=7)
    except ArithmeticError:
        tell(folder)


def told_to_end(folder: Path) -> None:
    """By the launcher, which ends all ranks when one has failed."""
    code = None
    try:
        with CommProfiler(ddp(), dirpath=folder, print_summary=False) as profiler:
            train(profiler._model, steps=8)
            os.kill(os.getpid(), signal.SIGTERM)
            train(profiler._model)
    except SystemExit as error:
        code = error.code
    tell(folder, code=code, usual=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)


def lost_at_the_end(folder: Path) -> None:
    """Rank 1 is killed after its last step, before the ranks compare clocks."""
    with CommProfiler(ddp(), dirpath=folder, html=False) as profiler:
        train(profiler._model)
        if dist.get_rank() == 1:
            os._exit(0)
    tell(folder, summary=profiler.summary is not None)
    sys.stdout.flush()
    os._exit(0)  # nobody is there for a barrier


def late_at_the_end(folder: Path) -> None:
    """Rank 1 leaves by an error that is its own, and goes on."""
    begin = time.monotonic()
    with suppress(ArithmeticError), CommProfiler(ddp(), dirpath=folder, html=False) as profiler:
        train(profiler._model)
        profile_run._TIMEOUT = 1.0
        if dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")
    tell(folder, seconds=time.monotonic() - begin)


def hanging(folder: Path) -> None:
    """Rank 1 does not come to one collective of the model."""
    model = ddp(process_group=(group := dist.new_group()))
    try:
        with CommProfiler(model, dirpath=folder, print_summary=False):
            train(model, steps=4)
            if dist.get_rank():
                raise TimeoutError("as if it hung here")
            _set_pg_timeout(timedelta(seconds=0.5), group)
            train(model, steps=1)
    except (RuntimeError, TimeoutError):
        tell(folder)


def sockets() -> int:
    """That this process has open."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(os.readlink(link).startswith("socket:") for link in links)


def twice(folder: Path) -> None:
    """On two hosts, as far as the ranks can tell."""
    profile_run.this_host = lambda: f"host-{dist.get_rank()}"
    model = ddp()
    opened = [sockets()]
    for _ in range(2):
        with quiet_profiler(model, dirpath=folder):
            train(model)
        opened.append(sockets())
    tell(folder, opened=opened)


def traced(folder: Path) -> None:
    with quiet_profiler(
        model := ddp(),
        dirpath=folder,
        torch_profiler=range(3, 5),
    ):
        train(model)
    for traced_steps in (range(3, 5), range(4, 6)):  # while it is on, and just before
        with quiet_profiler(
            model,
            dirpath=folder / "short",
            torch_profiler=traced_steps,
        ):
            train(model, steps=4)
    with quiet_profiler(model, dirpath=folder, torch_profiler=signal.SIGUSR2):
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
    with CommProfiler(model, dirpath=folder / str(os.environ["RANK"]), print_summary=False):
        train(model)
    (folder / f"truth-{os.environ['RANK']}.json").write_text("{}")


def compiled(folder: Path) -> None:
    """DDP and all is given to torch.compile, which traces what hooks on a module do."""
    torch.manual_seed(0)
    whole = DistributedDataParallel(network(), bucket_cap_mb=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with quiet_profiler(whole, dirpath=folder):
            train(torch.compile(whole, backend="aot_eager"))
    tell(folder, said=[str(each.message) for each in said], model=digest(whole))


def two_at_once(folder: Path) -> None:
    model, said = ddp(), ""
    with quiet_profiler(model, dirpath=folder):
        train(model, steps=3)
        try:
            with quiet_profiler(model, dirpath=folder / "other"):
                pass
        except ValueError as error:
            said = str(error)
        train(model, steps=9)
    tell(folder, said=said, made=(folder / "other").exists())


def destroyed(folder: Path) -> None:
    """By the training function, at its end."""
    with quiet_profiler(model := ddp(), dirpath=folder):
        train(model)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
    (folder / f"truth-{rank}.json").write_text("{}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def together(folder: Path) -> None:
    """All ranks leave by the same error; rank 1 writes its last lines after rank 0."""
    try:
        with quiet_profiler(model := ddp(), dirpath=folder) as profiler:
            train(model, steps=8)
            if dist.get_rank() == 1:
                of_session = profiler._run._session.end

                def later(reason: str) -> None:
                    while '"end"' not in (folder / "run-0" / "rank0.jsonl").read_text():
                        time.sleep(0.01)  # the run has a limit
                    of_session(reason)

                profiler._run._session.end = later
            raise ArithmeticError("the loss is odd")
    except ArithmeticError:
        tell(folder)


def steps_in_backward(folder: Path) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward as apply

    module = network()
    apply(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    model = DistributedDataParallel(module)
    with quiet_profiler(model, dirpath=folder):
        pass  # DDP takes its own hook at the first pass, where there is an accelerator
    model.register_comm_hook(None, lambda state, bucket: None)  # as it does
    tell(folder)


def closures(folder: Path) -> None:
    """LBFGS asks for several passes in a step, and gradients travel in each."""
    model = ddp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, max_eval=3)
    data = torch.randn(8, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    asked = 0

    def closure() -> torch.Tensor:
        nonlocal asked
        asked += 1
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    with quiet_profiler(model, dirpath=folder):
        for _ in range(STEPS):
            optimizer.step(closure)
    tell(folder, asked=asked)


def other_hook(folder: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    with CommProfiler(model, dirpath=folder, print_summary=False):
        train(model)
    tell(folder)


def no_folder(folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "taken").touch()
    with quiet_profiler(ddp(), dirpath=folder / "taken") as profiler:
        train(profiler._model)
    tell(folder, found=str(profiler.folder))


def no_folder_on_one(folder: Path) -> None:
    """Rank 1 is on a host where the path of rank 0 cannot be made."""
    os.chdir(folder)
    if dist.get_rank() == 1:
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        Path("profiles").touch()
    with quiet_profiler(ddp(), dirpath="profiles") as profiler:
        train(profiler._model)
    tell(folder, summary=profiler.summary is not None)


def own_folders(folder: Path) -> None:
    """Each rank has a disk of its own, as on hosts without a shared one.

    That of rank 1 has been part of another run, of which rank 0's has nothing.
    """
    own = folder / f"disk-{dist.get_rank()}"
    own.mkdir()
    if dist.get_rank() == 1:
        (own / "profiles" / "run-0").mkdir(parents=True)
        (own / "profiles" / "run-0" / "rank1.jsonl").write_text("of an older run\n")
    os.chdir(own)
    model = ddp()
    before = sockets()
    with quiet_profiler(model, dirpath="profiles") as profiler:
        train(model, steps=230)
    left = sockets() - before
    with suppress(ArithmeticError), quiet_profiler(model, dirpath="failed"):
        train(model, steps=5, fails_at=3)
    tell(
        folder,
        left=left,
        ranks=sorted(path.name for path in profiler.folder.glob("rank*")),
    )


CASES: dict[str, Callable[[Path], None]] = {
    "failing": failing,
    "told to end": told_to_end,
    "lost at the end": lost_at_the_end,
    "late at the end": late_at_the_end,
    "hanging": hanging,
    "twice": twice,
    "traced": traced,
    "alone": alone,
    "compiled": compiled,
    "closures": closures,
    "two at once": two_at_once,
    "destroyed": destroyed,
    "together": together,
    "steps in backward": steps_in_backward,
    "other hook": other_hook,
    "no folder": no_folder,
    "no folder on one": no_folder_on_one,
    "own folders": own_folders,
}
