"""One rank: print what the pairs of hosts were measured to send before a training, in Mbit/s."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.links import measure_links


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group()
    hosts = [str(rank) for rank in range(dist.get_world_size())]
    links = measure_links(group, hosts=hosts, name="flat")
    rates = [
        each.sent * 8e-6 / each.seconds
        for each in links
        if isinstance(each, LinkRecord) and each.peer is not None
    ]
    print(json.dumps(rates))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
