"""Compressed data-parallel training with Lightning: one import and one argument.

Run it with `python examples/lightning_train.py`; Lightning starts the second process itself.
"""

import argparse
import os

import lightning as L
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from lightning.pytorch.loggers import WandbLogger

import lightning_dist  # noqa: F401  (registers "compressed_ddp")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    L.seed_everything(7)
    trainer = L.Trainer(
        strategy="compressed_ddp",  # was: "ddp"
        accelerator="cpu",
        devices=2,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_train_batches=steps,
        val_check_interval=0.25,
        logger=WandbLogger(project="lightning_dist"),
        log_every_n_steps=5,
        enable_checkpointing=False,
    )
    trainer.fit(ByteGPT(), StdlibBytes())


if __name__ == "__main__":
    main()
