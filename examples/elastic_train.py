"""A training that resumes after a rank is killed.

    lightning-dist launch --nproc-per-node 2 examples/elastic_train.py

Kill one of its two ranks (``kill -KILL PID``): the launcher starts both again, and training resumes
from the newest checkpoint. With another --nproc-per-node it resumes with the same global batches.
"""

import argparse

import lightning as L
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT

from lightning_dist import ElasticRestart


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="elastic_out")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    L.seed_everything(7)
    trainer = L.Trainer(
        strategy="compressed_ddp",
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=arguments.steps,
        val_check_interval=0.5,
        logger=False,
        callbacks=[ElasticRestart(arguments.folder, every_n_train_steps=10, hang_timeout=120)],
    )
    trainer.fit(ByteGPT(), StdlibBytes())


if __name__ == "__main__":
    main()
