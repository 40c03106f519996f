"""torchrun with our agent: ``python -m lightning_dist.elastic.launcher``.

A planned stop is no failure
(:class:`~lightning_dist.elastic.launcher.exits.PlannedStops`), and workers that recover
within their processes are replaced one by one
(:class:`~lightning_dist.elastic.recovery.agent.RecoveringAgent`).
"""

from __future__ import annotations

from torch.distributed import run

from lightning_dist.base.features import AGENT
from lightning_dist.elastic.launcher.exits import PlannedStops, exit_code_of_script
from lightning_dist.elastic.private import replace_agent


def main() -> None:
    """Run torchrun's command line with such agents."""
    agent: type[PlannedStops] = PlannedStops
    if AGENT.missing is None:  # otherwise workers refuse recovery='in_process'
        from lightning_dist.elastic.recovery.agent import RecoveringAgent

        agent = RecoveringAgent
    replace_agent(agent)
    with exit_code_of_script():
        run.main()


if __name__ == "__main__":
    main()
