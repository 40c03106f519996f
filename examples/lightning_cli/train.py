"""LightningCLI: the strategy, the profiler and the checkpoints are in YAML.

python examples/lightning_cli/train.py fit --config examples/lightning_cli/config.yaml
... --trainer.strategy.init_args.codec int4          # or another value of it
"""

import os
import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

sys.path.insert(0, str(Path(__file__).parents[1]))

from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT

import lightning_dist  # noqa: F401  (registers "compressed_ddp")


def main() -> None:
    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    LightningCLI(ByteGPT, StdlibBytes)


if __name__ == "__main__":
    main()
