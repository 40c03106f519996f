"""``accelerate launch`` with our agent, and the exit code of its script.

Run as ``python -m lightning_dist.frameworks.accelerate.launch``.
"""

from __future__ import annotations

from lightning_dist.elastic.launcher.run import run_launcher
from lightning_dist.frameworks.accelerate.private import launch

if __name__ == "__main__":
    run_launcher(launch)
