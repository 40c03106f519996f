"""One device for every rank that the launcher started on this node."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_dist.elastic.launcher.launch import Launch
from lightning_dist.integrations.lightning.launcher import (
    ElasticEnvironment,
    launch_of,
    local_devices,
)

CPU = torch.device("cpu")


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def node(ranks: int, local_rank: int = 0) -> Launch:
    return Launch(is_elastic=True, local_rank=local_rank, local_world_size=ranks)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@pytest.mark.parametrize("given", [0, 1, 2, 3, 5])
def test_cpus(given: int) -> None:
    assert local_devices([CPU] * given, node(3)) == [CPU] * 3


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        (gpus(0, 1, 2, 3), 2, gpus(0, 1)),  # devices="auto"
        (gpus(2, 3), 2, gpus(2, 3)),
        (gpus(2), 3, gpus(2, 0, 1)),
        (gpus(0), 4, gpus(0, 1, 2, 3)),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_gpus(given: list[torch.device], ranks: int, expected: list[torch.device]) -> None:
    assert local_devices(given, node(ranks)) == expected


@pytest.mark.usefixtures("four_gpus")
def test_more_ranks_than_gpus() -> None:
    with pytest.raises(ValueError, match=r"local rank 4 needs a cuda .* --nproc-per-node=4"):
        local_devices(gpus(0), node(6, local_rank=4))


def test_ranks_that_each_see_one_gpu_as_their_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --virtual-local-rank: every rank is local rank 0, and device 0 is its own."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert local_devices(gpus(0), node(8)) == gpus(0)


def test_other_launchers_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of(TorchElasticEnvironment()) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert launch_of(LightningEnvironment()) is None
    assert launch_of(None) is None
    launch = launch_of(ElasticEnvironment())
    assert launch is not None
    assert launch.world_size == 7
