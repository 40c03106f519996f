"""Local steps where something fails: weights, a step that is skipped, a peer, a codec."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import pytest
import torch
from local_worlds import Net, Worker, World, plain, run, sgd
from torch import Tensor


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_worker_that_is_not_finite_leaves_the_anchor_clean(overlap: int) -> None:
    def train(world: World) -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        worker = world.worker(
            plain(), sgd, sync_every=3, codec="int8", overlap_steps=overlap, mixing=0.5
        )
        worker.train(3 + overlap, poison=2)
        metrics = dict(worker.updates.metrics())
        anchors = worker.anchors()
        worker.train(6)
        return anchors, worker.weights(), metrics

    ranks = run(train, 2)
    for anchors, weights, metrics in ranks:
        assert metrics["outer/workers"] == 1
        assert all(map(torch.equal, anchors, ranks[0][0]))
        assert not torch.equal(anchors[0], plain()[0].weight)
        assert all(each.isfinite().all() for each in [*anchors, *weights])


def test_a_step_that_a_worker_leaves_out_counts() -> None:
    def train(world: World) -> list[Tensor]:
        worker = world.worker(plain(), sync_every=2, codec="none")
        for step in range(4):
            if world.rank.rank or step % 2:  # the other worker has no batch, or its scaler skips
                worker.train(1)
            else:
                worker.updates.step()
        return worker.anchors()

    first, second = run(train, 2)
    assert all(map(torch.equal, first, second))


def test_a_step_that_a_grad_scaler_skips_counts() -> None:
    def train(world: World) -> tuple[list[Tensor], float]:
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
        return worker.anchors(), scaler.get_scale()

    (first, skipped), (second, scale) = run(train, 2)
    assert (skipped, scale) == (2.0, 4.0)
    assert all(map(torch.equal, first, second))
    assert all(each.isfinite().all() for each in first)


def test_a_step_after_close_raises() -> None:
    def train(world: World) -> None:
        worker = world.worker(plain(), sgd, method="local_sgd", sync_every=1, overlap_steps=0)
        worker.train(1)
        worker.updates.close()
        with pytest.raises(RuntimeError, match="a reducer that is closed"):
            worker.train(1)

    run(train, 2)


@pytest.mark.parametrize("lost_in", ["exchange", "totals", "statistics"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_peer_that_is_lost_in_an_outer_step_changes_nothing(overlap: int, lost_in: str) -> None:
    """The others raise within the limit, with the state of before, and can close."""

    def gone(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("this rank is gone")

    def state(worker: Worker) -> list[Tensor]:
        momenta = [
            each["momentum_buffer"] for each in worker.updates.outer_optimizer.state.values()
        ]
        buffers = worker.updates.buffers().values()
        return [each.clone() for each in (*worker.anchors(), *momenta, *worker.weights(), *buffers)]

    def train(world: World) -> None:
        settings = {"overlap_steps": overlap, "codec": "int8", "exchange_timeout": 15.0}
        worker = world.worker(Net(), sync_every=4, **settings)
        network = worker.updates.reducer.network
        assert network.limit.seconds == 15
        worker.train(7)  # a window, and the begin of another
        if world.rank.rank == 2:
            if lost_in != "exchange":
                channel = network.control if lost_in == "totals" else network.data
                channel.all_reduce = gone  # type: ignore[method-assign]
                with pytest.raises(RuntimeError, match="this rank is gone"):
                    worker.train(1 + overlap)
            return
        worker.train(overlap)
        worker.learn()
        before, start = state(worker), time.monotonic()
        network.limit.seconds = 0.5
        with pytest.raises(RuntimeError, match="a rank has terminated, hangs, or is slower"):
            worker.updates.step()
        assert all(map(torch.equal, state(worker), before))
        if lost_in != "statistics":  # the mean of workers that are not known is not used later
            with pytest.raises(RuntimeError):
                worker.updates.step()
            assert all(map(torch.equal, state(worker), before))
        closes = time.monotonic()
        worker.updates.close()
        assert time.monotonic() - closes < 5  # half a second, and what a busy machine adds
        assert closes - start < 15  # the groups would wait for 20

    run(train, 3)


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("randomk", {"outer_lr": 0.1}),
        ("randomk", {"error_feedback": False}),
        ("randomk:ratio=0.1", {}),
        ("threshold", {"outer_lr": 0.1}),
        ("threshold", {"error_feedback": False}),
        ("topk:ratio=0.01", {}),
    ],
)
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_what_the_warning_recommends_stays_finite(codec: str, settings: dict[str, Any]) -> None:
    """At an outer rate of 1 ``randomk`` of 1 % and ``threshold`` do not, nor does a naive twin."""

    def train(world: World) -> list[Tensor]:
        worker = world.worker(
            plain(), sgd, method="local_sgd", sync_every=2, codec=codec, **settings
        )
        worker.train(2000)
        return worker.anchors()

    assert all(float(each.abs().max()) < 5 for each in run(train, 2)[0])
