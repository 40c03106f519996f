"""Three ranks load what two have saved."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_dist
from lightning_dist.accelerate import LocalUpdatesPlugin
from scenarios.accelerate_runs import Run
from scenarios.accelerate_states import warnings
from scenarios.catalogue import Facts, folder, rank, scenario, world_size
from scenarios.fitting import digest, parameters
from scenarios.models import Regression, loader


@scenario
def plugin_of_three() -> Facts:
    with Run() as run, warnings() as messages:
        run.accelerator.load_state(str(folder() / "of_two_plugins"))
        loaded = run.facts()
        run.train(1)
        return {**loaded, "digests": run.digests, "messages": messages}


@scenario
def accelerate_local_inside_hosts() -> Facts:
    """Two ranks on one host, one on another; and a loop with DDP between the ranks of a host."""
    hosts = [[0, 1], [2]]
    settings = {"sync_every": 3, "codec": "int4", "min_compress_numel": 0, "rank_groups": hosts}
    plugin = LocalUpdatesPlugin(replicas="host", **settings)
    with Run(None, attach=plugin.attach, optimizer=torch.optim.AdamW) as run:
        run.train(8)
        stats = dict(plugin.updates.comm_stats())
        found = {"own": run.digests, "stats": stats}
        plugin._end(lambda: None)
        found["parameters"] = parameters(run.models[0].module)
    groups = [dist.new_group(each) for each in hosts]
    model = Regression(hidden=256).net
    inside = DistributedDataParallel(model, process_group=groups[rank() // 2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    updates = lightning_dist.local_updates(inside, optimizer, **settings)
    found["loop"] = []
    for x, y in list(loader(8))[rank() :: world_size()]:
        nn.functional.mse_loss(inside(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.step()
        found["loop"].append(digest(model))
    updates.close()
    return found
