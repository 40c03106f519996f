"""Settings, models and optimizers with which local updates refuse to begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_worlds import World, plain, run
from torch import nn

from lightning_dist import OneBitAdam
from lightning_dist.integrations.torch.local.settings import LocalUpdateSettings


def test_samples_are_given_where_they_count() -> None:
    def train(world: World) -> None:
        with pytest.raises(
            ValueError, match="must be given with weigh_by='samples', and only then, got None"
        ):
            world.worker(plain(), weigh_by="samples").updates.step()
        with pytest.raises(ValueError, match="must be given with weigh_by='samples'"):
            world.worker(plain()).updates.step(32)

    run(train, 1)


def of_another_optimizer() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "sgd"}, "method must be one of local_sgd, post_local_sgd"),
        ({"sync_every": 0}, "sync_every must be 1 or more"),
        ({"sync_every": 5, "fragments": 2}, "multiple of fragments"),
        ({"sync_every": 8, "overlap_steps": 8}, "less than sync_every / fragments"),
        ({"method": "post_local_sgd"}, "plain DDP before ddp_steps"),
        ({"ddp_steps": 3}, "wrap it, or leave ddp_steps out"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"outer_momentum": 1.0}, "less than 1"),
        ({"mixing": -0.1}, "mixing must be 0 or more"),
        ({"weigh_by": "tokens"}, "weigh_by must be 'workers'"),
        ({"offload": "cpu"}, "offload must be True or False"),
        ({"outer_lr": 0.5, "outer_optimizer": torch.optim.SGD}, "set them there"),
        ({"outer_optimizer": "adamw"}, "got 'adamw'; write lambda tensors"),
        ({"outer_schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "number of outer steps"),
        ({"outer_schedule": "cosine"}, "got str; for a factor"),
        ({"outer_schedule": of_another_optimizer()}, "from the outer optimizer"),
        ({"codec": "dgc"}, "difference of weights"),
        ({"sync_every": 7, "fragments": 7}, "at most the number of trained parameters, 6"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], says: str) -> None:
    def train(world: World) -> None:
        world.worker(plain(), **settings)

    with pytest.raises(ValueError, match=says):
        run(train, 1)


def test_optimizers_and_models_that_exchange_themselves_are_refused() -> None:
    def train(world: World) -> None:
        with pytest.raises(ValueError, match="exchanges between ranks in every step"):
            world.worker(plain(), lambda each: OneBitAdam(each, freeze_step=2))
        with pytest.raises(ValueError, match="averages gradients in every step"):
            world.worker(world.rank.ddp(plain()))
        with pytest.raises(ValueError, match="has a DistributedDataParallel inside"):
            world.worker(nn.Sequential(world.rank.ddp(plain())))

    run(train, 2)


def test_a_count_in_the_middle_of_accumulation_is_refused() -> None:
    def train(world: World) -> None:
        worker = world.worker(plain())
        gradients = [torch.full_like(p, float("inf")) for p in worker.model.parameters()]
        for parameter, gradient in zip(worker.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        worker.updates.step()  # as after a step that a GradScaler has skipped
        worker.optimizer.zero_grad(set_to_none=False)
        worker.updates.step()  # a worker without a batch
        worker.model(next(worker.data)).square().mean().backward()
        with pytest.raises(ValueError, match="in the middle of gradient accumulation"):
            worker.updates.step()
        worker.optimizer.step()
        worker.updates.step()
        assert worker.updates.attempted == 3

    run(train, 1)


def test_few_outer_steps_are_said_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    sparse = LocalUpdateSettings.check("sparseloco")
    assert sparse.few(63 * 4 + 3).startswith("63 outer steps in 255 local ones")
    assert not sparse.few(64 * 4)
    assert not LocalUpdateSettings.check("local_sgd").few(8)

    def train(world: World) -> None:
        worker = world.worker(plain(), sync_every=2)
        worker.train(5)
        worker.updates.finish()

    run(train, 1)
    (line,) = [each.getMessage() for each in caplog.records if "outer steps" in each.getMessage()]
    says = "2 outer steps in 5 local ones, and diloco needs 20 or more"
    assert line.startswith(f"[lightning_dist] {says}")


def test_codecs_that_send_old_changes_at_once_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings(codec: str, **settings: Any) -> list[str]:
        caplog.clear()
        run(lambda world: world.worker(plain(), method="local_sgd", codec=codec, **settings), 2)
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    (line,) = warnings("randomk")
    assert "with outer_lr=1 the weights may diverge. Set outer_lr=0.1, or use 'topk'" in line
    assert len(warnings("threshold")) == 1
    for codec, settings in (
        ("randomk:ratio=0.1", {}),
        ("randomk", {"outer_lr": 0.1}),
        ("threshold", {"error_feedback": False}),
        ("topk:ratio=0.01", {}),
    ):
        assert warnings(codec, **settings) == []


def test_ranks_with_different_settings_are_refused() -> None:
    def train(world: World) -> str:
        with pytest.raises(ValueError, match="local updates") as error:
            world.worker(plain(), sync_every=4 + world.rank.rank)
        return str(error.value)

    assert all("sync_every" in each for each in run(train, 2))
