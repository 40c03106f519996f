"""A Trainer in local steps: workers exchange what they have changed every few steps.

Run it with `python examples/lightning_local_steps.py`; Lightning starts the second process itself.
"""

import argparse
import os

import lightning as L
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from lightning.pytorch.loggers import WandbLogger

from lightning_dist import LocalUpdateStrategy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="local_sgd")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    L.seed_everything(7)
    strategy = LocalUpdateStrategy(arguments.method, sync_every=arguments.sync_every)
    trainer = L.Trainer(
        strategy=strategy,  # was: "ddp"
        accelerator="cpu",
        devices=2,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_train_batches=arguments.steps,
        val_check_interval=0.5,  # with the anchor's weights
        logger=WandbLogger(project="lightning_dist"),
        log_every_n_steps=2,
        enable_checkpointing=False,
    )
    trainer.fit(ByteGPT(), StdlibBytes())
    metrics, sent = trainer.callback_metrics, strategy.comm_stats()
    trainer.print(
        f"perplexity {metrics['val_perplexity']:.1f}, {sent['wire_bytes'] / 1e6:.2f} MB sent in "
        f"{sent['steps']} exchanges"
    )


if __name__ == "__main__":
    main()
