"""Layers that are frozen and unfrozen while workers take local steps."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from local_worlds import World, batches, on_threads, plain, require_same, sgd
from torch import Tensor, nn

Phases = Mapping[int, Sequence[int]]
"""Layers that are trained from a step on."""
PHASES: Phases = {1: [2, 3], 6: [0, 3], 13: [0, 2], 18: [0, 2, 3]}
STREAMING: dict[str, Any] = {
    "method": "streaming",
    "sync_every": 6,
    "fragments": 3,
    "overlap_steps": 1,
    "codec": "int4",
}


def choose(model: Any, phases: Phases, step: int) -> None:
    """Freeze and unfreeze what a phase begins with."""
    if step in phases:
        for index, layer in enumerate(model):
            layer.requires_grad_(index in phases[step])


def twin(phases: Phases, *, steps: int, every: int, momentum: float) -> list[list[Tensor]]:
    """Weights of two workers after every step, each rule on whole tensors."""
    models = [plain() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    data = [batches(rank) for rank in range(2)]
    names = [name for name, _ in models[0].named_parameters()]
    anchor, velocity = dict[str, Tensor](), defaultdict[str, Any](float)
    exchanged, trained, found = set[str](), set[str](), []
    for step in range(1, steps + 1):
        for model, optimizer, batch in zip(models, optimizers, data, strict=True):
            choose(model, phases, step)
            optimizer.zero_grad()
            model(next(batch)).square().mean().backward()
            for name, each in model.named_parameters():
                if each.requires_grad:
                    trained.add(name)
                    anchor.setdefault(name, each.detach().clone())
            optimizer.step()
        if step == 1:
            exchanged = set(trained)
        if step % every == 0:
            for name in [each for each in names if each in exchanged]:
                own = [model.get_parameter(name).data for model in models]
                if name in trained:
                    mean = sum(anchor[name] - each for each in own) / 2
                    velocity[name] = momentum * velocity[name] + mean
                    anchor[name] = anchor[name] - mean - momentum * velocity[name]
                for each in own:
                    each.copy_(anchor[name])
            for name in exchanged - trained:
                del anchor[name], velocity[name]
            exchanged = set(trained)
            trained = {n for n, each in models[0].named_parameters() if each.requires_grad}
        found.append([each.detach().clone() for model in models for each in model.parameters()])
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@on_threads(2)
def test_what_is_trained_is_averaged(world: World, momentum: float) -> None:
    """From the second outer step after a layer is unfrozen; what is frozen stays where it is."""
    model = plain()
    choose(model, PHASES, 1)
    settings = {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": momentum, "codec": "none"}
    worker = world.worker(
        model, lambda all_of_them: torch.optim.SGD(all_of_them, lr=0.1), **settings
    )
    expected = twin(PHASES, steps=24, every=3, momentum=momentum)
    for step in range(1, 25):
        choose(model, PHASES, step)
        worker.train(1)
        found = [each for of in world.of_all(worker.weights()) for each in of]
        torch.testing.assert_close(found, expected[step - 1], rtol=1e-10, atol=1e-12)
    assert len(worker.anchors()) == 6, "of the three layers that are trained"


@pytest.mark.parametrize("settings", [{"sync_every": 4, "codec": "int8"}, STREAMING], ids=str)
@on_threads(2)
def test_a_training_that_is_resumed_is_bit_exact(world: World, settings: dict[str, Any]) -> None:
    """Before all workers know of a layer, and long after; the model begins as at first."""
    for at in (7, 8, 11, 15, 19):
        model = plain()
        choose(model, PHASES, 1)
        whole = world.worker(model, optimizer_of_all, **settings)
        for step in range(1, at + 1):
            choose(model, PHASES, step)
            whole.train(1)
        with whole.updates.anchor_weights():
            require_same(*world.of_all(whole.weights()))
        own = copy.deepcopy((model.state_dict(), whole.optimizer.state_dict()))
        saved, _ = world.of_all(whole.updates.state_dict())
        again = plain(7)
        choose(again, PHASES, 1)
        resumed = world.worker(again, optimizer_of_all, **settings)
        again.load_state_dict(own[0])
        resumed.optimizer.load_state_dict(own[1])
        resumed.updates.load_state_dict(saved)
        for step in range(1, at + 1):
            choose(again, PHASES, step)
            next(resumed.data)
        found = []
        for each in (whole, resumed):
            for step in range(at + 1, 25):
                choose(each.model, PHASES, step)
                each.train(1)
            found.append(each.weights() + each.anchors())
            each.updates.finish()
            require_same(*world.of_all(each.weights()))
        require_same(*found)


def optimizer_of_all(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@on_threads(2)
def test_a_layer_that_is_frozen_is_equal_everywhere_and_sends_nothing(world: World) -> None:
    worker = world.worker(plain(), sgd, **{**STREAMING, "outer_momentum": 0.9, "codec": "none"})
    worker.train(12)
    frozen = worker.model[0].requires_grad_(False)
    worker.train(18)
    require_same(*world.of_all([each.detach().clone() for each in frozen.parameters()]))
    worker.updates.wait()
    held, sent = copy.deepcopy(frozen.state_dict()), worker.updates.comm_stats()["raw_bytes"]
    worker.train(6)
    worker.updates.wait()
    require_same(frozen.state_dict(), held)
    rest = sum(each.numel() for each in worker.model[1:].parameters())
    assert worker.updates.comm_stats()["raw_bytes"] - sent == 8 * rest
    worker.model.requires_grad_(True)
    worker.train(12)
    worker.updates.finish()
    require_same(*world.of_all(worker.weights()))


@on_threads(2)
def test_a_layer_that_one_worker_alone_trains(world: World) -> None:
    """The other worker, which has no gradient of it, takes what it gets."""
    model = plain()
    model[3].requires_grad_(False)
    worker = world.worker(model, optimizer_of_all, sync_every=2, method="local_sgd", codec="none")
    model[3].requires_grad_(world.rank.rank == 0)
    before = model[3].weight.detach().clone()
    worker.train(8)
    require_same(*world.of_all(worker.weights()))
    assert not torch.equal(model[3].weight, before)


@on_threads(2)
def test_weights_of_a_frozen_layer_that_differ(world: World) -> None:
    """They are equal once the layer is exchanged, as all weights are at the start."""
    model = plain()
    model[3].requires_grad_(False)
    worker = world.worker(model, optimizer_of_all, sync_every=2, method="local_sgd", codec="none")
    worker.train(2)
    with torch.no_grad():
        model[3].weight.add_(world.rank.rank)
    model[3].requires_grad_(True)
    worker.train(4)
    require_same(*world.of_all(worker.weights()))
    require_same(*world.of_all(worker.anchors()))


@on_threads(2)
def test_sparse_gradients(world: World) -> None:
    """What workers exchange is dense."""
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.1)
    worker = world.worker(model, sgd, sync_every=2, method="local_sgd", codec="none")
    worker.data = (torch.tensor([world.rank.rank + step]) for step in range(4))
    worker.train(4)
    require_same(*world.of_all(worker.weights()))
    assert model[0].weight.detach().unique(dim=0).shape[0] > 4, "rows of both workers"


@on_threads(2)
def test_a_layer_that_is_unfrozen_in_plain_ddp(world: World) -> None:
    module = plain(dtype=torch.float32)
    module[0].requires_grad_(False)
    worker = world.worker(
        world.rank.ddp(module),
        lambda _: torch.optim.SGD(module.parameters(), lr=0.1),
        method="post_local_sgd",
        ddp_steps=6,
        sync_every=2,
        codec="none",
    )
    worker.train(3)
    module[0].requires_grad_(True)
    for step in range(4, 11):
        worker.train(1)
        first, second = world.of_all(module[0].weight.detach().clone())
        assert torch.equal(first, second) == (step <= 6 or step % 2 == 0), step
    assert isinstance(module[0], nn.Linear)
