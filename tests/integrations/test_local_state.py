"""State of local updates: resumed anywhere, with other workers, and where it is kept."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from local_worlds import SCHEDULE, Net, Worker, World, plain, require_same, run, sgd, unequal
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR


def test_an_anchor_on_the_host_changes_nothing() -> None:
    def train(world: World, *, offload: bool) -> list[Tensor]:
        worker = world.worker(plain(dtype=torch.float32), offload=offload, **SCHEDULE)
        worker.train(8)
        worker.updates.finish()
        return worker.weights() + worker.anchors()

    here, there = (run(partial(train, offload=offload), 2) for offload in (True, False))
    require_same(here, there)


@pytest.mark.parametrize("weigh_by", ["workers", "samples"])
@pytest.mark.parametrize("at", [2, 3, 4, 5, 6, 9], ids=lambda at: f"after step {at}")
def test_a_resumed_training_is_bit_exact(at: int, weigh_by: str) -> None:
    """Inside a window, where an exchange begins, while it is under way, and when it is over; before
    the first step of the outer schedule and after it.
    """
    samples = unequal if weigh_by == "samples" else None
    saved: dict[str, Any] = {}

    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        settings = {**SCHEDULE, "method": "diloco", "weigh_by": weigh_by}
        settings["outer_schedule"] = lambda each: CosineAnnealingLR(each, T_max=10)
        whole = world.worker(plain(), **settings)
        whole.samples = samples
        whole.train(at)
        model, optimizer = whole.model.state_dict(), whole.optimizer.state_dict()
        own = copy.deepcopy((model, optimizer))
        state = whole.updates.state_dict()
        assert (state is None) == (world.rank.rank > 0)
        if state is not None:
            saved.update(copy.deepcopy(state))
        world.rank.barrier.wait()
        whole.train(17 - at)
        resumed = world.worker(plain(7), **settings)
        resumed.samples = samples
        resumed.model.load_state_dict(own[0])
        resumed.optimizer.load_state_dict(own[1])
        resumed.updates.load_state_dict(copy.deepcopy(saved))
        for _ in range(at):
            next(resumed.data)
        resumed.train(17 - at)
        return whole.weights() + whole.anchors(), resumed.weights() + resumed.anchors()

    for whole, resumed in run(train, 2):
        assert all(map(torch.equal, whole, resumed))


def test_saving_in_an_overlap_changes_nothing() -> None:
    """Running statistics too are averaged when the mean is used, not when it has landed."""

    def train(world: World) -> list[dict[str, Tensor]]:
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
            found.append({name: each.clone() for name, each in model.state_dict().items()})
        return found

    for not_saved, saved in run(train, 2):
        require_same(saved, not_saved)


def test_memory_is_what_the_guide_says() -> None:
    """Anchor, outer momentum and residual of 4 bytes a parameter, and a buffer of a fragment."""

    def train(world: World) -> tuple[int, int, int, int, int]:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
        worker = world.worker(model, sync_every=4, fragments=4, codec="int8")
        worker.data = iter([torch.randn(4, 256) for _ in range(8)])
        worker.train(8)
        outer = worker.updates.outer_optimizer
        momenta = [state["momentum_buffer"].nbytes for state in outer.state.values()]
        anchors = sum(each.nbytes for each in worker.anchors())
        memory = worker.updates.reducer.memory()
        of_fragment = worker.updates._gradients.flat.nbytes
        return anchors, sum(momenta), memory["residual_bytes"], of_fragment, memory["buffer_bytes"]

    n = 4 * 256 * 256
    for anchors, momenta, residuals, of_fragment, payloads in run(train, 2):
        assert anchors == momenta == residuals == 4 * n
        assert of_fragment == n
        assert payloads < n


def test_another_number_of_workers_goes_on_from_the_anchor() -> None:
    saved: dict[str, Any] = {}

    def first(world: World) -> list[Tensor]:
        worker = world.worker(plain(), sync_every=4, codec="int8")
        worker.train(5)
        saved.update(copy.deepcopy(worker.updates.state_dict() or {}))
        return worker.anchors()

    def second(world: World) -> tuple[list[Tensor], list[Tensor], int]:
        worker = world.worker(plain(3), sync_every=4, codec="int8")
        worker.updates.load_state_dict(copy.deepcopy(saved))
        worker.updates.start_from_anchor()
        joined = worker.weights()
        worker.train(3)
        return joined, worker.anchors(), worker.updates.attempted

    before = run(first, 2)[0]
    found = run(second, 3)
    for joined, after, attempted in found:
        assert all(map(torch.equal, joined, before))
        assert attempted == 8
        assert not torch.equal(after[0], before[0])
        assert all(map(torch.equal, after, found[0][1]))


@pytest.mark.parametrize("sync_every", [4, 5])
def test_an_exchange_that_was_under_way_is_applied_under_any_schedule(sync_every: int) -> None:
    """Saved after step 4, to be due after step 6; the next exchange begins after ``sync_every``."""
    saved: dict[str, Any] = {}

    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        settings = {"method": "local_sgd", "codec": "none"}
        whole = world.worker(plain(), sync_every=4, overlap_steps=2, **settings)
        whole.train(4)
        saved.update(copy.deepcopy(whole.updates.state_dict() or {}))
        world.rank.barrier.wait()
        whole.train(2)
        resumed = world.worker(plain(), sync_every=sync_every, **settings)
        resumed.updates.load_state_dict(copy.deepcopy(saved))
        before = resumed.anchors()
        for _ in range(2):
            resumed.updates.step()  # weights are the anchor's: it moves by what was under way
        assert not torch.equal(before[0], whole.anchors()[0])
        return whole.anchors(), resumed.anchors()

    for whole, resumed in run(train, 2):
        torch.testing.assert_close(resumed, whole)


def test_low_precision_weights_have_an_anchor_of_full_precision() -> None:
    def train(world: World) -> tuple[Worker, list[Tensor]]:
        worker = world.worker(plain(dtype=torch.bfloat16), sgd, sync_every=2, codec="int8")
        worker.train(4)
        return worker, worker.weights()

    for worker, weights in run(train, 2):
        for anchor, weight in zip(worker.anchors(), weights, strict=True):
            assert anchor.dtype == torch.float32
            assert torch.equal(anchor.bfloat16(), weight)
        assert any(not torch.equal(a, a.bfloat16().float()) for a in worker.anchors())


def test_a_state_of_another_model_or_version_is_refused() -> None:
    def train(world: World) -> None:
        worker = world.worker(plain(), sync_every=4)
        state = worker.updates.state_dict()
        assert state is not None
        state["anchor"]["another"] = state["anchor"].pop("0.weight")
        with pytest.raises(ValueError, match="the same trained parameters"):
            worker.updates.load_state_dict(state)
        with pytest.raises(ValueError, match="must be of version 1, got 2"):
            worker.updates.load_state_dict({**state, "version": 2})

    run(train, 1)
