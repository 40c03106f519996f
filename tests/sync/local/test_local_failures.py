"""Local steps where something fails (weights, a step that is skipped, a peer, a codec), or with
settings, models and optimizers with which they refuse to begin.
"""

import time
from typing import Any, NoReturn

import pytest
import torch
from local_worlds import Net, Worker, World, adam, on_threads, plain, require_same, sgd
from threads import of_all
from torch import Tensor, nn

from lightning_dist import OneBitAdam
from lightning_dist.settings.local_updates import LocalUpdateSettings


@pytest.mark.parametrize("overlap", [0, 1])
@on_threads(2)
def test_a_worker_that_is_not_finite_leaves_the_anchor_clean(world: World, overlap: int) -> None:
    settings = {"sync_every": 3, "codec": "int8", "overlap_steps": overlap, "mixing": 0.5}
    worker = world.worker(plain(), sgd, **settings)
    worker.train(3 + overlap, poison=2)
    assert worker.updates.metrics()["outer/workers"] == 1
    anchors = worker.anchors()
    require_same(*world.of_all(anchors))
    assert not torch.equal(anchors[0], plain()[0].weight)
    worker.train(6)
    assert all(each.isfinite().all() for each in [*anchors, *worker.weights()])


@pytest.mark.parametrize("fragments", [1, 2])
@on_threads(2)
def test_a_worker_that_was_not_finite_trains_again(world: World, fragments: int) -> None:
    """With moments of its own: those of AdamW are not finite for ever."""
    settings = {"sync_every": 4, "codec": "none", "fragments": fragments, "overlap_steps": 1}
    worker = world.worker(plain(), adam, **settings)
    worker.train(10, poison=2)
    before = worker.weights()
    for _ in range(8):
        worker.train(1)
        moments = [each for of in worker.optimizer.state.values() for each in of.values()]
        assert all(each.isfinite().all() for each in [*worker.weights(), *moments])
    assert worker.updates.metrics()["outer/workers"] == 2
    assert not torch.equal(before[0], worker.weights()[0])
    require_same(*world.of_all(worker.anchors()))


@on_threads(2)
def test_a_step_that_a_worker_leaves_out_counts(world: World) -> None:
    worker = world.worker(plain(), sync_every=2, codec="none")
    for step in range(4):
        if world.rank.rank or step % 2:  # the other worker has no batch, or its scaler skips
            worker.train(1)
        else:
            worker.updates.step()
    require_same(*world.of_all(worker.anchors()))


@on_threads(2)
def test_a_step_that_a_grad_scaler_skips_counts(world: World) -> None:
    worker = world.worker(plain(dtype=torch.float32), sgd, sync_every=2, codec="none")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        worker.optimizer.zero_grad()
        loss = worker.model(next(worker.data)).square().mean()
        overflows = step == 0 and world.rank.rank == 0
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        scaler.step(worker.optimizer)
        scaler.update()
        worker.updates.step()
    assert world.of_all(scaler.get_scale()) == [2.0, 4.0]
    require_same(*world.of_all(worker.anchors()))
    assert all(each.isfinite().all() for each in worker.anchors())


@on_threads(2)
def test_a_step_after_close_raises(world: World) -> None:
    worker = world.worker(plain(), sgd, method="local_sgd", sync_every=1, overlap_steps=0)
    worker.train(1)
    worker.updates.close()
    with pytest.raises(RuntimeError, match="a reducer that is closed"):
        worker.train(1)


def state_of(worker: Worker) -> list[Tensor]:
    momenta = [each["momentum_buffer"] for each in worker.updates.outer_optimizer.state.values()]
    buffers = worker.updates.buffers().values()
    return [each.clone() for each in (*worker.anchors(), *momenta, *worker.weights(), *buffers)]


@pytest.mark.parametrize("lost_in", ["exchange", "totals", "statistics"])
@pytest.mark.parametrize("overlap", [0, 2])
@on_threads(3)
def test_a_peer_that_is_lost_in_an_outer_step_changes_nothing(
    world: World, overlap: int, lost_in: str
) -> None:
    """The others raise within the limit, with the state of before, and can close."""

    def leave() -> None:
        for limit in limits:  # from now on: this rank may have been slow to come here
            limit.seconds = 0.5

    def gone(*_: Any, **__: Any) -> NoReturn:
        leave()
        raise RuntimeError("this rank is gone")

    settings = {"overlap_steps": overlap, "codec": "int8", "exchange_timeout": 15.0}
    worker = world.worker(Net(), sync_every=4, **settings)
    network = worker.updates.reducer.network
    assert network.limit.seconds == 15
    limits = of_all(world.rank, network.limit)
    worker.train(7)  # a window, and the begin of another
    if world.rank.rank == 2:
        if lost_in == "exchange":
            leave()
        else:
            channel = network.control if lost_in == "totals" else network.data
            channel.all_reduce = gone  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="this rank is gone"):
                worker.train(1 + overlap)
        return
    worker.train(overlap)
    worker.learn()
    before, start = state_of(worker), time.monotonic()
    with pytest.raises(RuntimeError, match="a rank has terminated, hangs, or is slower"):
        worker.updates.step()
    require_same(state_of(worker), before)
    if lost_in != "statistics":  # the mean of workers that are not known is not used later
        with pytest.raises(RuntimeError):
            worker.updates.step()
        require_same(state_of(worker), before)
    closes = time.monotonic()
    worker.updates.close()
    assert time.monotonic() - closes < 5  # half a second, and what a busy machine adds
    assert closes - start < 15  # the groups would wait for 20


