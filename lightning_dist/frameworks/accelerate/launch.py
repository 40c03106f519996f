"""``accelerate launch`` with the exit code of its script.

Run as ``python -m lightning_dist.frameworks.accelerate.launch``.
"""

from __future__ import annotations

from lightning_dist.elastic.launcher.exits import exit_code_of_script
from lightning_dist.frameworks.accelerate.private import launch

if __name__ == "__main__":
    with exit_code_of_script():
        launch()
