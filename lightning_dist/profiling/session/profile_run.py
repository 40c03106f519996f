"""A profile of one DistributedDataParallel, from its begin to the report; no framework needed."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.base.accelerator import has_streams, is_accelerator
from lightning_dist.base.private import set_group_timeout
from lightning_dist.base.shared_folder import replace_file
from lightning_dist.base.versions import versions
from lightning_dist.elastic.recovery.generations import is_alone
from lightning_dist.elastic.recovery.member import RecoveryEnvironment
from lightning_dist.elastic.recovery.protocol import Worker
from lightning_dist.measurement.microbenchmark import clock_of
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.ddp_hook import (
    Watching,
    is_watched,
    watch_allreduce,
    why_not_watched,
)
from lightning_dist.profiling.capture.events import ErrorRecord, RankRecord, StepRecord
from lightning_dist.profiling.capture.files import (
    await_ends,
    gather_records,
    new_run_folder,
    ranks_apart,
)
from lightning_dist.profiling.capture.profile_session import (
    ProfileSession,
    ProfileSessionSettings,
    TorchTracer,
    dump_flight_record,
)
from lightning_dist.profiling.links import end_group, first_sentence, measure_links, read_offset
from lightning_dist.profiling.report.files import Written, to_json, write_files
from lightning_dist.profiling.run import Run, read_run
from lightning_dist.profiling.session.models import LocalModel, ShardedModel
from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.profiling.whatif.predict import (
    MEASURES,
    Costs,
    measure_costs,
    runs_compiled,
    with_whatif,
    write_costs,
)
from lightning_dist.ranks import host_name
from lightning_dist.ranks.agreement import new_group_of_all
from lightning_dist.ranks.facts import all_facts
from lightning_dist.ranks.launch import Launch
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.arguments import Reports
from lightning_dist.sync.base import sync_of

_OF_RANK_0 = (
    *("schema", "started", "script"),
    *("world_size", "groups", "codec", "backend", "device", "cores"),
)


def rank_metadata(
    model: DistributedDataParallel,
    reducer: Reducer | None,
    *,
    node: str,
    worker: Worker | None = None,
) -> RankRecord:
    """The first line of the file of this rank; ``reducer``: of ``model``, if it is compressed.

    Args:
        worker: this process, where ranks change; the file is of its place.
    """
    compression = _compression_of(model, reducer)
    if reducer is None:
        groups = {"flat": dist.get_process_group_ranks(model.process_group)}
    else:
        channels = reducer.network.channels
        groups = {channel.name: dist.get_process_group_ranks(channel.group) for channel in channels}
    return RankRecord(
        rank=dist.get_rank() if worker is None else place_of(worker),
        world_size=(
            dist.get_world_size()
            if worker is None
            else max(Launch.from_env().world_size, place_of(worker) + 1)
        ),
        node=node,
        groups=groups,
        clock=time.monotonic_ns(),
        unix=time.time(),
        codec="ddp" if compression is None else compression.comm_config()["codec"],
        backend=dist.get_backend(model.process_group),
        device=model.device.type,
        pid=os.getpid(),
        cores=len(os.sched_getaffinity(0)),
        unseen="" if compression is not None else why_not_watched(model),
        versions=versions(),
        script=sys.argv[0],
        state_update="" if reducer is None else reducer.comm_config()["state_update"],
        worker="" if worker is None else str(worker),
        fsdp=model.kind if isinstance(model, ShardedModel) else "",
        sync_every=model.updates.settings.sync_every if isinstance(model, LocalModel) else 0,
    )


def _compression_of(model: DistributedDataParallel, reducer: Reducer | None) -> Reports | None:
    return model.exchange if isinstance(model, ShardedModel) else reducer


def place_of(worker: Worker) -> int:
    """The rank that a worker has while nobody is lost, where all nodes have equally many."""
    return worker.node * (Launch.from_env().local_world_size or 1) + worker.local_rank


def run_metadata(
    model: DistributedDataParallel,
    reducer: Reducer | None,
    of_rank: RankRecord,
    *,
    nodes: Sequence[str],
    settings: ProfileSessionSettings,
) -> bytes:
    """Content of ``meta.json``, which rank 0 writes when a profile begins."""
    compression = _compression_of(model, reducer)
    gradients = [parameter for parameter in model.parameters() if parameter.requires_grad]
    content: dict[str, Any] = {
        **{name: getattr(of_rank, name) for name in _OF_RANK_0},
        "nodes": list(nodes),
        "compression": None if compression is None else compression.comm_config(),
        "gradients": {
            "parameters": sum(gradient.numel() for gradient in gradients),
            "bytes": sum(gradient.nbytes for gradient in gradients),
            "bucket_bytes_cap": model.bucket_bytes_cap,
        },
        "profiler": asdict(settings),
        "versions": {"python": platform.python_version(), **of_rank.versions},
    }
    return to_json(content).encode() + b"\n"


def why_not_in_detail(model: DistributedDataParallel, reducer: Reducer | None = None) -> str:
    """Reason why events within a step cannot be timed; empty if they can."""
    if isinstance(model, LocalModel):
        return model.why_not_in_detail()
    if reducer is not None and reducer.settings.delay:
        return "with delay=1 an exchange ends in the step after its own"
    kind = model.device.type
    if kind == "cpu":
        return ""
    if not has_streams(model.device):
        return f"the times of work on {kind} are not measured, because it has no streams"
    if model.is_multi_device_module:
        return "the model is on several GPUs of one process, and only one is timed"
    backends = dist.get_backend_config(model.process_group)
    if dict(pair.split(":") for pair in backends.split(",")).get(kind) in (None, "gloo", "mpi"):
        return f"work on a GPU is timed where NCCL exchanges the gradients, here it is {backends}"
    return ""


_TIMEOUT = 60.0
"""Seconds for the last steps of an accelerator, and for ranks to come to the end."""
_GATHER_TIMEOUT = 600.0
"""Seconds for records of other nodes to travel."""
_TOGETHER = 2.0
"""Seconds in which ranks end that end by the same error."""
NO_LINKS = "n/a, ranks that recover in process synchronise at the end only"
_WAITING = (
    "waiting for the other ranks until the timeout of the process group: every rank must enter "
    "CommProfiler at the same point of the program"
)


class ProfileRun:
    """Watches ``model`` until it is closed. Made by all ranks, at the same point of the program.

    Args:
        parent: of the folder of this run; ranks may have different ones, that of rank 0 counts.
        first: number of the step that comes next.
        on_step, on_error: called with every step of this rank that nothing disturbs, and every
            compression error.
        measure_links: measure them first.
        torch_profiler: steps, or a signal after which steps are traced by ``torch.profiler``.
        on_problem: called with what goes wrong on this rank, which others may not know of.
        predict: measure what codecs cost when the training is over, on rank 0.
        leads: whether this rank makes the report, where ranks recover within their processes.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        parent: str | Path,
        settings: ProfileSessionSettings,
        first: int = 0,
        on_step: Callable[[StepRecord], None] = lambda step: None,
        measure_links: bool = True,
        torch_profiler: range | Signals | None = None,
        on_error: Callable[[ErrorRecord], None] = lambda error: None,
        on_problem: Callable[[str], None] = lambda problem: None,
        predict: bool = True,
        leads: Callable[[], bool] = lambda: dist.get_rank() == 0,
    ) -> None:
        self._leads = leads
        self._predicts, self._device = predict, model.device
        self._has_finished = False
        self.reasons: list[str] = []
        """Unmeasured values, and the reasons."""
        sync = sync_of(model.module)
        self._reducer = None if sync is None else sync.reducer
        if _is_profiled(model, self._reducer):
            raise ValueError(
                "This model is profiled already, and one CommProfiler at a time can see its "
                "gradients; leave one out, or let the other end first"
            )
        recovers = self._reducer is not None and self._reducer.recovers
        self._environment = RecoveryEnvironment.from_env() if recovers else None
        if not recovers and is_alone():
            raise ValueError(
                "This process has not joined the others yet, so its profile would be of one rank; "
                "enter CommProfiler inside of `with ElasticLoop(..., recovery='in_process')`"
            )
        rank = dist.get_rank()
        if self._environment is None:
            with log_if_slow(_TIMEOUT, on_problem, _WAITING):
                self._group: dist.ProcessGroup | None = new_group_of_all("profile")
            self._meet(parent, rank)
        else:
            # Others may be in the middle of a step: nothing is exchanged before the end.
            self._group, self._nodes = None, [host_name()] * dist.get_world_size()
            self._apart: list[int] = []
            self.folder = self._agreed_folder(Path(parent), self._environment)
            assert self._reducer is not None
            first, measure_links = self._reducer.step, False
            self.reasons.append(f"links: {NO_LINKS}")
        in_detail = settings.in_detail
        if in_detail and (why_not := why_not_in_detail(model, self._reducer)):
            in_detail = False
            self.reasons.append(
                f"phases, buckets and compression errors: n/a, {why_not}; step times are taken"
            )
        node = self._nodes[rank]
        worker = None if self._environment is None else self._environment.worker
        self.metadata = rank_metadata(model, self._reducer, node=node, worker=worker)
        if rank == 0 and not (self.folder / "meta.json").exists():
            try:
                meta = run_metadata(
                    model, self._reducer, self.metadata, nodes=self._nodes, settings=settings
                )
                replace_file(self.folder / "meta.json", meta)
            except OSError as error:  # lines and reports tell most of it too
                on_problem(f"{error.filename}: {error.strerror}; there is no meta.json")
        self._tracer: TorchTracer | None = None
        self._session = ProfileSession(
            self.folder,
            self.metadata,
            settings=replace(settings, in_detail=in_detail),
            first=first,
            device_clock=clock_of(model.device) if in_detail else None,
            begin_step=self._begin_step,
            on_step=on_step,
            on_error=on_error,
            on_problem=on_problem,
        )
        if self._group is not None:
            self._compare_clocks()
        if measure_links and in_detail:
            self._measure_links(model)
        if torch_profiler is not None:
            self._tracer = TorchTracer(
                self.folder, rank=rank, wanted=torch_profiler, on_problem=on_problem
            )
            self._session.is_disturbed = self._begin_step(first)
        if self._reducer is not None:
            self._reducer.observe(self._session.recorder)
        elif self.metadata.unseen:
            self.reasons.append(f"buckets: n/a, {self.metadata.unseen}")
        elif not isinstance(model, ShardedModel):
            self._watch_allreduce(model)
        timer = self._session.timer
        if isinstance(model, LocalModel):
            stop = model.watch_steps(timer)
        else:
            stop = Watching(model, timer).stop
        self._watching: ExitStack | None = ExitStack()
        if isinstance(model, ShardedModel):
            self._watching.enter_context(model.watch_collectives(self._session.recorder))
        self._watching.callback(stop)

    def _meet(self, parent: str | Path, rank: int) -> None:
        """Agree on a folder, and know who sees it. Collective."""
        assert self._group is not None
        folder = new_run_folder(Path(parent), on_problem=self.reasons.append) if rank == 0 else ""
        facts = {"node": host_name(), "folder": str(folder)}
        of_all = all_facts(facts, group=self._group, device=torch.device("cpu"))
        self.folder = Path(of_all[0]["folder"])
        self._nodes = [str(facts["node"]) for facts in of_all]
        self._apart = ranks_apart(self.folder, self._group)

    def _agreed_folder(self, parent: Path, environment: RecoveryEnvironment) -> Path:
        """Folder of this start of the job, as the first rank to arrive has named it."""
        store, key = environment.connect(), f"profile/{parent.resolve()}"
        if not store.check([key]):
            folder = new_run_folder(parent, on_problem=self.reasons.append)
            if store.compare_set(key, "", str(folder)).decode() != str(folder):
                folder.rmdir()
        return Path(store.get(key).decode())

    def _measure_links(self, model: DistributedDataParallel) -> None:
        name = "inter" if "inter" in self.metadata.groups else "flat"
        # NCCL's links are not gloo's; a group that not all ranks are in is nobody's rate.
        group = model.process_group if is_accelerator(model.device) else self._group
        assert group is not None
        if group.size() == len(self._nodes):
            links = measure_links(group, nodes=self._nodes, name=name, device=model.device)
            self._session.note(*links)

    def _watch_allreduce(self, model: DistributedDataParallel) -> None:
        group = model.process_group
        ranks = dist.get_process_group_ranks(group)
        following = ranks[(group.rank() + 1) % len(ranks)]
        crosses = self._nodes[following] != self.metadata.node
        watch_allreduce(model, self._session.recorder, crosses=crosses)

    def _begin_step(self, step: int) -> bool:
        return self._tracer is not None and self._tracer.begin_step(step)

    @property
    def reports(self) -> bool:
        """Whether this rank makes the report."""
        return self.metadata.rank == 0 if self._environment is None else self._leads()

    @property
    def is_closed(self) -> bool:
        """Whether it watches no more."""
        return self._watching is None

    def exclude_interval(self) -> None:
        """Time since the last step belongs to no step: a validation, a checkpoint."""
        self._session.timer.exclude_interval()

    def close(self, reason: str, *, together: bool) -> Sequence[str]:
        """Watch no more, and have all lines in the file; what did not reach rank 0, and why.

        Args:
            reason: ``FINISHED``, or what happened.
            together: all ranks close now, so that they can compare clocks once more.
        """
        if self._watching is None:
            return ()
        self._watching.close()
        self._watching = None
        self._has_finished = together
        problems: list[str] = []
        if not dist.is_initialized():
            together = False
            problems.append(
                "the process group was destroyed before the profile was over, so clocks were not "
                "compared at the end; call destroy_process_group() after it"
            )
        tracer, self._tracer = self._tracer, None
        # The last step, while the tracer still says that it is on. On a slow network an accelerator
        # is some steps behind, of seconds each; after an error it may never come to their end.
        # What comes after that needs the others, and one may be gone.
        if together:
            self._session.end(reason, timeout=_TIMEOUT)
        else:
            self._session.end(reason)
        if tracer is not None:
            tracer.close()
        if self._reducer is not None:
            self._reducer.detach(self._session.recorder)
        if together and self._group is None:
            together = self._meets(self._compare_clocks, "clocks were not compared", problems)
        elif together:
            # Not before: ranks may come to the begin of a profile minutes apart.
            assert self._group is not None
            set_group_timeout(self._group, timedelta(seconds=_TIMEOUT))
            together = self._meets(self._compare_clocks, "clocks were not compared", problems)
        if not together:
            with suppress(OSError):
                dump_flight_record(self.folder, rank=self.metadata.rank)
        self._session.close()
        if together and self._group is not None:
            if self._apart:
                set_group_timeout(self._group, timedelta(seconds=_GATHER_TIMEOUT))
                path = self.folder / f"rank{self.metadata.rank}.jsonl"
                problems += gather_records(path, ranks=self._apart, group=self._group)
            # Of a model that is profiled many times; where something went wrong it stays.
            self._meets(partial(end_group, self._group), "its group stays open", problems)
            self._group = None
        elif self._apart and self.metadata.rank in (0, *self._apart):
            problems.append(self._how_to_copy())
        if not together and self.reports and not self._apart:
            await_ends(self.folder, range(self.metadata.world_size), timeout=_TOGETHER)
        return problems

    def _how_to_copy(self) -> str:
        of_rank = ", ".join(f"rank{rank}.jsonl of {self._nodes[rank]}" for rank in self._apart)
        return (
            "not all ranks reached the end, so records outside of rank 0's folder were not "
            f"gathered; copy {of_rank} into {self.folder} of {self._nodes[0]}, then make the "
            f"report with `lightning-dist profile report {self.folder}`"
        )

    def _compare_clocks(self) -> None:
        group = self._group or dist.group.WORLD  # of this generation
        assert group is not None
        self._session.note(read_offset(group))

    def _meets(self, meet: Callable[[], object], loss: str, problems: list[str]) -> bool:
        """Whether all ranks have come to ``meet``; what is lost otherwise goes to ``problems``."""
        try:
            meet()
        except RuntimeError as error:  # of gloo
            because = first_sentence(error)
            problems.append(f"a rank had terminated or was late at the end, so {loss}: {because}")
            return False
        return True

    def report(self, **files: bool) -> tuple[Summary, Written]:
        """Make the files of the folder from the lines of all ranks.

        After a training that has ended as it should, what codecs cost is measured first.

        Args:
            files: as of :func:`~lightning_dist.profiling.report.files.write_files`.

        Raises:
            ValueError: there are no lines.
        """
        run = read_run(self.folder)
        summary = summarize(run)
        if because := self._why_no_prediction():  # and SIGTERM leaves no time to look at all steps
            unavailable = {**summary.unavailable, "predictions": f"{because}; {MEASURES}"}
            summary = replace(summary, unavailable=unavailable)
        else:
            summary = with_whatif(summary, run, partial(self._costs, run))
        return summary, write_files(self.folder, run, summary, **files)

    def _why_no_prediction(self) -> str:
        if not self._has_finished:
            return "the training did not end by itself"
        return "" if self._predicts else "predict=False"

    def _costs(self, run: Run, observed: Observed) -> Costs:
        wish: bool | Literal["auto"] = "auto"
        if self._reducer is not None:
            wish = self._reducer.settings.compile_kernels
        fused = runs_compiled(observed, wish)
        costs = measure_costs(run, observed, fused=fused, device=self._device)
        if costs.by_name:
            with suppress(OSError):  # the other files say that the folder cannot be written to
                write_costs(self.folder, costs)
        return costs


def _is_profiled(model: DistributedDataParallel, reducer: Reducer | None) -> bool:
    if isinstance(model, ShardedModel):
        return model.is_watched
    return is_watched(model) if reducer is None else reducer.is_watched


@contextmanager
def log_if_slow(seconds: float, say: Callable[[str], None], text: str) -> Iterator[None]:
    """Call ``say`` with ``text`` if this is not over after so many seconds, from a thread."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True  # nobody waits for it where the process ends meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
