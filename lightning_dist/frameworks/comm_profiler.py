"""``CommProfiler``: the communication profile of a training, in Lightning or any other loop."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from signal import Signals
from textwrap import shorten
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dist.base.log import warn
from lightning_dist.base.private import before_compile
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.private import without_fabric
from lightning_dist.profiling.analysis.imbalance import ResidualAlarm
from lightning_dist.profiling.analysis.parts import BucketSummary, Summary
from lightning_dist.profiling.capture.events import FINISHED, ErrorRecord
from lightning_dist.profiling.capture.profile_session import (
    ProfileSessionSettings,
    require_traceable,
)
from lightning_dist.profiling.session.live import (
    CODE,
    LiveProfile,
    Sigterm,
    metrics_of,
    sigterm_raises,
)
from lightning_dist.profiling.session.models import LocalModel, as_ddp
from lightning_dist.profiling.session.profile_run import ProfileRun
from lightning_dist.sync.arguments import refuse_pytorch_lightning

_NO_WANDB = (
    "upload='all' needs a WandbLogger in the Trainer, and it has none; add one, or leave upload out"
)
_ONE_PROCESS = "one process exchanges no gradients"
_MOST_ERRORS = 1024
_LONGEST_REASON = 200
_OF_ONE_RANK = "*rank*"
"""Names of files with what one rank has recorded: lines, traces, flight records."""
Upload: TypeAlias = Literal["report", "all", "none"]
"""Files that wandb gets of a profile: those for readers; also those of every rank; or none."""


class CommProfiler(pl.Callback):
    """Communication profile: its share of a step, its parts, and the late rank.

    As a callback::

        trainer = L.Trainer(strategy="compressed_ddp", callbacks=[CommProfiler()])

    In any other loop, with the model that DDP, Fabric or Accelerate has wrapped::

        with CommProfiler(model) as profiler:
            train()

    There SIGTERM raises ``SystemExit(143)``, unless the program handles it. Where the training does
    not return to Python within ten seconds, as in a collective that a rank never reaches, the
    report is made of what was recorded, and the process exits with the same code.

    Every rank appends its records to ``rank<r>.jsonl``; at the end, also after an exception, rank 0
    prints a summary and writes ``summary.json``, ``report.html`` and ``trace.json.gz`` beside them.
    It adds no synchronisation; ranks compare their clocks at the start and the end. During the
    training, progress bar and loggers show the newest steps of rank 0; the summary is of all ranks.

    The compression error is sampled too, of one bucket at a time. Where a residual grows without
    bound, the rank that holds it warns once.

    Around a loop that recovers within the process, ``ElasticLoop(recovery="in_process")``, enter it
    inside of that: it goes on where ranks are lost and others take their places.

    Args:
        model: model to profile, outside of Lightning.
        dirpath: folder in which each run gets a ``run-<n>``, best on a disk that all ranks share.
            None: ``comm_profile`` in the ``default_root_dir`` of the trainer, or here.
        max_overhead: share of a step that the profiler may take, 0 to 1; above it, fewer steps are
            recorded in detail. It does not limit the hook that observes DDP's own all-reduce.
        measure_links: measure the links for one to four seconds before the first step, to compute
            the share in use.
        torch_profiler: steps that ``torch.profiler`` traces too, ``range(100, 103)``, or a signal,
            ``signal.SIGUSR2``, after which it traces three steps of the process that received it.
            Everything else leaves out these steps and the next one.
        error_every_n_steps: steps between two samples of the compression error, of one bucket in
            turn; 0: never.
        html: write ``report.html``.
        trace: write ``trace.json.gz``.
        csv: write ``steps.csv``.
        predict: after a training of 30 s or more that was not interrupted, measure the costs of
            codecs on rank 0 for predictions. It takes about 2 s; a codec with compiled kernels may
            take 20 s.
        print_summary: print the summary at the end.
        upload: what a ``WandbLogger`` of the trainer gets at the end. ``"report"``: a table of the
            buckets, ``report.html``, and an artifact of rank 0's files; ``"all"``: also the raw
            events of all ranks, which may be gigabytes; ``"none"``: only metrics.

    Raises:
        ValueError: a setting that is out of range, or cannot take effect.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        dirpath: str | Path | None = None,
        max_overhead: float = 0.01,
        torch_profiler: range | Signals | None = None,
        error_every_n_steps: int = 50,
        measure_links: bool = True,
        html: bool = True,
        trace: bool = True,
        csv: bool = False,
        predict: bool = True,
        print_summary: bool = True,
        upload: Upload = "report",
    ) -> None:
        if upload not in get_args(Upload):
            raise ValueError(f"upload must be 'report', 'all' or 'none'; got {upload!r}")
        if upload == "all" and model is not None:
            raise ValueError(_NO_WANDB)
        if not isinstance(model, nn.Module | None):
            raise ValueError(f"model must be the DistributedDataParallel to profile; got {model!r}")
        if dirpath is not None and not (isinstance(dirpath, str | PathLike) and str(dirpath)):
            raise ValueError(f"dirpath must be the path of a folder, or None; got {dirpath!r}")
        if torch_profiler is not None:
            require_traceable(torch_profiler)
        switches = {"measure_links": measure_links, "html": html, "trace": trace, "csv": csv}
        switches |= {"predict": predict, "print_summary": print_summary}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False; got {value!r}")
        self._model = model
        self._upload: Upload = upload
        self._dirpath = dirpath
        self._start = partial(
            ProfileRun,
            settings=ProfileSessionSettings(
                max_overhead=max_overhead, error_every_n_steps=error_every_n_steps
            ),
            measure_links=measure_links,
            torch_profiler=torch_profiler,
            predict=predict,
            on_error=self._on_error,
            on_problem=_warn_here,
        )
        self._files = {"html": html, "trace": trace, "csv": csv}
        self._print_summary = print_summary
        self._run: ProfileRun | None = None
        self._live: LiveProfile | None = None
        self._alarm: ResidualAlarm | None = None
        self._signals = ExitStack()
        self._sigterm: Sigterm | None = None
        self._nothing = ""
        self.summary: Summary | None = None
        """Summary of the last run, on rank 0, when it is over."""
        self.errors: deque[ErrorRecord] = deque(maxlen=_MOST_ERRORS)
        """Compression errors that this rank has sampled in this run, the last 1024 in order."""

    @property
    def folder(self) -> Path | None:
        """Folder of the run that is under way, or of the last one."""
        return None if self._run is None else self._run.folder

    def __enter__(self) -> Self:
        if self._model is None:
            raise ValueError(
                "Outside of Lightning CommProfiler needs the model; write with CommProfiler(model)"
            )
        self._open(_unwrapped(self._model), Path("comm_profile"))
        # Lightning does that itself.
        self._sigterm = self._signals.enter_context(sigterm_raises(self._close_stuck))
        return self

    def _close_stuck(self) -> None:
        self._close("SIGTERM, while the training waited for something", together=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._signals:
            assert self._sigterm is not None
            # A launcher that ends all ranks because of one comes in the middle of this.
            self._sigterm.closing()
            self._close(FINISHED if error is None else _reason(error), together=error is None)
        if self._sigterm.came and error is None:
            raise SystemExit(CODE)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        refuse_pytorch_lightning(trainer=trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._model is not None:
            raise ValueError(
                "CommProfiler(model) profiles a loop of your own; as a callback of a Trainer it "
                "takes the model of the strategy: leave the model out"
            )
        self.summary = self._run = self._live = None
        self._nothing = _why_nothing(trainer)
        if self._nothing:
            rank_zero.warn(self._nothing)
            return
        assert trainer.strategy.model is not None
        model = as_ddp(trainer.strategy.model)
        assert model is not None
        if self._upload == "all" and not any(isinstance(x, WandbLogger) for x in trainer.loggers):
            raise ValueError(_NO_WANDB)
        self._live = LiveProfile()
        if getattr(trainer.strategy, "generations", None) is None:
            self._open(model, _parent(trainer), trainer.global_step)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._live is not None and self._run is None:  # this rank has met the others meanwhile
            strategy: Any = trainer.strategy
            self._open(
                strategy.model,
                _parent(trainer),
                leads=lambda: trainer.is_global_zero,
            )

    def _open(
        self, model: DistributedDataParallel, parent: Path, first: int = 0, **options: Any
    ) -> None:
        self.summary = None
        self.errors.clear()
        self._alarm = ResidualAlarm()
        # Predictions are of steps of DDP.
        options |= {"predict": False} if isinstance(model, LocalModel) else {}
        self._run = self._start(
            model,
            parent=self._dirpath or parent,
            first=first,
            on_step=(lambda step: None) if self._live is None else self._live.add,
            **options,
        )
        for reason in self._run.reasons:
            rank_zero.warn(f"CommProfiler: {reason}")

    def _on_error(self, error: ErrorRecord) -> None:
        self.errors.append(error)
        if self._live is not None:
            self._live.add_error(error)
        if self._alarm is not None and (growth := self._alarm.add(error)) is not None:
            self._alarm = None  # once
            _warn_here(str(growth))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._run is None or self._live is None:
            return
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0 and trainer.is_global_zero:
            _log_live(trainer, self._live.take())

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None and trainer.state.fn == TrainerFn.FITTING:
            self._run.exclude_interval()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._nothing and self._print_summary and trainer.is_global_zero:
            print(self._nothing)  # a reader looks here, and Python shows a warning once
        self._close(FINISHED, together=True)
        if self.summary is not None and self._run is not None:
            log_summary(trainer, self.summary, self._run.folder, upload=self._upload)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close(_reason(exception), together=False)

    def _close(self, reason: str, *, together: bool) -> None:
        run = self._run
        if run is None or run.is_closed:
            return
        lost = run.close(reason, together=together)
        for problem in lost:  # on every rank: of its lines rank 0 knows only that none came
            warn(f"CommProfiler, rank {run.metadata.rank}: {problem}")
        if not run.reports:
            return
        try:
            self.summary, written = run.report(**self._files)
        except ValueError as error:
            rank_zero.warn(f"CommProfiler: no report: {error}")
            return
        for problem in written.problems:
            rank_zero.warn(f"CommProfiler: {problem}")
        if self._print_summary:
            from lightning_dist.profiling.report.terminal import print_summary

            print_summary(self.summary)
            print(f"CommProfiler: {run.folder}")


def _why_nothing(trainer: pl.Trainer) -> str:
    """A sentence for the user where this training is not profiled; empty if it is."""
    because = ""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        because = "fast_dev_run is a test run"
    elif trainer.strategy.model is None or as_ddp(trainer.strategy.model) is None:
        wanted = "strategy='ddp' or 'compressed_ddp'"
        name = type(trainer.strategy).__name__
        because = f"{name} does not use DistributedDataParallel; use {wanted}"
        if trainer.world_size == 1:
            because = f"{_ONE_PROCESS}; start several, with {wanted}"
    return because and f"CommProfiler records nothing: {because}"


def _log_live(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Tell loggers and progress bar the means of the newest steps; nothing if there are none."""
    if not metrics:
        return
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step - 1)
    for name in ("exposed_fraction", "compression_ratio"):
        value = metrics[f"comm/{name}"]
        trainer.lightning_module.log(
            f"comm_{name}", value, prog_bar=True, logger=False, rank_zero_only=True
        )


def log_summary(trainer: pl.Trainer, summary: Summary, folder: Path, *, upload: Upload) -> None:
    """Tell the loggers what all ranks together have to say; wandb gets table and files too."""
    metrics = metrics_of(summary)
    for logger in trainer.loggers:
        if metrics:  # without a step there are none, and a logger would have a row of nothing
            logger.log_metrics(metrics, step=max(trainer.global_step - 1, 0))
        if isinstance(logger, WandbLogger) and upload != "none":
            _log_files(logger, summary, folder, with_lines=upload == "all")


def _log_files(logger: Any, summary: Summary, folder: Path, *, with_lines: bool) -> None:
    import wandb

    run = logger.experiment
    columns = [field.name for field in fields(BucketSummary)]
    rows = [[getattr(bucket, name) for name in columns] for bucket in summary.buckets]
    media: dict[str, Any] = {"comm/buckets": wandb.Table([*columns], data=rows)}
    if (report := folder / "report.html").is_file():
        media["comm/report"] = wandb.Html(report.read_text(), inject=False)
    run.log(media)
    artifact = wandb.Artifact(f"comm-profile-{run.id}", type="comm-profile")
    for path in sorted(folder.iterdir()):
        if path.is_file() and (with_lines or not path.match(_OF_ONE_RANK)):
            artifact.add_file(str(path))
    run.log_artifact(artifact)


def _parent(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "comm_profile"


def _unwrapped(model: nn.Module) -> DistributedDataParallel:
    """The DDP module of what Fabric or Accelerate have made."""
    inner = as_ddp(before_compile(without_fabric(model)))
    if inner is None:
        raise ValueError(
            f"CommProfiler needs a DistributedDataParallel, got {type(model).__name__}; give it "
            "the model that DDP, fabric.setup() or accelerator.prepare() returned. With one "
            f"process these make none: {_ONE_PROCESS}, so leave CommProfiler out"
        )
    return inner


def _warn_here(text: str) -> None:
    """Warn on the rank that sees it: rank 0 may not know."""
    warn(f"CommProfiler, rank {dist.get_rank()}: {text}")


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.code == CODE:
        return "SIGTERM"
    # torch puts the places in its own source code between, some of them as long as the message.
    text = re.sub(r"\[[^]\s]*:\d+\] ", "", str(error).strip().split("\n")[0])
    return f"{type(error).__name__}: {shorten(text, _LONGEST_REASON, placeholder=' ...')}"
