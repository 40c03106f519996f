"""Signals of a trainer under ElasticRestart: noted, and acted on where all ranks can."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_dist.integrations.lightning.private import SignalConnector


class Preempted(SIGTERMException):
    """The training has stopped on all ranks at one step; ends the process with a code."""


class NoticeConnector(SignalConnector):
    """Leaves signals to :class:`~lightning_dist.elastic.notice.Notices`.

    Lightning's own handler begins a broadcast from within the handler, on the ranks that got the
    signal, and looks at rank 0's only.

    Args:
        usual: the trainer's own, which this stands in for.
        start: installs the handlers.
    """

    def __init__(self, usual: SignalConnector, start: Callable[[], None]) -> None:
        super().__init__(usual.trainer)
        self.usual = usual
        self._start = start

    @override
    def register_signal_handlers(self) -> None:
        self._original_handlers = self._get_current_signal_handlers()
        self._start()


def notice_signals(environment: Any) -> tuple[signal.Signals, ...]:
    """SIGTERM, and under SLURM the signal with which it announces a requeue."""
    signals = [signal.SIGTERM]
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        signals.append(environment.requeue_signal or signal.SIGUSR1)
    return tuple(signals)


def requeue(environment: Any, reasons: list[str]) -> None:
    """Ask SLURM to start this job again, unless all that was said is SIGTERM (scancel)."""
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return
    if not set(reasons) - {"", signal.SIGTERM.name}:
        return
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{job}_{task}" if job and task else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", name], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_warn(f"the job was not requeued: scontrol requeue {name}: {error}")
