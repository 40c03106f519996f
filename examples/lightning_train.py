"""Compressed data-parallel training with Lightning: one import and one argument.

Run it with `python examples/lightning_train.py`; Lightning starts the second process itself.
"""

import argparse

import lightning as L
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT

import lightning_dist  # noqa: F401  (registers "compressed_ddp")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    L.seed_everything(7)
    trainer = L.Trainer(
        strategy="compressed_ddp",  # was: "ddp"
        accelerator="cpu",
        devices=2,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_train_batches=steps,
        val_check_interval=0.25,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(ByteGPT(), StdlibBytes())


if __name__ == "__main__":
    main()
