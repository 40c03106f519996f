"""A Trainer whose ranks die where they are told to, and go on within their processes.

    recovering_trainers.py FOLDER SETTINGS

SETTINGS is JSON, as of `recovering_loops`: ``codec``, ``faults``, ``lost``, ``joins``, ``mirror``,
``ranks``, ``per_host`` and ``notices``; and ``accumulate``, ``clip``, ``validates``
(limit_val_batches), ``interval`` (val_check_interval), ``across`` (which counts across epochs),
``syncs``, ``logs`` (to a CSV file; ``"wandb"``: to wandb too),
``meets`` (a callback waits), ``best`` (an AsyncCheckpoint and a
CommProfiler), ``bar`` (of progress) and ``flags`` (other arguments of a Trainer).
Every rank writes what it computes and what it has committed to ``FOLDER/<worker>.jsonl``.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from recovering_loops import (
    BATCH,
    EPOCHS,
    Net,
    Samples,
    await_newcomers,
    await_true,
    begin,
    digest,
    profiled,
    written,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import AsyncCheckpoint, CompressedDDPStrategy, ElasticRestart
from lightning_dist.frameworks.lightning.elastic.recovery import RecoverableTrainerLoop


class Module(pl.LightningModule):
    """Tells what it computes, and dies where it is told to."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.told = Net(), told
        self.faults = begin(folder, told, RecoverableTrainerLoop)
        self.own = os.environ["LIGHTNING_DIST_WORKER"]
        self.log_file = (folder / f"{self.own}.jsonl").open("a", buffering=1)
        self.ids: list[int] = []
        self.validated: list[int] = []
        self.mean = torchmetrics.MeanMetric()
        self.key: tuple[int, int] = (-1, -1)
        self.world, self.levels, self.residual = 0, False, 0.0
        self.net.layers[1].weight.register_hook(lambda _: self.faults.strike("between buckets"))

    def note(self, **facts: Any) -> None:
        print(written(**facts), file=self.log_file)

    @property
    def generations(self) -> Any:
        return self.trainer.strategy.generations

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step, joins = self.trainer.global_step, self.told.get("joins", 1 << 20)
        if step in joins if isinstance(joins, list) else step >= joins:
            missing = self.told.get("ranks", 3) - self.trainer.world_size
            await_newcomers(self.generations, missing=missing)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, x = batch
        key = self.generations.member.generation.number, self.trainer.global_step
        if key != self.key:
            self.key, self.ids = key, []
            # A callback may enter the next generation after the step.
            reducer = self.trainer.strategy.sync.reducer
            self.world, self.levels = self.trainer.world_size, reducer.network.intra is not None
            self.residual = float(reducer.state.packed().norm())
        self.faults.begin(
            self.trainer.global_step,
            world=self.world,
            is_broken=lambda: self.generations.member.is_broken,
        )
        elastic = self.trainer.checkpoint_callbacks[-1]
        assert isinstance(elastic, ElasticRestart)
        self.faults.lifecycle = elastic._session.lifecycle
        self.faults.strike("forward")
        if (self.key[1], self.key[0]) == (self.told.get("notices"), 0):
            self.note(passed=self.key[1] + 1)
            await_true(lambda: self.generations.member.is_broken, "a rank is lost")
        assert elastic.micro_batch is not None
        if elastic.micro_batch.weight:
            self.ids += numbers.tolist()
        loss = (self.net(x) - x.flip(1)).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=self.told.get("syncs", False))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        generation, step = self.key
        epoch = self.trainer.current_epoch
        self.note(computed=step + 1, ids=self.ids, generation=generation, epoch=epoch)
        self.faults.strike("after the vote")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.faults.strike("after the step")
        self.note(
            committed=self.key[1] + 1,
            generation=self.key[0],
            hash=digest(self.net),
            world=self.world,
            levels=self.levels,
            residual=self.residual,
            lr=self.lr_schedulers().get_last_lr()[0],
        )

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > self.key[1]:
            self.faults.strike("end of step")

    def on_train_epoch_end(self) -> None:
        logged = self.trainer.fit_loop.epoch_loop._results["training_step.loss"]
        self.note(logged=int(logged.cumulated_batch_size), epoch=self.trainer.current_epoch)
        self.faults.strike("end of epoch")

    def on_validation_start(self) -> None:
        self.validated = []
        if self.told.get("syncs", False):
            self.trainer.strategy.barrier()  # a fault at its first batch finds all ranks in it

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.faults.strike("validation" if batch_idx == 0 else "later in the validation")
        numbers, x = batch
        loss = (self.net(x) - x.flip(1)).square().mean()
        self.validated += numbers.tolist()
        self.mean.update(loss, weight=len(x))
        self.log("val_loss", loss, sync_dist=self.told.get("syncs", False))

    def on_validation_epoch_end(self) -> None:
        if self.told.get("syncs", False):
            self.log("val_mean", self.mean.compute())  # which waits for others too
            self.mean.reset()
            self.trainer.strategy.barrier()
            self.faults.strike("after the validation")

    def on_validation_end(self) -> None:
        self.faults.strike("end of validation")
        ranks = self.trainer.strategy.reduce(torch.ones(()), reduce_op="sum")
        if self.trainer.sanity_checking:
            return
        found = self.trainer.callback_metrics
        means = [float(found[name]) for name in ("val_loss", "val_mean") if name in found]
        self.note(
            validated=self.trainer.global_step,
            ids=self.validated,
            generation=self.generations.member.generation.number,
            means=means,
            ranks=float(ranks),
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Meets(pl.Callback):
    """Waits for all ranks after every batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(module, Module)
        module.faults.strike("end of batch")
        found = trainer.strategy.broadcast(trainer.global_step)
        assert found == trainer.global_step


def train(folder: Path, told: dict[str, Any]) -> None:
    module = Module(folder, told)
    accumulate = told.get("accumulate", 1)
    best = AsyncCheckpoint(
        folder / "best", filename="{step}", monitor="val_loss", mode="max", save_top_k=2
    )
    others = [best, profiled(None, folder / "profile")] if "best" in told else []
    others += [Meets()] if "meets" in told else []
    loggers: list[Any] = [CSVLogger(folder)]
    if told.get("logs") == "wandb":
        loggers.append(WandbLogger(offline=True, save_dir=folder))
    bar, saves = TQDMProgressBar(), 4 + (module.own == told.get("other"))
    others += [bar] if "bar" in told else []
    given: dict[str, Any] = dict(
        accelerator="cpu",
        strategy=CompressedDDPStrategy(
            told.get("codec", "none"),
            min_compress_numel=0,
            compile_kernels=False,
            recovery="in_process",
            mirror_residuals=told.get("mirror", False),
            bucket_cap_mb=0.0001,
        ),
        callbacks=[ElasticRestart(folder / "ckpt", every_n_train_steps=saves, seed=5), *others],
        max_epochs=told.get("epochs", EPOCHS),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=told.get("clip"),
        limit_val_batches=told.get("validates", 0),
        val_check_interval=told.get("interval"),
        check_val_every_n_epoch=None if "across" in told else 1,
        num_sanity_val_steps=1 if told.get("validates") else 0,
        log_every_n_steps=1,
        logger=loggers if told.get("logs") else False,
        enable_progress_bar="bar" in told,
        enable_model_summary=False,
    )
    given |= told.get("flags", {})
    trainer = pl.Trainer(**given)
    loader = DataLoader(Samples(), batch_size=BATCH // accumulate, shuffle=True)
    trainer.fit(module, loader, DataLoader(Samples(), batch_size=BATCH))
    kept = {Path(path).name: float(score) for path, score in best.best_k_models.items()}
    shown = bar.train_progress_bar.n if "bar" in told else 0
    module.note(end=trainer.global_step, hash=digest(module.net), kept=kept, shown=shown)
    faulthandler.cancel_dump_traceback_later()
    torch.save(module.net.state_dict(), folder / f"weights-{module.own}.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))
