"""A profile of one DistributedDataParallel, from its begin to the report; no framework needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.exchange.handshake import Facts, all_facts
from lightning_dist.integrations.ddp import reducer_of
from lightning_dist.integrations.profile_about import about, why_not_in_detail
from lightning_dist.integrations.profile_meta import meta_of
from lightning_dist.integrations.said_after import said_after
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.calibration import measure_links
from lightning_dist.profiling.capture.allreduce import WatchedAllReduce, is_watched, watch_allreduce
from lightning_dist.profiling.capture.ends import await_ends
from lightning_dist.profiling.capture.flight import dump_flight_record
from lightning_dist.profiling.capture.gathering import Gatherer, is_shared
from lightning_dist.profiling.capture.messenger import Messenger
from lightning_dist.profiling.capture.records import ErrorRecord, StepRecord
from lightning_dist.profiling.capture.session import Session, SessionSettings
from lightning_dist.profiling.capture.watching import Watching
from lightning_dist.profiling.capture.zoom import Zoom
from lightning_dist.profiling.clocks import read_offset
from lightning_dist.profiling.folder import Run, new_run_folder, read_run
from lightning_dist.profiling.peer import end_group, first_sentence
from lightning_dist.profiling.report.files import Wanted, Written, replace_file, write_files
from lightning_dist.profiling.whatif.ask import with_whatif
from lightning_dist.profiling.whatif.costs_file import MEASURES, Costs, write_costs
from lightning_dist.profiling.whatif.measure import measure_costs, runs_compiled
from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.reducer.moments import moments_on
from lightning_dist.topology import this_host

_EVERY = 100
"""Steps after which lines travel to rank 0."""
_PATIENCE = 60.0
"""Seconds for the last ones, and for ranks to come to the end."""
_MOMENT = 2.0
"""Seconds in which ranks end that end by the same error."""
_WAITING = (
    "waiting for the other ranks: all of them have to enter CommProfiler, at the same point of the "
    "program; those that do not are waited for until the timeout of the process group"
)


class ProfileRun:
    """Watches ``model`` until it is closed. Made by all ranks, at the same point of the program.

    Args:
        parent: of the folder of this run; ranks may have different ones, that of rank 0 counts.
        first: number of the step that comes next.
        on_step: called with every step of this rank that nothing disturbs, when its times are
            known.
        calibrate: measure the links first.
        zoom: steps, or a signal after which steps, are looked at with torch's profiler.
        on_error: called with every compression error that this rank has looked at.
        on_problem: called with what goes wrong on this rank, which others may not know of.
        whatif: measure what codecs cost when the training is over, on rank 0.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        parent: str | Path,
        settings: SessionSettings,
        first: int = 0,
        on_step: Callable[[StepRecord], None] = lambda step: None,
        calibrate: bool = True,
        zoom: range | Signals | None = None,
        on_error: Callable[[ErrorRecord], None] = lambda error: None,
        on_problem: Callable[[str], None] = lambda problem: None,
        whatif: bool = True,
    ) -> None:
        self._asks, self._device = whatif, model.device
        self._has_finished = False
        self.reasons: list[str] = []
        """What is not measured, and why."""
        self._reducer = reducer_of(model.module)
        if is_watched(model) if self._reducer is None else self._reducer.is_watched:
            raise ValueError(
                "this model is profiled already, and one CommProfiler at a time can see its "
                "gradients; leave one out, or let the other end first"
            )
        with said_after(_PATIENCE, on_problem, _WAITING):
            self._group: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._groups = [self._group]
        rank = dist.get_rank()
        folder = new_run_folder(Path(parent), on_problem=self.reasons.append) if rank == 0 else ""
        facts = self._facts({"host": this_host(), "folder": str(folder)})
        self.folder = Path(facts[0]["folder"])
        self._messenger = self._new_messenger()
        why_not = why_not_in_detail(model)
        in_detail = settings.in_detail and not why_not
        if settings.in_detail and why_not:
            self.reasons.append(
                f"phases, buckets and compression errors: n/a, {why_not}; step times are taken"
            )
        own_host = facts[rank]["host"]
        self.about = about(model, self._reducer, host=own_host, budget=settings.budget)
        hosts = [each["host"] for each in facts]
        if rank == 0:
            try:
                meta = meta_of(model, self._reducer, self.about, hosts=hosts, settings=settings)
                replace_file(self.folder / "meta.json", meta)
            except OSError as error:  # lines and reports tell most of it too
                on_problem(f"{error.filename}: {error.strerror}; there is no meta.json")
        new_session = partial(
            Session,
            about=self.about,
            settings=replace(settings, in_detail=in_detail),
            first=first,
            moments=moments_on(model.device) if in_detail else None,
            on_over=self._on_over,
            on_step=on_step,
            on_error=on_error,
            on_problem=on_problem,
        )
        try:
            self._session = new_session(self.folder)
        except OSError as error:  # the others are on their way to the next collective
            problem = f"{error.filename}: {error.strerror}; the steps of this rank are not kept"
            on_problem(problem)
            self._session = new_session(None)
        self._session.note(read_offset(self._group))
        if calibrate and in_detail:
            name = "inter" if "inter" in self.about.groups else "flat"
            # NCCL's links are not gloo's; a group that not all ranks are in is nobody's rate.
            group = model.process_group if model.device.type == "cuda" else self._group
            if group.size() == len(hosts):
                links = measure_links(group, hosts=hosts, name=name, device=model.device)
                self._session.note(*links)
        self._zoom: Zoom | None = None
        if zoom is not None:
            self._zoom = Zoom(
                self.folder,
                rank=rank,
                wanted=zoom,
                on_change=self._disturb,
                on_problem=on_problem,
            )
            self._zoom.begin_step(first)
        self._watch(model, hosts)
        self._watching: Watching | None = Watching(model, self._session)

    def _watch(self, model: DistributedDataParallel, hosts: Sequence[str]) -> None:
        recorder = self._session.recorder
        if self._reducer is not None:
            self._reducer.observe(recorder)
            return
        ranks = dist.get_process_group_ranks(model.process_group)
        following = ranks[(model.process_group.rank() + 1) % len(ranks)]
        crosses = hosts[following] != hosts[dist.get_rank()]
        watched = WatchedAllReduce(recorder, model.process_group, crosses)
        if self.about.unseen:
            self.reasons.append(f"buckets: n/a, {self.about.unseen}")
        else:
            watch_allreduce(model, watched)

    def _facts(self, own: dict[str, Any]) -> Sequence[Facts]:
        return all_facts(own, group=self._group, device=torch.device("cpu"))

    def _new_messenger(self) -> Messenger | None:
        """Where some ranks have a folder of their own: what brings their lines to rank 0."""
        sees = is_shared(self.folder, self._group)
        if all(each["sees"] for each in self._facts({"sees": sees})):
            return None
        group = dist.new_group(backend="gloo")  # in use while training goes on
        gatherer = Gatherer(self.folder, group=group, is_shared=sees)
        self._groups.append(group)
        return Messenger(gatherer, self.folder / f"rank{dist.get_rank()}.jsonl")

    def _disturb(self, is_on: bool) -> None:
        self._session.is_disturbed = is_on

    def _on_over(self, step: int) -> None:
        if self._zoom is not None:
            self._zoom.begin_step(step + 1)
        if self._messenger is not None and step % _EVERY == 0:
            self._messenger.send()

    @property
    def is_closed(self) -> bool:
        """Whether it watches no more."""
        return self._watching is None

    def set_apart(self) -> None:
        """What was since the last step belongs to none: a validation, a checkpoint."""
        self._session.set_apart()

    def close(self, reason: str, *, together: bool) -> Sequence[str]:
        """Watch no more, and have all lines in the file; what did not reach rank 0, and why.

        Args:
            reason: ``"finished"``, or what happened.
            together: all ranks close now, so that they can compare clocks once more; one that is
                gone, or does not come within a minute, costs only that.
        """
        if self._watching is None:
            return ()
        self._watching.stop()
        self._watching = None
        self._has_finished = together
        problems: list[str] = []
        if not dist.is_initialized():
            together = False
            problems.append(
                "the process group was destroyed before the profile was over, so clocks were not "
                "compared at the end; call destroy_process_group() after it"
            )
        zoom, self._zoom = self._zoom, None
        # The last step, while the zoom is still said to be on. On a slow network an accelerator is
        # some steps behind, of seconds each; after an error it may never come to their end.
        if together:
            self._session.stop(_PATIENCE)
        else:
            self._session.stop()
        if zoom is not None:
            zoom.close()
        if self._reducer is not None:
            self._reducer.leave_alone(self._session.recorder)
        self._session.end(reason)  # what comes now needs the others, and one may be gone
        if together:
            # Not before: ranks may come to the begin of a profile minutes apart.
            _set_pg_timeout(timedelta(seconds=_PATIENCE), self._group)
            together = self._meets(self._compare_clocks, "clocks were not compared", problems)
        if not together:
            with suppress(OSError):
                dump_flight_record(self.folder, rank=self.about.rank)
        self._session.close()
        if self._messenger is not None:
            problems += self._messenger.close(_PATIENCE if together else 0.0)
        if together:
            together = self._meets(self._end_groups, "not all lines may be there", problems)
        if not together and self.about.rank == 0 and self._messenger is None:
            await_ends(self.folder, range(self.about.world_size), patience=_MOMENT)
        return problems

    def _end_groups(self) -> None:
        """Of a model that is profiled many times; where something went wrong they stay."""
        for each in self._groups:
            # Others may have waited for the last lines all of their patience.
            _set_pg_timeout(timedelta(seconds=2 * _PATIENCE), each)
        over = self._messenger is None or self._messenger.is_over
        if all(of["over"] for of in self._facts({"over": over})):
            del self._group, self._messenger
            while self._groups:
                end_group(self._groups.pop())

    def _compare_clocks(self) -> None:
        self._session.note(read_offset(self._group))

    def _meets(self, meet: Callable[[], object], loss: str, problems: list[str]) -> bool:
        """Whether all ranks have come to ``meet``; what is lost otherwise goes to ``problems``."""
        try:
            meet()
        except RuntimeError as error:  # of gloo
            because = first_sentence(error)
            problems.append(f"at the end a rank was gone or late, so {loss}: {because}")
            return False
        return True

    def report(self, wanted: Wanted) -> tuple[Summary, Written]:
        """Make the files of the folder from the lines of all ranks.

        After a training that has ended as it should, what codecs cost is measured first.

        Raises:
            ValueError: there are no lines.
        """
        run = read_run(self.folder)
        summary = summarize(run)
        if because := self._why_no_prediction():  # and SIGTERM leaves no time to look at all steps
            reasons = {**summary.reasons, "whatif": f"{because}; {MEASURES}"}
            summary = replace(summary, reasons=reasons)
        else:
            summary = with_whatif(summary, run, partial(self._costs, run))
        return summary, write_files(self.folder, run, summary, wanted=wanted)

    def _why_no_prediction(self) -> str:
        if not self._has_finished:
            return "the training did not end by itself"
        return "" if self._asks else "whatif=False"

    def _costs(self, run: Run, observed: Observed) -> Costs:
        wish = "auto" if self._reducer is None else self._reducer.settings.compile_kernels
        fused = runs_compiled(observed, wish)
        costs = measure_costs(run, observed, fused=fused, device=self._device)
        if costs.by_name:
            with suppress(OSError):  # the other files say that the folder cannot be written to
                write_costs(self.folder, costs)
        return costs
