"""Three ranks, two of them on one host: a worker of two ranks and a worker of one."""

from __future__ import annotations

from scenarios.catalogue import Facts, scenario
from scenarios.local_steps import fit, strategy


@scenario
def local_steps_inside_hosts() -> Facts:
    levels = {"hierarchical": "leader", "rank_groups": [[0, 1], [2]]}
    trainer, facts = fit(strategy(codec="int8", replicas="host", **levels))
    return facts | {"stats": dict(trainer.strategy.comm_stats())}
