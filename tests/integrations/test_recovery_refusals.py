"""What cannot be recovered within the process, and is said before the training begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import CommProfiler, compress_ddp
from lightning_dist.elastic.recovery.generations import Generations
from lightning_dist.elastic.recovery.groups import init_alone, is_alone
from lightning_dist.integrations.torch.ddp import reducer_of
from lightning_dist.integrations.torch.recovery import StepRecovery
from lightning_dist.integrations.torch.regroup import require_recoverable


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    if dist.is_initialized():  # of a Trainer of another test in this process
        dist.destroy_process_group()
    init_alone()
    yield
    dist.destroy_process_group()


def wrapped(module: nn.Module | None = None, **ddp: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or nn.Linear(8, 8), **ddp)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (wrapped, r"needs the hook of compress_ddp.*call compress_ddp\(model, codec\) before"),
        (lambda: compressed(static_graph=True), "without static_graph and find_unused_parameters"),
        (lambda: compressed(find_unused_parameters=True), "without static_graph and find_unused"),
        (lambda: compressed(ranks_per_host=1), "ranks_per_host and rank_groups name ranks"),
    ],
)
def test_models(model: Any, says: str) -> None:
    ddp = model()
    with pytest.raises(ValueError, match=says):
        require_recoverable(ddp, reducer_of(ddp.module))


def compressed(
    module: nn.Module | None = None,
    *,
    codec: str = "int8",
    ranks_per_host: int | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    **ddp: Any,
) -> DistributedDataParallel:
    model = wrapped(module, **ddp)
    model.keeps = compress_ddp(  # type: ignore[assignment]  # nobody else holds it
        model,
        codec,
        compile_kernels=False,
        grad_scaler=grad_scaler,
        ranks_per_host=ranks_per_host,
    )
    return model


def recovery(model: DistributedDataParallel, **given: Any) -> StepRecovery:
    generations = cast("Generations", SimpleNamespace())
    return StepRecovery(generations, model, optimizers=[], counters={}, steps=lambda: 0, **given)


def test_a_grad_scaler_that_is_not_in_the_state() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="give the GradScaler to ElasticLoop in state="):
        recovery(compressed(grad_scaler=scaler))


def test_copies_of_residuals_where_there_are_none() -> None:
    with pytest.raises(
        ValueError, match="mirror_residuals has nothing to copy: codec NoCompression"
    ):
        recovery(compressed(codec="none"), mirror_every=1)


def test_a_profile_of_a_process_that_has_not_met_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = compressed()
    monkeypatch.setenv("LIGHTNING_DIST_RECOVERY_STORE", "localhost:1")
    assert not is_alone()  # a launch of one process has nobody to meet
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="enter CommProfiler inside of `with ElasticLoop"):
        CommProfiler(model, dirpath=tmp_path).__enter__()
    assert not [*tmp_path.iterdir()]
