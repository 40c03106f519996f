"""Outer steps whose exchange has failed, and is made again by the workers that are left."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from local_worlds import Worker, World, on_threads, plain, require_same, sgd

from lightning_dist.ranks.failures import CollectiveError
from lightning_dist.sync.local.outer_steps import NotAppliedError

RECOVERY: Any = SimpleNamespace(
    pauses=lambda: False, failed=lambda error: None, vote_result=lambda: None
)
SETTINGS: dict[str, Any] = {"sync_every": 3, "overlap_steps": 0, "weigh_by": "samples"}


def worker_of(world: World, codec: str = "int8") -> Worker:
    """One of which a layer is frozen in the course of the first window."""
    model = plain()
    worker = world.worker(model, sgd, codec=codec, **SETTINGS)
    worker.samples = lambda rank, step: float(rank + step)
    worker.updates.reducer.leave_failures_to(RECOVERY)
    worker.train(2)
    model[2].requires_grad_(False)
    worker.optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    return worker


@pytest.mark.parametrize("call", [1, 2])
@on_threads(2)
def test_it_is_as_if_it_had_not_failed(world: World, call: int) -> None:
    """Its weights, samples and what was trained are those of before: also of what is frozen."""
    twin, worker = worker_of(world), worker_of(world)
    twin.train(1)
    control = worker.updates.reducer.network.control
    launch, calls = control.all_reduce, 0

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise CollectiveError("[test] a peer is gone")
        return launch(*arguments, **named)

    control.all_reduce = fails  # type: ignore[method-assign]
    before = worker.anchors()
    worker.train(1)
    assert calls == call
    require_same(worker.anchors(), before)
    with pytest.raises(RuntimeError, match="of the outer step before has failed"):
        worker.updates.step(1.0)
    worker.updates.attempted -= 1
    worker.updates._gradients.samples -= 1.0
    worker.updates.exchange_again()
    require_same(worker.anchors(), twin.anchors())
    require_same(worker.weights(), twin.weights())
    assert worker.updates.metrics()["outer/samples"] == twin.updates.metrics()["outer/samples"]
    worker.train(3)
    twin.train(3)
    require_same(worker.anchors(), twin.anchors())
    worker.updates.exchange_again()  # nothing is to be made again
    require_same(worker.anchors(), twin.anchors())


@on_threads(2)
def test_a_worker_that_joins_has_no_part_before_its_first_step(world: World) -> None:
    settings: dict[str, Any] = {"method": "local_sgd", "sync_every": 2, "codec": "none"}
    worker = world.worker(plain(dtype=torch.bfloat16), sgd, **settings)
    worker.train(3)
    state, own = world.of_all([worker.updates.state_for_newcomer(), worker.weights()])[0]
    joins = world.rank.rank == 1
    if joins:
        worker.updates.join(state)
    worker.updates._due = 0
    worker.updates.exchange_again()
    assert worker.updates.metrics()["outer/workers"] == 1
    require_same(worker.weights(), own)  # those of the other one
    require_same(*world.of_all(worker.anchors()))
    worker.train(2)
    assert worker.updates.metrics()["outer/workers"] == 2


@on_threads(2)
def test_a_layer_that_could_not_be_sent_is_sent_again(world: World) -> None:
    """Workers know it from then on with the weights of the first one, whatever their own are."""
    model = plain()
    model[2].requires_grad_(False)
    worker = world.worker(model, sgd, codec="none", **{**SETTINGS, "weigh_by": "workers"})
    worker.updates.reducer.leave_failures_to(RECOVERY)
    worker.train(3)
    model[2].requires_grad_(True)
    with torch.no_grad():
        model[2].weight.add_(world.rank.rank)
    worker.learn()
    data, names = worker.updates.reducer.network.data, worker.updates.anchor.names
    launch = data.broadcast

    def gone(*_: Any, **__: Any) -> NoReturn:
        raise CollectiveError("[test] a peer is gone")

    data.broadcast = gone  # type: ignore[method-assign]
    with pytest.raises(CollectiveError):
        worker.updates.anchor.agree()
    assert worker.updates.anchor.names == names
    worker.updates.step()
    worker.train(1)
    with pytest.raises(NotAppliedError, match="while an outer step was applied"):
        worker.train(1)
    data.broadcast = launch  # type: ignore[method-assign]
    worker.updates.anchor.agree()
    assert worker.updates.anchor.names - names == {"2.weight", "2.bias"}
    weights = [anchor.detach() for anchor in worker.updates.anchor.tensors.values()]
    require_same(*world.of_all(weights))


@on_threads(2)
def test_a_failure_without_recovery_is_an_error(world: World) -> None:
    worker = world.worker(plain(), sgd, sync_every=1, overlap_steps=0)

    def gone(*_: Any, **__: Any) -> NoReturn:
        raise CollectiveError("[test] a peer is gone")

    worker.updates.reducer.network.control.all_reduce = gone  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match="a peer is gone"):
        worker.train(1)
    with pytest.raises(RuntimeError, match="of the outer step before has failed"):
        worker.train(1)
