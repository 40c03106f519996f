"""Jobs of several ranks under torch's elastic agent, with faults; run as a program.

The program imports everything once and forks: a job of ours then starts in milliseconds, with real
agents, processes and signals. ``python elastic_jobs.py jobs.json results.json``
"""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = 2  # side by side: half of a job is waiting for a rendezvous


@dataclass(frozen=True)
class Fault:
    """What happens to some ranks, once to each, in a hook of the Trainer.

    Args:
        kind: of :data:`KINDS`; or ``"flip"`` or ``"truncate"``: a file of checkpoints.
        hook: of a callback, or a place in the loop of `loop_runs`; ``"at_start"``: before that;
            ``"after_optimizer_step"``; ``"fsync"``: of the thread that writes a checkpoint.
        step: optimizer steps so far, at least.
        ranks: to which it happens.
        start: in which start of the job, counted from 0.
        skip: so many more times that the hook is met.
        after: only in a process that begins when this other fault has happened.
        count: newest checkpoints to damage.
        seed: of the place in them.
    """

    kind: str
    hook: str = "on_train_batch_start"
    step: int = 3
    ranks: Sequence[int] = (1,)
    start: int = 0
    skip: int = 0
    after: int | None = None
    count: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A training that is started ``len(worlds)`` times, each by an agent of its own.

    Args:
        worlds: ranks of each start.
        max_restarts: by the agent, within a start.
        codec: of compressed_ddp; None: Lightning's ddp.
        framework: ``"trainer"``, or one of `loop_runs.FRAMEWORKS`.
        fit: arguments of :func:`elastic_runs.fit`, or of :func:`loop_runs.train`.
        replicas: of a sharded model, in each start; none: a model that every rank holds.
        profiled: a Trainer's runs have a CommProfiler.
        limit: seconds for all of it.
    """

    name: str
    folder: str
    worlds: Sequence[int] = (2,)
    faults: Sequence[Fault] = ()
    max_restarts: int = 2
    codec: str | None = "int8"
    framework: str = "trainer"
    module: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    replicas: Sequence[int] = ()
    profiled: bool = False
    limit: float = 60.0


def selected(request: Any) -> set[str]:
    """Parameters ``name`` of the tests of this file that are run: those of slow ones may not be."""
    items = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params.get("name", "") for item in items if hasattr(item, "callspec")}


def run_jobs(
    jobs: Sequence[Job], folder: Path, *, python: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Run them in programs of their own; what became of each, by name."""
    from processes import run_together

    commands, found = [], {}
    for number in range(PROGRAMS):
        given, results = folder / f"jobs-{number}.json", folder / f"results-{number}.json"
        given.write_text(json.dumps([asdict(job) for job in jobs[number::PROGRAMS]]))
        commands.append([*python, __file__, given, results])
    limit = 60 + sum(job.limit for job in jobs)
    for command, done in zip(
        commands, run_together(commands, [{}] * PROGRAMS, limit=limit), strict=True
    ):
        done.require_success()
        found |= json.loads(Path(command[-1]).read_text())
    return found


def limit_files_of_writer(nbytes: int) -> None:
    """Let the kernel refuse what is longer: to the writer's process, as a full disk does."""
    (writer,) = psutil.Process().children()
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def make_mistake() -> None:
    """What a user's code does."""
    raise RuntimeError("a mistake of the user's")


def run_out_of_memory() -> None:
    """Allocate until the allocator raises, with a limit on this process (RLIMIT_AS)."""
    import torch

    limit = psutil.Process().memory_info().vms + _LEFT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = []
    while True:
        hoard.append(torch.ones(1 << 20))


_LEFT = 48 << 20


