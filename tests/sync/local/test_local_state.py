"""State of local updates: resumed anywhere, with other workers, and where it is kept."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from local_worlds import (
    SCHEDULE,
    Net,
    World,
    on_threads,
    plain,
    require_same,
    sgd,
    unequal,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_dist.base.private import map_tensors
from lightning_dist.sync.local.state import WorkerStates, laid_out


@on_threads(2)
def test_an_anchor_on_the_host_changes_nothing(world: World) -> None:
    found = []
    for offload in (True, False):
        worker = world.worker(plain(dtype=torch.float32), offload=offload, **SCHEDULE)
        worker.train(8)
        worker.updates.finish()
        found.append(worker.weights() + worker.anchors())
    require_same(*found)


@pytest.mark.parametrize("weigh_by", ["workers", "samples"])
@pytest.mark.parametrize("at", [2, 3, 4, 5, 6, 9], ids=lambda at: f"after step {at}")
@on_threads(2)
def test_a_resumed_training_is_bit_exact(world: World, at: int, weigh_by: str) -> None:
    """Inside a window, where an exchange begins, while it is under way, and when it is over; before
    the first step of the outer schedule and after it.
    """
    settings = {**SCHEDULE, "method": "diloco", "weigh_by": weigh_by}
    settings["outer_schedule"] = lambda each: CosineAnnealingLR(each, T_max=10)
    whole = world.worker(plain(), **settings)
    whole.samples = unequal if weigh_by == "samples" else None
    whole.train(at)
    own = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    saved, other = world.of_all(whole.updates.state_dict())
    assert saved is not None
    assert other is None
    whole.train(17 - at)
    resumed = world.worker(plain(7), **settings)
    resumed.samples = whole.samples
    resumed.model.load_state_dict(own[0])
    resumed.optimizer.load_state_dict(own[1])
    resumed.updates.load_state_dict(saved)
    for _ in range(at):
        next(resumed.data)
    resumed.train(17 - at)
    require_same(resumed.weights() + resumed.anchors(), whole.weights() + whole.anchors())


def test_states_of_optimizers_lie_as_their_parameters() -> None:
    """Fused kernels pair their elements by place."""
    model = nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step(number: int) -> None:
        for each in model.parameters():
            drawn = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
            each.grad = torch.empty_like(each).copy_(drawn)
        optimizer.step()

    step(0)
    weights = copy.deepcopy(model.state_dict())
    saved = map_tensors(torch.Tensor.contiguous, copy.deepcopy(optimizer.state_dict()))
    step(1)
    straight = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(laid_out(saved, optimizer))
    assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
    step(1)
    require_same([*model.state_dict().values()], [*straight.values()])


def test_a_worker_with_a_whole_model_has_the_samples_of_all_ranks_that_had_its_shards() -> None:
    """Two workers of two ranks were saved; the rank is the second worker now, alone."""
    network = SimpleNamespace(rank=1)
    updates = SimpleNamespace(
        shards=None,
        reducer=SimpleNamespace(network=network),
        trained={},
        own_state=lambda state, read: state,
    )
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 2.0], [4.0, 2.0]], dtype=torch.float64)
    worker = {"parameters": {}, "buffers": [{}, {}], "optimizer_states": []}
    shared = {"version": 2, "samples": {"workers": rows, "usual": 2.0}}
    own = WorkerStates(cast(Any, updates), []).own_state(
        {"shared": shared, "workers": [worker, worker]}
    )
    assert own["shared"]["samples"]["workers"].tolist() == [[2.0, 0.0], [7.0, 4.0]]
    assert own["shared"]["samples"]["usual"] == 4.0


@on_threads(2)
def test_saving_in_an_overlap_changes_nothing(world: World) -> None:
    """Running statistics too are averaged when the mean is used, not when it has landed."""
    found = []
    for saves in (False, True):
        model = Net()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
        worker = world.worker(model, sync_every=4, overlap_steps=2, codec="int8")
        for step in range(1, 8):
            worker.train(1)
            if saves and step == 5:
                worker.updates.state_dict()
        found.append(model.state_dict())
    require_same(*found)


@on_threads(2)
def test_memory_is_what_the_guide_says(world: World) -> None:
    """Anchor, outer momentum and residual of 4 bytes a parameter, and a buffer of a fragment."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    worker = world.worker(model, sync_every=4, fragments=4, codec="int8")
    worker.data = iter([torch.randn(4, 256) for _ in range(8)])
    worker.train(8)
    n, outer = 4 * 256 * 256, worker.updates.outer_optimizer
    assert sum(each.nbytes for each in worker.anchors()) == 4 * n
    assert sum(state["momentum_buffer"].nbytes for state in outer.state.values()) == 4 * n
    memory = worker.updates.reducer.memory()
    assert memory["residual_bytes"] == 4 * n
    assert memory["buffer_bytes"] < n, "payloads"
    assert worker.updates._gradients.flat.nbytes == n


