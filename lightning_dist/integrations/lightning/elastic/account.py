"""The account of a run whose processes are fits of Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_dist.elastic.account import Account, cost_line, start_line
from lightning_dist.elastic.state import ElasticState
from lightning_dist.integrations.lightning.elastic.data import ElasticData
from lightning_dist.integrations.lightning.elastic.loggers import identify


class RunAccount(Account):
    """What one fit knows of the run that it is a part of, and writes down for the next."""

    def identify(self, trainer: pl.Trainer, folder: str) -> None:
        """Let loggers go on where those of the run in ``folder`` were. On rank 0 it reads."""
        if trainer.is_global_zero:
            self.look(folder, rank=trainer.global_rank)
            identify(trainer, run_id=self.run_id)

    def join(self, trainer: pl.Trainer, folder: str, *, seed: int | None) -> None:
        """Agree on which run this is. Collective."""
        strategy: Any = trainer.strategy
        self.open(
            folder,
            rank=trainer.global_rank,
            seed=seed,
            broadcast=strategy.broadcast,
            all_agree=lambda fine: strategy.reduce_boolean_decision(fine, all=True),
        )

    def begin(
        self,
        trainer: pl.Trainer,
        state: ElasticState | None,
        data: ElasticData,
        *,
        foreign: str | None,
    ) -> None:
        """Say where training goes on.

        Args:
            foreign: path of a checkpoint that ElasticRestart did not save.
        """
        given = ""
        if foreign is not None:
            epoch, step = trainer.current_epoch, trainer.global_step
            given = (
                f"{foreign} (epoch {epoch}, step {step}), which was not saved under "
                f"ElasticRestart: its samples of epoch {epoch} are not known, and the order of "
                "samples begins anew"
            )
        line = start_line(state, data.layout, world_size=trainer.world_size, foreign=given)
        rank_zero_info(line)
        self.start(state, first=data.layouts()[0], world_size=trainer.world_size)

    def say_nothing_is_left(
        self, trainer: pl.Trainer, state: ElasticState | None, data: ElasticData
    ) -> None:
        """A start that does not train says so: it is no restart, and the account is as it was."""
        line = start_line(state, data.layout, world_size=trainer.world_size)
        rank_zero_info(f"{line}; there is nothing left to do")

    def stepped(self, trainer: pl.Trainer, samples: int) -> None:
        """An optimizer step is done, of all ranks; ``samples`` so far."""
        if self.step(samples):
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        metrics = self.metrics(world_size=trainer.world_size)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=max(trainer.global_step - 1, 0))

    def finish(self, trainer: pl.Trainer) -> None:
        """The training has ended as it should."""
        self.complete()
        if not trainer.is_global_zero:
            return
        summary = self.summary
        if summary.restarts:
            self._log(trainer)
            rank_zero_info(cost_line(summary))