def damage(folder: Path, fault: Fault) -> None:
    """Damage the newest checkpoints, and leave one whole at least."""
    from lightning_dist.checkpoint.disk.scan import checkpoints

    chance = random.Random(fault.seed)
    whole = [each for each in checkpoints(str(folder)) if each.description is not None]
    for each in whole[: min(fault.count, len(whole) - 1)]:
        path = Path(each.path)
        if path.is_dir():
            path = chance.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        content = bytearray(path.read_bytes())
        at = chance.randrange(len(content))
        if fault.kind == "flip":
            content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content if fault.kind == "flip" else content[:at])


KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "requeue": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "full_disk": lambda: limit_files_of_writer(2000),
    "raise": make_mistake,
    "wait": lambda: os.read(os.pipe()[0], 1),
    "oom": run_out_of_memory,
}

Strike = Callable[[str, int], None]
"""What happens in a hook, after so many optimizer steps."""


def await_siblings(folder: Path) -> None:
    """Wait until the agent has forked all its ranks; on each of them, before it connects to it.

    The store's thread in the agent asks for the name of whoever connects, and a rank that is forked
    meanwhile inherits glibc's lock of the resolver as it is held, and stays in its first connect.
    """
    of_start = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    here = folder / "forked" / of_start
    here.mkdir(parents=True, exist_ok=True)
    (here / os.environ["LOCAL_RANK"]).touch()
    while len(os.listdir(here)) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.002)  # the job has a limit


def rank_main(job: Job, start: int) -> str:
    """One rank of one start."""
    import logging
    import warnings

    await_siblings(Path(job.folder))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, which a fork inherits
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    folder, rank = Path(job.folder), int(os.environ["RANK"])
    Path(folder / "starts").mkdir(exist_ok=True, parents=True)
    armed: list[tuple[Fault, Callable[[], None]]] = []
    for number, fault in enumerate(job.faults):
        if rank not in fault.ranks or fault.start != start:
            continue
        if fault.after is not None and not list(folder.glob(f"fired-{fault.after}-*")):
            continue
        once = _once(folder / f"fired-{number}-{rank}", fault, folder)
        if fault.hook == "at_start":
            once()
        else:
            armed.append((fault, once))
    met: Counter[int] = Counter()

    def strike(hook: str, steps: int) -> None:
        for number, (fault, once) in enumerate(armed):
            if fault.hook == hook and steps >= fault.step:
                met[number] += 1
                if met[number] > fault.skip:
                    once()

    hooks = list(dict.fromkeys(fault.hook for fault, _ in armed))
    replicas = job.replicas[start] if job.replicas else 0
    try:
        if job.framework == "trainer":
            result = _fit(job, folder, strike, hooks, replicas)
        else:
            result = _loop(job, folder, strike, hooks)
    except SystemExit as ended:
        (folder / f"exit-{start}-{rank}").write_text(str(ended.code))
        raise
    (folder / f"end-{start}-{rank}.json").write_text(json.dumps(result))
    return str(result["hash"])


def _fit(
    job: Job, folder: Path, strike: Strike, hooks: Sequence[str], replicas: int
) -> dict[str, Any]:
    from elastic_runs import Net, Numbered, ShardedNet, fit, hash_of, make_loader

    from lightning_dist import CommProfiler

    of_run = {"dirpath": folder / "profiles", "measure_links": False, "html": False}
    module = (ShardedNet if replicas else Net)(**job.module)
    trainer, module = fit(
        folder,
        *([CommProfiler(**of_run)] if job.profiled else []),
        *(_watch(hook, module, strike) for hook in hooks),
        loader=lambda: make_loader(Numbered(**job.dataset), **job.loader),
        module=module,
        **{**_strategy_of(job.codec, replicas), **job.fit},
    )
    where = {"step": trainer.global_step, "epoch": trainer.current_epoch}
    return {"hash": hash_of(module), **where, "left": _left()}


