"""``ElasticRestart``: a job goes on with whatever ranks there are, and sees every sample once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_dist.elastic.layout import BatchPolicy, lr_factor, require_policy
from lightning_dist.elastic.plan import Pass
from lightning_dist.elastic.rates import scale_learning_rates
from lightning_dist.elastic.settings import EndSettings
from lightning_dist.elastic.state import KEY, ElasticState
from lightning_dist.elastic.vote import Vote
from lightning_dist.integrations.lightning import private
from lightning_dist.integrations.lightning.before_setup import BeforeSetup
from lightning_dist.integrations.lightning.elastic.account import RunAccount
from lightning_dist.integrations.lightning.elastic.data import (
    ElasticData,
    is_trial,
    require_plain_trainer,
)
from lightning_dist.integrations.lightning.elastic.life import RunLife
from lightning_dist.integrations.lightning.elastic.position import ElasticPosition
from lightning_dist.integrations.lightning.elastic.resume import RestartConnector, restore_usual
from lightning_dist.integrations.lightning.elastic.saves import (
    NewestCheckpoint,
    require_loadable_hparams,
)
from lightning_dist.integrations.lightning.elastic.signals import NoticeConnector
from lightning_dist.integrations.lightning.elastic.sources import place_sources
from lightning_dist.integrations.lightning.launcher import (
    FollowsLauncher,
    follow_launcher,
)
from lightning_dist.integrations.lightning.private import checkpoint_folder

_UNRESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ElasticRestart(BeforeSetup, NewestCheckpoint):
    """Saves, and goes on by itself from the newest whole checkpoint of ``dirpath`` at every start.

    Under ``torchrun`` the number of ranks may be another one after every restart. Parameters,
    optimizer, schedulers, scaler, callbacks, loops, residuals, random number generators and the
    position in the data are what they were; the sequence of global batches is that of a run
    without a fault. A signal to end (SIGTERM, SLURM's requeue signal, ``preempted``) on any rank
    leads to one checkpoint of all ranks, and to the end of the process.

    Args:
        dirpath: folder of the checkpoints, one for each run; all ranks have to see it.
        every_n_train_steps: optimizer steps between two checkpoints. None: at
            the end of epochs only.
        every_n_epochs: epochs between two checkpoints at the end of an epoch. None: 1, unless
            ``every_n_train_steps`` is given.
        keep: how many of the newest stay; a damaged one is passed over for the one before.
        batch_policy: when the number of ranks changes, ``"constant_global"`` keeps the global
            batch: passes per step change, losses are weighted by samples. ``"scale_lr"`` and
            ``"scale_lr:sqrt"`` let it grow with the ranks and the learning rate with it, or with
            its square root; ``"fixed_micro"`` leaves the learning rate.
        exact_data: raise for a train dataloader whose samples cannot be kept track of; False:
            warn, and begin the epoch anew after a restart.
        seed: of the order of the samples; None: that of ``seed_everything``, or a random one.
        preempted: asked every ``poll_s`` seconds on a thread of local rank 0; whether the machine
            is about to go.
        poll_s: seconds.
        grace_period: seconds from a signal to the forced end of the process; less than what the
            launcher waits (torchrun: 30).
        hang_timeout: seconds without a batch (from the set-up on: without one, or the next stage of
            the start) after which a process ends itself (exit code 76), so that the launcher starts
            all anew; the bound for a rank that stops answering. While the last checkpoint is
            written it is enough that all ranks answer. None: never.
        weights_only: checkpoints are read by the restricted unpickler of ``torch.load``, which runs
            no code of theirs, and a state that it could not read is refused before training and at
            the first save. False: anything is saved and loaded; for folders to which only those can
            write whom you trust. ``fit(weights_only=...)`` comes first.
        **kwargs: as of :class:`~lightning_dist.AsyncCheckpoint`, without ``monitor``,
            ``save_top_k`` and what goes with them.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    def __init__(
        self,
        dirpath: Any,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        keep: int = 2,
        batch_policy: BatchPolicy = "constant_global",
        exact_data: bool = True,
        seed: int | None = None,
        preempted: Callable[[], bool] | None = None,
        poll_s: float = 5.0,
        grace_period: float = 25.0,
        hang_timeout: float | None = 600.0,
        weights_only: bool = True,
        format: Literal["single", "sharded"] = "single",
        **kwargs: Any,
    ) -> None:
        require_policy(batch_policy)
        super().__init__(
            dirpath,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            keep=keep,
            format=format,
            **kwargs,
        )
        self._policy = batch_policy
        self._exact = exact_data
        self._seed = seed
        self._weights_only = weights_only
        self._account = RunAccount()
        ending = EndSettings(
            preempted=preempted,
            poll_s=poll_s,
            grace_period=grace_period,
            hang_timeout=hang_timeout,
        )
        self._life = RunLife(ending, self._account)
        self._vote = Vote(None)
        self._vote_group: dist.ProcessGroup | None = None
        self._state: ElasticState | None = None
        self._data: ElasticData | None = None
        self._at: ElasticPosition | None = None
        self._resumed_own: str | None = None
        self._foreign: str | None = None
        self._is_restricted = True
        self._has_begun = False
        self._epoch_is_due = False
        self._polls_validation = False

    @property
    def this_pass(self) -> Pass | None:
        """Which samples this rank is computing, and their weight; None outside of a fit."""
        return None if self._at is None else self._at.this_pass

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        restore_usual(trainer)  # after a fit that ended with an exception
        if stage != "fit" or is_trial(trainer):
            super().setup(trainer, pl_module, stage)
            return
        require_plain_trainer(trainer)
        self._require_own_folder(trainer)
        self._stand_last(trainer)
        if not isinstance(trainer.strategy, FollowsLauncher):
            follow_launcher(trainer.strategy)  # for the samplers of validation
        self._state = self._data = self._at = None
        self._has_begun = False
        self._life.open()
        self._account.join(trainer, checkpoint_folder(self, trainer), seed=self._seed)
        found = self._find_last_checkpoints(trainer)
        super().setup(trainer, pl_module, stage)
        if trainer.world_size > 1 and self._vote_group is None:
            self._vote_group = dist.new_group(backend="gloo")
        self._vote = Vote(self._vote_group)
        connector = RestartConnector(
            private.checkpoint_connector(trainer),
            path=next(iter(found), None),
            weights_only=self._weights_only,
            on_loaded=lambda *loaded: self._take_up(trainer, *loaded),
            on_loops=self._place_loops,
        )
        private.set_checkpoint_connector(trainer, connector)
        signals = private.signal_connector(trainer)
        listening = NoticeConnector(signals, lambda: self._life.listen(trainer))
        private.set_signal_connector(trainer, listening)
        warnings.filterwarnings("ignore", message=_UNRESUMABLE)  # our loaders are

    @override
    def before_setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == "fit" and not is_trial(trainer):
            self._account.identify(trainer, checkpoint_folder(self, trainer))

    def _take_up(self, trainer: pl.Trainer, checkpoint: dict[str, Any], weights_only: bool) -> None:
        """Know where to go on, before anything is restored."""
        self._is_restricted = weights_only
        if weights_only:
            require_loadable_hparams(trainer)
        path = str(trainer.ckpt_path)
        if KEY in checkpoint:
            self._state = ElasticState.from_dict(checkpoint[KEY], path=path)
        elif checkpoint and self._last.found is not None:
            raise ValueError(
                f"{path} was not saved under ElasticRestart, so nobody knows which samples it has "
                "seen; give ElasticRestart a folder of its own, and fit(ckpt_path=...) to begin "
                "from this checkpoint"
            )
        self._life.beat()
        is_own = self._last.found is not None
        self._foreign = path if checkpoint and self._state is None else None
        self._resumed_own = path if is_own else None
        self._account.resume(self._state, is_own=is_own)
        data = ElasticData(
            trainer,
            policy=self._policy,
            exact=self._exact,
            resumed=self._state,
            begun=self._account.first,
            seed=self._account.seed,
            on_first=self._restore_rng,
        )
        self._data = data
        self._at = ElasticPosition(
            trainer,
            data=data,
            resumed=self._state,
            path=path,
            vote=self._vote,
            run_id=self._account.run_id,
            seed=self._account.seed,
        )
        place_sources(trainer, data)

    def _place_loops(self) -> None:
        if self._at is not None:
            self._at.place_loops()

    def _restore_rng(self) -> None:
        if self._at is not None:
            self._at.restore_rng()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._at is None or self._data is None:
            return
        if self._data.layout is not None:
            first, _ = self._data.layouts()
            before = first if self._state is None else self._state.layout
            factor = lr_factor(self._policy, before=before, now=self._data.layout)
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            scale_learning_rates(trainer.optimizers, schedulers, factor=factor)
        self._at.restore_metrics()
        self._take_over(
            trainer,
            run=self._account.run_id,
            resumed=self._resumed_own,
            weights_only=self._is_restricted,
        )
        self._has_begun = True
        self._account.begin(trainer, self._state, self._data, foreign=self._foreign)
        self._life.begin()
        if self._at.validates_first:  # it begins with seeds for the workers of its loader
            self._restore_rng()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._at is None:
            return
        if self._epoch_is_due:
            self._epoch_is_due = False
            self._save_now(trainer)
        if self._at.has_begun:
            self._stop_if_told(trainer)
        self._at.begin_epoch()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._at is not None:
            self._at.begin_pass(batch_idx)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any
    ) -> None:
        now = self.this_pass
        if now is not None and now.weight != 1.0 and loss.requires_grad:
            weight = now.weight
            loss.register_hook(lambda gradient: gradient * weight)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._at is None:
            return
        self._at.end_pass()
        self._life.beat()
        if private.is_accumulating(trainer):
            return
        self._account.stepped(trainer, self._at.total_samples)
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            super().on_train_batch_end(trainer, *args, **kwargs)
            self._life.beat()
            self._stop_if_told(trainer)
        elif self._session is not None:
            # What ends an epoch comes after this hook; a checkpoint waits for it.
            self._session.deliver()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The checkpoint of an epoch is taken at the begin of the next, when all has ended."""
        self._epoch_is_due = self._at is not None and self._is_due_after_epoch(trainer)
        # What waits for a metric (ReduceLROnPlateau) is not stepped in an epoch that was resumed.
        private.end_restart(trainer.fit_loop)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if trainer.sanity_checking or self._at is None:
            return
        self._restore_rng()
        batches = sum(trainer.num_val_batches)
        number = int(batches) if batches != float("inf") else -1
        self._polls_validation = self._vote.are_equal(number) and number >= 0

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._life.beat()
        if trainer.sanity_checking or self._at is None:
            return
        if self._polls_validation:
            self._stop_if_told(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and self._at is not None:
            self._at.end_validation()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._life.beat()
        if self._at is not None and self._at.has_begun:
            self._epoch_is_due = False
            self._save_at_last(trainer)
            self._await_saves()
        super().on_train_end(trainer, pl_module)
        self._vote.end()
        if self._at is not None:
            self._life.finish()
            self._account.finish(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        if self._data is not None and not self._has_begun:
            self._account.say_nothing_is_left(trainer, self._state, self._data)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._life.fail(exception)
        super().on_exception(trainer, pl_module, exception)
        self._end(trainer)  # Lightning calls no teardown() then

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._end(trainer)
        self._life.close()
        restore_usual(trainer)

    @override
    def _await_saves(self) -> None:
        """Writing may take long. That all ranks have come to a round of waiting is progress."""
        while not all(self._vote.gather(self._is_saved_within(self._life.round_s))):
            self._life.beat()
        self._life.beat()

    def _end(self, trainer: pl.Trainer) -> None:
        if self._data is not None:
            self._data.close()
        self._data = self._at = None
        self._epoch_is_due = False

    def _stop_if_told(self, trainer: pl.Trainer) -> None:
        """Where any rank is to end: one checkpoint of all, and the end of this process."""
        if not self._vote.cast(self._life.is_told):
            return
        saved = self._save_for_good(trainer)
        if saved is None and self._state is not None:
            saved = self._state.total_steps  # of the checkpoint that this start went on from
        reasons = self._vote.gather(self._life.reason)
        raise self._life.preempted(trainer, reasons, saved=saved)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._at is not None:
            self._at.add_to(checkpoint)
