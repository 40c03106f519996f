"""A model sharded by FSDP2 in two replicas, whose gradients are compressed between replicas.

Run it with `python examples/fsdp2_train.py`; Lightning starts the other three processes itself. Two
ranks stand for a node here; on a cluster leave `replicate_size` out, and each node holds a replica.
"""

import argparse
import os

import lightning as L
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT
from lightning.pytorch.loggers import WandbLogger
from torch.distributed.fsdp import fully_shard

from lightning_dist import CompressedModelParallelStrategy


class ShardedByteGPT(ByteGPT):
    def configure_model(self) -> None:  # as under Lightning's ModelParallelStrategy
        shards = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=shards)
        fully_shard(self, mesh=shards)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", default="int8")
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    L.seed_everything(7)
    strategy = CompressedModelParallelStrategy(arguments.codec, replicate_size=2)
    trainer = L.Trainer(
        strategy=strategy,  # was: ModelParallelStrategy
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        limit_train_batches=arguments.steps,
        logger=WandbLogger(project="lightning_dist"),
        log_every_n_steps=2,
        enable_checkpointing=False,
    )
    trainer.fit(ShardedByteGPT(), StdlibBytes())
    metrics, sent = trainer.callback_metrics, strategy.comm_stats()
    trainer.print(
        f"perplexity {metrics['val_perplexity']:.1f}, accuracy {metrics['val_accuracy']:.3f}, "
        f"{sent['ratio']:.1f} times fewer bytes between replicas"
    )


if __name__ == "__main__":
    main()