def _watch(hook: str, module: Any, strike: Strike) -> Any:
    """A callback that strikes when a hook is met, or what is not one."""
    from lightning import Callback

    callback = Callback()

    def met(trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            strike(hook, trainer.global_step)

    def watch_fsync(trainer: Any, *_: Any, **__: Any) -> None:
        """From the first step on: what is synced then is of checkpoints."""
        callback.on_train_batch_end = lambda *_, **__: None
        usual = os.fsync
        os.fsync = lambda file: (met(trainer), usual(file))[1]

    if hook == "after_optimizer_step":
        usual = module.optimizer_step
        module.optimizer_step = lambda *args: (usual(*args), met(module.trainer))[0]
    elif hook == "fsync":
        callback.on_train_batch_end = watch_fsync
    else:
        setattr(callback, hook, met)
    return callback


def _loop(job: Job, folder: Path, strike: Strike, hooks: Sequence[str]) -> dict[str, Any]:
    from loop_runs import train

    found, step = train(
        folder, job.framework, codec=job.codec, strike=strike, loader=job.loader, **job.fit
    )
    return {"hash": found, "step": step, "left": _left()}


def _left() -> list[str]:
    """Process groups of elastic restart that are still there."""
    from torch.distributed import distributed_c10d

    groups = distributed_c10d._world.pg_map
    return [each.group_desc for each in groups if each.group_desc.startswith("elastic-")]


def _strategy_of(codec: str | None, replicas: int) -> dict[str, Any]:
    from lightning_dist import (
        CompressedDDPStrategy,
        CompressedModelParallelStrategy,
        ElasticEnvironment,
    )

    if replicas:
        sharded = CompressedModelParallelStrategy(
            codec, replicate_size=replicas, min_compress_numel=0
        )
        return {"strategy": sharded, "devices": "auto"}
    if codec is None:
        world = int(os.environ["WORLD_SIZE"])
        return {"strategy": "ddp", "devices": world, "plugins": [ElasticEnvironment()]}
    return {"strategy": CompressedDDPStrategy(codec, min_compress_numel=0), "devices": "auto"}


def _once(marker: Path, fault: Fault, folder: Path) -> Callable[[], None]:
    def act() -> None:
        try:
            file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(file, repr(time.time()).encode())
        os.close(file)
        KINDS.get(fault.kind, lambda: damage(folder / "ckpt", fault))()

    return act


def _run_job(job: Job) -> dict[str, Any]:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    codes: list[str] = []
    for start, world in enumerate(job.worlds):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=f"{job.name}-{start}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"timeout": 20, "last_call_timeout": 1},
            max_restarts=job.max_restarts,
            monitor_interval=0.05,
            start_method="fork",
            local_addr="127.0.0.1",
        )
        try:
            elastic_launch(config, rank_main)(job, start)
            codes.append("ok")
        except BaseException as error:
            codes.append(f"{type(error).__name__}: {str(error)[:3000]}")
    return {"codes": codes}


def run_job(job: Job, results: Path) -> dict[str, Any]:
    """Run a job in a process group of its own, so that its limit ends all of it."""
    part = results.with_name(f"{job.name}.result")
    log = Path(job.folder)
    log.mkdir(parents=True, exist_ok=True)
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        output = os.open(log / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        code = 1
        try:
            part.write_text(json.dumps(_run_job(job)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    handle = os.pidfd_open(pid)
    import select

    ended = bool(select.select([handle], [], [], job.limit)[0])
    os.close(handle)
    if not ended:
        from processes import kill_tree

        kill_tree(pid)
    os.waitpid(pid, 0)
    result = json.loads(part.read_text()) if part.exists() else {"codes": ["no result"]}
    return {**result, "seconds": time.monotonic() - began, "hung": not ended}


def main(given: str, results: str) -> None:
    import accelerate  # noqa: F401
    import elastic_runs  # noqa: F401  (and all that it imports, once)
    import loop_runs  # noqa: F401

    import lightning_dist.frameworks.lightning.elastic.restart  # noqa: F401

    random.seed(0)
    jobs = [
        Job(**{**job, "faults": [Fault(**f) for f in job["faults"]]})
        for job in json.loads(Path(given).read_text())
    ]
    found = {job.name: run_job(job, Path(results)) for job in jobs}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
