"""Delayed gradients and local updates on the simulated accelerator: what the CPU gives."""

from collections import Counter
from typing import Any

import pytest
import torch
from reducer.feeding import Fed, backward, compressed, digest
from torch import nn
from worlds import Rank, run_threads

from lightning_dist import local_updates
from simulated_device.cases_ddp import SMALL_BUCKETS, given, left, place
from simulated_device.device import install
from simulated_device.ranks import delays, require_same, run_on_devices, to_cpu

sim = install()


def late(rank: Rank, codec: str) -> list[str]:
    digests = []
    settings: dict[str, Any] = {"min_compress_numel": 0, "ddp": SMALL_BUCKETS, "delay": 1}
    with compressed(rank, Fed().to(place(rank)), codec, **settings) as (model, reducer):
        for step in range(5):
            backward(model, given(rank, step))
            digests.append(digest(left(model)))
            if step == 3:
                state = reducer.state_dict()
                digests += [] if state is None else [digest(list(state["delayed"].values()))]
        reducer.wait()
    return digests


@pytest.mark.parametrize("codec", ["none", "int8", "topk:ratio=0.1", "powersgd:rank=2"])
@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2)])
def test_delayed_means(codec: str, size: int, seed: int) -> None:
    require_same(lambda rank: late(rank, codec), size, seed=seed)


SCHEDULES: list[dict[str, Any]] = [
    {"method": "diloco", "sync_every": 2},
    {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1},
]


def local(
    rank: Rank, schedule: dict[str, Any], *, offload: bool
) -> tuple[list[str], Counter[str], int]:
    """Digests of the weights, bytes of the anchor and its momenta by device, and elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    model = model.to(place(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"groups": rank.groups(), "min_compress_numel": 0, "codec": "int8", **schedule}
    updates = local_updates(model, optimizer, offload=offload, **settings)
    digests = []
    for step in range(9):
        generator = torch.Generator().manual_seed(100 * rank.rank + step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(place(rank))
        optimizer.step()
        updates.step()
        digests.append(digest(to_cpu([p.detach() for p in model.parameters()])))
    outer = updates.outer_optimizer
    held = [each for group in outer.param_groups for each in group["params"]]
    held += [state["momentum_buffer"] for state in outer.state.values()]
    updates.close()
    nbytes = Counter[str]()
    for each in held:
        nbytes[each.device.type] += each.nbytes
    return digests, nbytes, sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["diloco", "streaming"])
def test_local_updates(schedule: dict[str, Any], offload: bool) -> None:
    expected = run_threads(lambda rank: local(rank, schedule, offload=False), 2)
    with delays(3):
        found = run_on_devices(lambda rank: local(rank, schedule, offload=offload), 2)
    assert [digests for digests, *_ in found] == [digests for digests, *_ in expected]
    for _, nbytes, elements in found:
        assert nbytes == {"cpu" if offload else sim.__name__.removeprefix("torch."): 8 * elements}