def test_another_number_of_workers_goes_on_from_the_anchor() -> None:
    saved: dict[str, Any] = {}

    @on_threads(2)
    def first(world: World) -> None:
        worker = world.worker(plain(), sync_every=4, codec="int8")
        worker.train(5)
        saved["state"], _ = world.of_all(worker.updates.state_dict())
        saved["anchors"] = worker.anchors()

    @on_threads(3)
    def second(world: World) -> None:
        worker = world.worker(plain(3), sync_every=4, codec="int8")
        worker.updates.load_state_dict(copy.deepcopy(saved["state"]))
        worker.updates.start_from_anchor()
        require_same(worker.weights(), saved["anchors"])
        worker.train(3)
        assert worker.updates.attempted == 8
        after = worker.anchors()
        assert not torch.equal(after[0], saved["anchors"][0])
        require_same(after, world.of_all(after)[0])

    first()
    second()


@pytest.mark.parametrize("sync_every", [4, 5])
@on_threads(2)
def test_an_exchange_that_was_under_way_is_applied_under_any_schedule(
    world: World, sync_every: int
) -> None:
    """Saved after step 4, to be due after step 6; the next exchange begins after ``sync_every``."""
    settings = {"method": "local_sgd", "codec": "none"}
    whole = world.worker(plain(), sync_every=4, overlap_steps=2, **settings)
    whole.train(4)
    saved, _ = world.of_all(whole.updates.state_dict())
    whole.train(2)
    resumed = world.worker(plain(), sync_every=sync_every, **settings)
    resumed.updates.load_state_dict(saved)
    before = resumed.anchors()
    for _ in range(2):
        resumed.updates.step()  # weights are the anchor's: it moves by what was under way
    assert not torch.equal(before[0], whole.anchors()[0])
    torch.testing.assert_close(resumed.anchors(), whole.anchors())


@on_threads(2)
def test_low_precision_weights_have_an_anchor_of_full_precision(world: World) -> None:
    worker = world.worker(plain(dtype=torch.bfloat16), sgd, sync_every=2, codec="int8")
    worker.train(4)
    assert {each.dtype for each in worker.anchors()} == {torch.float32}
    require_same([each.bfloat16() for each in worker.anchors()], worker.weights())
    assert any(not torch.equal(a, a.bfloat16().float()) for a in worker.anchors())


@on_threads(1)
def test_a_state_of_another_model_or_version_is_refused(world: World) -> None:
    worker = world.worker(plain(), sync_every=4)
    state = worker.updates.state_dict()
    assert state is not None
    state["anchor"]["another"] = state["anchor"].pop("0.weight")
    with pytest.raises(ValueError, match="parameters of this model, got that of another"):
        worker.updates.load_state_dict(state)
    with pytest.raises(ValueError, match="must be of version 2, got 1"):
        worker.updates.load_state_dict({**state, "version": 1})


@on_threads(1)
def test_a_state_of_all_workers_of_another_version_is_refused(world: World) -> None:
    """Also an optimizer whose state is not all mappings is saved, as torch does."""
    worker = world.worker(plain(), sync_every=4)
    optimizer = worker.optimizer
    cast(Any, optimizer.state)["calls"] = 1
    states = WorkerStates(worker.updates, [optimizer])
    state = states.state_dict()
    assert state is not None
    assert state["workers"][0]["optimizer_states"][0]["state"]["calls"] == 1
    with pytest.raises(ValueError, match="must be of version 2, got 1"):
        states.own_state({**state, "shared": {"version": 1}})
