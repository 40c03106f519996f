"""One rank of the convergence benchmark: trains every row with every seed over gloo.

The launcher, below, starts it and receives what rank 0 reports.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence.tasks import (
    MIN_COMPRESS_NUMEL,
    WARM_SHARE,
    DigitsSettings,
    DigitsTask,
    GptSettings,
    GptTask,
    Job,
    Refused,
    Run,
)
from lightning_dist import compress_ddp
from lightning_dist.codecs import resolve_codec
from lightning_dist.integrations.networks import Groups, new_groups

TIMEOUT = timedelta(seconds=60)  # of every collective: a hang is an error
READY = "ready"
DONE = "done"


class Task(Protocol):
    """What a task offers; see `tasks.py`."""

    @property
    def settings(self) -> Any: ...
    def model(self) -> nn.Module: ...
    def optimizer(
        self, model: nn.Module, *, own_momentum: bool
    ) -> tuple[torch.optim.Optimizer, LambdaLR]: ...
    def batches(self, seed: int) -> Iterator[Any]: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...
    def before_step(self, model: nn.Module) -> None: ...
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...


def rank_main(
    rank: int, world_size: int, jobs: Sequence[Job], seeds: Sequence[int], store: str, results: Any
) -> None:
    """All jobs with all seeds; rank 0 puts `READY`, then a `Run` or `Refused` each, then `DONE`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # That compression does not pay on a loopback is no news here.
    logging.getLogger("lightning_dist").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    # Once for all runs: a gloo group that is destroyed right after its last collective may hang.
    groups = new_groups(dist.group.WORLD, timeout=TIMEOUT)
    kinds = {(job.task, job.steps) for job in jobs}
    tasks = {kind: make_task(*kind, rank=rank, world_size=world_size) for kind in kinds}
    report = results.put if rank == 0 else _ignore
    report(READY)
    for job in jobs:
        for seed in seeds:
            try:
                result: Run | Refused = train(
                    tasks[job.task, job.steps], job, seed=seed, groups=groups
                )
            except CannotStart as refusal:  # on every rank alike, before anything is exchanged
                result = Refused(job=job, reason=str(refusal))
            report(result)
            if isinstance(result, Refused):
                break
    report(DONE)
    dist.barrier()
    dist.destroy_process_group()


class CannotStart(Exception):
    """`compress_ddp` refused the row's settings; the message is its own."""


def train(task: Task, job: Job, *, seed: int, groups: Groups) -> Run:
    """One training from the weights and the data order that belong to the seed."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = task.model()
    ddp = DistributedDataParallel(model)
    handle, own_momentum, feedback = None, False, None
    steps: int = task.settings.steps
    if job.codec is not None:
        try:
            codec = resolve_codec(job.codec)
            own_momentum = codec.momentum_correction > 0
            feedback = job.error_feedback and codec.keeps_residual and not codec.lossless
            handle = compress_ddp(
                ddp,
                codec,
                error_feedback="auto" if job.error_feedback else False,
                # Not above the codec's own limit: casts compress everything, also here.
                min_compress_numel=min(MIN_COMPRESS_NUMEL, codec.min_numel),
                start_step=round(WARM_SHARE * steps) if job.warm else 0,
                compile_kernels=False,
                groups=groups,
            )
        except ValueError as error:
            raise CannotStart(str(error)) from error
    optimizer, schedule = task.optimizer(model, own_momentum=own_momentum)
    if job.onebit:
        assert handle is not None
        assert isinstance(task, GptTask)
        optimizer, schedule = task.onebit_adam(model, round(WARM_SHARE * steps), schedule)
        optimizer.attach(handle)
    batches = task.batches(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(ddp, next(batches)).backward()
        if not job.onebit:  # it would clip momenta
            task.before_step(model)
        optimizer.step()
        schedule.step()
    identical = same_on_all_ranks(model)
    ratio = 1.0
    if handle is not None:
        ratio = handle.comm_stats()["ratio"]
        handle.close()
    return Run(
        job=job,
        seed=seed,
        metrics=task.evaluate(model) if dist.get_rank() == 0 else {},
        error_feedback=feedback,
        bytes_ratio=ratio,
        identical=identical,
        seconds=time.perf_counter() - began,
    )


def make_task(name: str, steps: int | None, *, rank: int, world_size: int) -> Task:
    """A task with its data, loaded once for all runs."""
    chosen = {} if steps is None else {"steps": steps}
    if name == "gpt":
        return GptTask(GptSettings(**chosen), rank=rank, world_size=world_size)
    return DigitsTask(DigitsSettings(**chosen), rank=rank, world_size=world_size)


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank holds the same parameters, bit by bit. Collective."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().data)
    mine = torch.tensor([int.from_bytes(digest.digest(), "little") >> 1])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(bool(other == mine) for other in everyone)


def _ignore(_: object) -> None:
    """The other ranks report nothing."""


_RANK_FAILED = (mp.ProcessRaisedException, mp.ProcessExitedException)
_POLL_S = 0.5
_SILENCE_S = 2 * TIMEOUT.total_seconds()  # no run takes this long: the ranks hang
_START_S = 300.0  # imports on a busy machine
_END_S = 30.0
_LONGEST_REASON = 500


class WorldFailed(RuntimeError):
    """The ranks did not even start."""


def run_jobs(
    jobs: Sequence[Job], *, world_size: int, seeds: Sequence[int]
) -> Iterator[Run | Refused]:
    """Every job with every seed, in this order; a refused job is reported once."""
    left = list(jobs)
    while left:
        finished = 0
        try:
            for result in _one_world(left, world_size=world_size, seeds=seeds):
                yield result
                finished += 1
                if isinstance(result, Refused) or finished == len(seeds):
                    left, finished = left[1:], 0
        except _Broken as broken:
            yield Refused(job=left[0], reason=f"broke: {broken}")
            left = left[1:]


class _Broken(Exception):
    """A world ended before its jobs did."""


def _one_world(
    jobs: Sequence[Job], *, world_size: int, seeds: Sequence[int]
) -> Iterator[Run | Refused]:
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (world_size, list(jobs), list(seeds), str(Path(directory) / "store"), results)
        ranks = mp.spawn(rank_main, args=arguments, nprocs=world_size, join=False)
        try:
            try:
                _next(results, ranks, within_s=_START_S, expected=READY)
            except _Broken as broken:
                raise WorldFailed(str(broken)) from None
            while (result := _next(results, ranks, within_s=_SILENCE_S)) != DONE:
                yield result
            _wait_for(ranks)
        finally:
            for process in ranks.processes:
                process.kill()  # of those that have ended this does nothing
                process.join()


def _next(results: Any, ranks: Any, *, within_s: float, expected: str | None = None) -> Any:
    """The next report of rank 0."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            result = results.get(timeout=_POLL_S)
        except queue.Empty:
            try:
                ended = ranks.join(timeout=0)
            except _RANK_FAILED as error:
                raise _Broken(_last_line(str(error))) from None
            if ended:
                raise _Broken("all ranks ended without a report") from None
            continue
        if expected is not None and result != expected:
            raise _Broken(f"expected {expected!r} first, got {result!r}")
        return result
    raise _Broken(f"no report within {within_s:.0f} s")


def _wait_for(ranks: Any) -> None:
    """Let the ranks end by themselves; all results are here, so a failure now is not one."""
    deadline = time.monotonic() + _END_S
    try:
        while time.monotonic() < deadline and not ranks.join(timeout=_POLL_S):
            pass
    except _RANK_FAILED:
        pass


def _last_line(text: str) -> str:
    """Of a traceback: what went wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_REASON] if lines else text
