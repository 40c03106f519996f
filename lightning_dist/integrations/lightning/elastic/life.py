"""How a process of a fit ends: what is Lightning's of it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dist.elastic.launch import Launch
from lightning_dist.elastic.life import Life, stop_line
from lightning_dist.elastic.settings import EndSettings
from lightning_dist.integrations.lightning.elastic.account import RunAccount
from lightning_dist.integrations.lightning.elastic.signals import Preempted, notice_signals, requeue
from lightning_dist.integrations.lightning.private import cluster_environment


class RunLife(Life):
    """The life of one process, from the set-up of a fit to its end.

    Args:
        settings: when it ends by itself.
        account: takes note of why.
    """

    def __init__(self, settings: EndSettings, account: RunAccount) -> None:
        super().__init__(settings, account)
        self._account = account

    def listen(self, trainer: pl.Trainer) -> None:
        """Begin to note signals."""
        environment = cluster_environment(trainer)
        launcher: Any = trainer.strategy.launcher

        def end_the_others() -> None:
            for process in getattr(launcher, "procs", ()):  # ranks that Lightning has started
                process.terminate()

        self.note(notice_signals(environment), asks=trainer.local_rank == 0, on_told=end_the_others)

    def begin(self) -> None:
        """Training begins."""
        self.beat()
        for missing in Launch.from_env().missing_settings():
            rank_zero_warn(missing)

    def preempted(self, trainer: pl.Trainer, reasons: list[str], *, saved: int | None) -> Preempted:
        """All ranks stop here: how this process ends.

        Args:
            reasons: why each rank was told to end, if it was.
            saved: step of the newest checkpoint that is durable.
        """
        is_saved = saved == trainer.global_step
        code = self.stop(reasons, is_saved=is_saved)
        if trainer.is_global_zero:
            requeue(cluster_environment(trainer), reasons)
        say = rank_zero_info if is_saved else rank_zero_warn
        say(stop_line(trainer.global_step, reasons, saved=saved))
        self.leave()
        return Preempted(code)

    @override
    def fail(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            self.end_listening()
        else:
            super().fail(exception)

    @override
    def close(self) -> None:
        super().close()
        self._account.close()
