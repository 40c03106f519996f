"""Whether what happens within a step can be timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from lightning_dist.integrations.profiler.metadata import why_not_in_detail
from lightning_dist.integrations.profiler.models import LocalModel
from lightning_dist.integrations.torch.local.settings import LocalUpdateSettings


def model(monkeypatch: pytest.MonkeyPatch, device: str, backend: str, *, devices: int = 1) -> Any:
    """What is asked of a DistributedDataParallel, with torch's own words for its backend."""
    told = str(BackendConfig(Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: told)
    return SimpleNamespace(
        device=torch.device(device), is_multi_device_module=devices > 1, process_group=None
    )


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        ("cuda", "nccl"),
        ("cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:nccl"),
        ("xpu", "xccl"),
    ],
)
def test_it_can(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_in_detail(model(monkeypatch, device, backend)) == ""


@pytest.mark.parametrize(
    ("device", "backend", "devices", "reason"),
    [
        (
            "cuda",
            "gloo",
            1,
            "is timed where NCCL exchanges the gradients, here it is cpu:gloo,cuda:",
        ),
        ("cuda", "cpu:nccl,cuda:gloo", 1, "is timed where NCCL exchanges"),
        ("cuda", "nccl", 2, "on several GPUs of one process"),
        ("mps", "gloo", 1, "the times of work on mps are not measured"),
    ],
)
def test_it_cannot_and_says_why(
    device: str, backend: str, devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in why_not_in_detail(model(monkeypatch, device, backend, devices=devices))


@pytest.mark.parametrize(
    ("method", "arguments", "device", "reason"),
    [
        ("local_sgd", {}, "cpu", ""),
        ("streaming", {}, "cpu", "with overlap_steps=3 an exchange is of many steps"),
        ("local_sgd", {"ddp_steps": 4}, "cpu", "the first ddp_steps are those of DDP"),
        ("local_sgd", {}, "cuda", "are timed on CPUs only"),
    ],
)
def test_exchanges_of_local_updates(
    method: Any, arguments: dict[str, Any], device: str, reason: str
) -> None:
    network = SimpleNamespace(device=torch.device(device))
    updates: Any = SimpleNamespace(
        module=torch.nn.Linear(2, 2),
        reducer=SimpleNamespace(network=network),
        schedule=LocalUpdateSettings.check(method, outer_optimizer=None, **arguments),
    )
    found = LocalModel(updates).why_not_in_detail()
    assert reason in found
    assert bool(reason) == bool(found)
