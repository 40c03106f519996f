"""torchrun with our agent: ``python -m lightning_dist.elastic.launcher``."""

from __future__ import annotations

from torch.distributed import run

from lightning_dist.elastic.launcher.run import run_launcher

if __name__ == "__main__":
    run_launcher(run.main)