RECOMMENDED: list[tuple[str, dict[str, Any]]] = [
    ("randomk", {"outer_lr": 0.1}),
    ("randomk", {"error_feedback": False}),
    ("randomk:ratio=0.1", {}),
    ("threshold", {"outer_lr": 0.1}),
    ("threshold", {"error_feedback": False}),
    ("topk:ratio=0.01", {}),
]
"""Codecs that diverge or not, and what keeps those that do from it."""


@pytest.mark.parametrize(("codec", "settings"), RECOMMENDED)
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@on_threads(2)
def test_what_the_warning_recommends_stays_finite(
    world: World, codec: str, settings: dict[str, Any]
) -> None:
    """At an outer rate of 1 ``randomk`` of 1 % and ``threshold`` do not, nor does a naive twin."""
    worker = world.worker(plain(), sgd, method="local_sgd", sync_every=2, codec=codec, **settings)
    worker.train(2000)
    assert all(float(each.abs().max()) < 5 for each in worker.anchors())


@on_threads(1)
def test_samples_are_given_where_they_count(world: World) -> None:
    with pytest.raises(
        ValueError, match="must be given with weigh_by='samples', and only then, got None"
    ):
        world.worker(plain(), weigh_by="samples").updates.step()
    with pytest.raises(ValueError, match="must be given with weigh_by='samples'"):
        world.worker(plain()).updates.step(32)


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
        (
            {"outer_optimizer": "adamw"},
            r"such as lambda tensors: torch\.optim\.AdamW\(tensors, lr=0\.1\)",
        ),
        ({"outer_schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "number of outer steps"),
        ({"outer_schedule": "cosine"}, "got str; for a factor"),
        ({"outer_schedule": of_another_optimizer()}, "from the outer optimizer"),
        ({"codec": "dgc"}, "difference of weights"),
        ({"sync_every": 7, "fragments": 7}, "at most the number of trained parameters, 6"),
    ],
)
@on_threads(1)
def test_what_cannot_work_is_refused(world: World, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        world.worker(plain(), **settings)


@on_threads(2)
def test_optimizers_and_models_that_exchange_themselves_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="exchanges between ranks in every step"):
        world.worker(plain(), lambda each: OneBitAdam(each, freeze_step=2))
    with pytest.raises(ValueError, match="averages gradients in every step"):
        world.worker(world.rank.ddp(plain()))
    with pytest.raises(ValueError, match="has a DistributedDataParallel inside"):
        world.worker(nn.Sequential(world.rank.ddp(plain())))


@on_threads(2)
def test_a_model_that_has_updates_already_is_refused(world: World) -> None:
    """Both would count each step of the optimizer, and make outer steps."""
    first = world.worker(plain())
    with pytest.raises(ValueError, match="local_updates was called on it before; close"):
        world.worker(first.model)
    first.updates.close()
    world.worker(first.model)


@on_threads(2)
def test_ranks_with_different_settings_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="sync_every: 4 on rank 0; 5 on rank 1"):
        world.worker(plain(), sync_every=4 + world.rank.rank)


@on_threads(1)
def test_a_count_in_the_middle_of_accumulation_is_refused(world: World) -> None:
    worker = world.worker(plain())
    for parameter in worker.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    worker.updates.step()  # as after a step that a GradScaler has skipped
    worker.optimizer.zero_grad(set_to_none=False)
    worker.updates.step()  # a worker without a batch
    worker.model(next(worker.data)).square().mean().backward()
    with pytest.raises(ValueError, match="in the middle of gradient accumulation"):
        worker.updates.step()
    worker.optimizer.step()
    worker.updates.step()
    assert worker.updates.attempted == 3


def test_few_outer_steps_are_said_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    sparse = LocalUpdateSettings(method="sparseloco")
    assert sparse.few(63 * 4 + 3).startswith("63 outer steps in 255 local ones")
    assert not sparse.few(64 * 4)
    assert not LocalUpdateSettings(method="local_sgd").few(8)

    @on_threads(1)
    def train(world: World) -> None:
        worker = world.worker(plain(), sync_every=2)
        worker.train(5)
        worker.updates.finish()

    train()
    (line,) = [each.getMessage() for each in caplog.records if "outer steps" in each.getMessage()]
    says = "2 outer steps in 5 local ones, and diloco needs 20 or more"
    assert line.startswith(f"[lightning_dist] {says}")


def test_codecs_that_send_old_changes_at_once_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @on_threads(2)
    def begin(world: World, **settings: Any) -> None:
        world.worker(plain(), method="local_sgd", **settings)

    def warnings(codec: str, **settings: Any) -> list[str]:
        caplog.clear()
        begin(codec=codec, **settings)
        return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    (line,) = warnings("randomk")
    assert "with outer_lr=1 the weights may diverge. Set outer_lr=0.1, or use 'topk'" in line
    assert len(warnings("threshold")) == 1
    for codec, settings in RECOMMENDED:
        assert warnings(codec, **settings) == []
