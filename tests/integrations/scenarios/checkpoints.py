"""Save, resume, and exchange checkpoints with plain DDP; on the same number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from scenarios.catalogue import Facts, folder, scenario
from scenarios.fitting import compressed, fit, make_trainer, plain, snapshot
from scenarios.lifecycle import AtStart
from scenarios.models import Regression

# Biases stay uncompressed, weights travel in several buckets.
SETTINGS = {"min_compress_numel": 100, "bucket_cap_mb": 0.001}


def model() -> Regression:
    return Regression(optimizer="adam")


def saved(name: str, **arguments: Any) -> ModelCheckpoint:
    """Saves ``NAME.ckpt`` after every epoch, over the one before."""
    return ModelCheckpoint(
        folder(), filename=name, enable_version_counter=False, every_n_epochs=1, **arguments
    )


def fit_and_save(name: str, strategy: Any, *, epochs: int, ckpt_path: Any = None) -> Facts:
    callbacks = [saved(name)]
    return fit(
        model(),
        strategy,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=True,
        ckpt_path=ckpt_path,
    )


@scenario
def resume() -> Facts:
    """8 steps in one go, and 4 + 4 with a checkpoint between."""
    whole = fit_and_save("whole", compressed(**SETTINGS), epochs=2)
    half = fit_and_save("half", compressed(**SETTINGS), epochs=1)
    path, again = folder() / "half.ckpt", folder() / "resumed.ckpt"
    resumed = fit_and_save("resumed", compressed(**SETTINGS), epochs=2, ckpt_path=path)
    optimizer = {
        file.stem: torch.load(file, weights_only=True)["optimizer_states"][0]["state"]
        for file in (folder() / "whole.ckpt", again)
    }
    return {"whole": whole, "half": half, "resumed": resumed, "optimizer": optimizer}


@scenario
def without_residuals() -> Facts:
    """Resumed from the same file but for its residuals: this must differ from `resume`."""
    path = folder() / f"stripped.{torch.distributed.get_rank()}.ckpt"
    fit_and_save("kept", compressed(**SETTINGS), epochs=1)
    torch.distributed.barrier()
    checkpoint = torch.load(folder() / "kept.ckpt", weights_only=True)
    del checkpoint["lightning_dist"]
    torch.save(checkpoint, path)
    return fit_and_save("other", compressed(**SETTINGS), epochs=2, ckpt_path=path)


@scenario
def ours_under_ddp() -> Facts:
    fit_and_save("ours", compressed(**SETTINGS), epochs=1)
    resumed = fit_and_save("ddp", plain(), epochs=2, ckpt_path=folder() / "ours.ckpt")
    return {"resumed": resumed}


@scenario
def ddp_under_ours() -> Facts:
    """The strategy has residuals of an earlier fit: a plain checkpoint starts without any."""
    fit_and_save("plain", plain(), epochs=1)
    start = AtStart()
    trainer = make_trainer(compressed(**SETTINGS), max_epochs=2, callbacks=[start])
    trainer.fit(model())
    before = snapshot(trainer)
    trainer.fit(model(), ckpt_path=folder() / "plain.ckpt")
    return {
        "before": before,
        "start": start.residuals,
        "step": start.step,
        "resumed": snapshot(trainer),
    }


@scenario
def weights_only() -> Facts:
    """A checkpoint of weights has no residuals, one saved after the fit has."""
    trainer = make_trainer(compressed(**SETTINGS), max_epochs=1, limit_val_batches=1.0)
    trainer.fit(model())
    trainer.save_checkpoint(folder() / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(folder() / "after.ckpt")
    load = {
        name: torch.load(folder() / f"{name}.ckpt", weights_only=True)
        for name in ("weights", "after")
    }
    validated = trainer.validate(model(), ckpt_path=folder() / "after.ckpt", verbose=False)
    return {
        "validated": validated[0]["val_loss"],
        "keys": sorted(load["weights"]),
        "after": load["after"]["lightning_dist"],
        "fit": snapshot(trainer),
    }
