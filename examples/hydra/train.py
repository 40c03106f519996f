"""Hydra: the strategy is a group of the configuration, with `_target_`.

    python examples/hydra/train.py                            # conf/strategy/compressed_ddp.yaml
    torchrun --nproc-per-node 2 examples/hydra/train.py strategy.codec=int4 steps=50
    python examples/hydra/train.py strategy=ddp

Start several ranks with torchrun: then each of them reads the same command line. Where Lightning
starts them itself it has to know Hydra's folders.
"""

import os
import sys
from pathlib import Path

import hydra
import lightning as L
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    L.seed_everything(config.seed)
    strategy = hydra.utils.instantiate(config.strategy)
    trainer = hydra.utils.instantiate(config.trainer, strategy=strategy)
    trainer.fit(ByteGPT(), StdlibBytes())
    if trainer.is_global_zero and hasattr(trainer.strategy, "comm_stats"):
        print(f"{trainer.strategy.comm_stats()['ratio']:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
