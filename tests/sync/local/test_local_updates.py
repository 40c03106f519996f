"""Local steps and outer steps, against a naive twin and with every codec."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from local_worlds import (
    Net,
    Twin,
    Worker,
    World,
    adam,
    batches,
    on_threads,
    plain,
    require_same,
    sgd,
    unequal,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import local_updates
from lightning_dist.codecs import CODECS, TopK, resolve_codec
from lightning_dist.sync.local import outer_steps

LOCAL_SGD = {"method": "local_sgd", "sync_every": 3}
STREAMING = {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1}
OF_STREAMING = {"lr": 0.4, "momentum": 0.9, "fragments": 2, "overlap": 1, "mixing": 0.5}


@pytest.mark.parametrize(
    ("size", "settings", "twin"),
    [
        (3, {"method": "local_sgd", "sync_every": 1}, {}),
        (2, LOCAL_SGD, {}),
        (2, {"method": "diloco", "sync_every": 4}, {"lr": 0.7, "momentum": 0.6}),
        (
            2,
            {"method": "diloco", "sync_every": 4, "overlap_steps": 2},
            {"lr": 0.7, "momentum": 0.6, "overlap": 2},
        ),
        (2, STREAMING, OF_STREAMING),
        (2, {**LOCAL_SGD, "weigh_by": "samples"}, {"samples": unequal}),
        (2, {**STREAMING, "weigh_by": "samples"}, {**OF_STREAMING, "samples": unequal}),
    ],
)
@on_threads("size")
def test_uncompressed_it_is_the_rule(
    world: World, size: int, settings: dict[str, Any], twin: dict[str, Any]
) -> None:
    worker = world.worker(plain(world.rank.rank), codec="none", **settings)
    worker.samples = twin.get("samples")
    worker.train(13)
    assert worker.samples is None or worker.updates.metrics()["outer/samples"] > 0
    expected = Twin(size, settings["sync_every"], **twin).train(13, adam)[world.rank.rank]
    torch.testing.assert_close(worker.weights(), expected, rtol=1e-10, atol=1e-10)


@on_threads(2)
def test_sparseloco_is_the_rule(world: World) -> None:
    codec = TopK(ratio=0.015625, values="int2", decay=0.95)
    settings = {"method": "sparseloco", "sync_every": 2, "min_compress_numel": 25}
    worker = world.worker(plain(), sgd, **settings)
    worker.train(8)
    expected = Twin(2, sync_every=2, codec=codec).train(8, sgd)[world.rank.rank]
    torch.testing.assert_close(worker.weights(), expected, rtol=1e-5, atol=1e-6)
    sent = worker.updates.comm_stats()["last_step"]["wire_bytes"]
    biases = sum(each.nbytes for each in expected if each.dim() == 1)
    assert sent == 3 * (64 * 12 // 8 + 64 * 2 // 8 + 4) + biases + 4  # padded


@pytest.mark.parametrize(("overlap", "size"), [(0, 3), (2, 2)])
@on_threads("size")
def test_the_anchor_is_the_same_everywhere_with_every_codec(
    world: World, overlap: int, size: int
) -> None:
    """After every step."""
    for codec in [name for name in CODECS if name != "dgc"]:
        settings = {"sync_every": 3, "overlap_steps": overlap}
        worker = world.worker(plain(dtype=torch.float32), codec=codec, **settings)
        found = []
        for _ in range(7):
            worker.train(1)
            found += worker.anchors()
        worker.updates.close()
        require_same(found, world.of_all(found)[0])
        assert all(each.isfinite().all() for each in found), codec


FED_BACK = [
    codec.name
    for codec in map(resolve_codec, CODECS)
    if codec.keeps_residual and codec.name != "dgc"
]


@pytest.mark.parametrize(
    ("codec", "rounds"),
    [
        ("int4", 60),
        ("topk:ratio=0.1", 60),
        pytest.param("int4", 1000, marks=pytest.mark.exhaustive),
        pytest.param("topk:ratio=0.1", 1000, marks=pytest.mark.exhaustive),
        *(pytest.param(name, 100, marks=pytest.mark.exhaustive) for name in FED_BACK),
    ],
)
@on_threads(2)
def test_nothing_is_lost(world: World, codec: str, rounds: int) -> None:
    """What was applied and what is owed is the sum of the exact means of the pseudo-gradients."""
    settings = {"method": "local_sgd", "sync_every": 2, "mixing": 0.0}
    worker = world.worker(plain(), sgd, codec=codec, **settings)
    changed = [torch.zeros_like(p) for p in worker.weights()]
    begin = worker.anchors()
    for _ in range(rounds):
        before = worker.anchors()
        worker.train(1)
        worker.learn()
        for total, old, new in zip(changed, before, worker.weights(), strict=True):
            total += old - new
        worker.updates.step()
    state, _ = world.of_all(worker.updates.reducer.state_dict())
    owed = {} if state is None else {n: rows.mean(0) for n, rows in state["residuals"].items()}
    found = [
        (old - new).reshape(-1) + owed.get(name, torch.zeros(()))
        for (name, _), old, new in zip(
            plain().named_parameters(), begin, worker.anchors(), strict=True
        )
    ]
    exact = [each.reshape(-1) for each in mean_of(world.of_all(changed))]
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def mean_of(workers: Iterable[list[Tensor]]) -> list[Tensor]:
    return [sum(each) / len(each) for each in zip(*workers, strict=True)]


@on_threads(2)
def test_several_optimizers_make_one_step(world: World) -> None:
    one = world.worker(plain(), sync_every=2, codec="none")
    one.train(5)
    model = plain()
    first, *rest = model.children()
    halves = [adam(first.parameters()), adam(nn.ModuleList(rest).parameters())]
    settings = {"groups": world.rank.groups(), "min_compress_numel": 0}
    updates = local_updates(model, halves, sync_every=2, codec="none", **settings)
    world.stack.callback(updates.close)
    halves[0].register_step_post_hook(lambda *_: halves[1].step())
    halves[0].register_step_post_hook(lambda *_: halves[1].zero_grad())
    several = Worker(world.rank.rank, model, halves[0], updates, batches(world.rank.rank))
    several.train(5)
    assert several.updates.attempted == one.updates.attempted == 5
    require_same(several.weights(), one.weights())


@on_threads(2)
def test_fragments_are_whole_parameters_for_powersgd(world: World) -> None:
    settings = {"sync_every": 4, "fragments": 2, "codec": "powersgd:rank=2"}
    worker = world.worker(plain(dtype=torch.float32), **settings)
    begin = worker.anchors()
    worker.train(9)
    assert len(worker.parts()) == 2
    assert all(cut.whole == cut.numel for part in worker.parts() for cut in part.slices)
    require_same(*world.of_all(worker.anchors()))
    assert not torch.equal(worker.anchors()[0], begin[0])


@on_threads(2)
def test_models_with_tied_and_frozen_parts_and_statistics(world: World) -> None:
    worker = world.worker(Net(), sync_every=3, codec="none", mixing=0.0)
    model, start = worker.model, worker.model.frozen.weight.clone()
    worker.train(3)
    assert torch.equal(model.frozen.weight, start)
    assert model.last.weight is model.first.weight
    require_same(*world.of_all(model.state_dict()))
    assert model.norm.running_mean.abs().sum() > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "none", "sync_every": 4},
        {"method": "sparseloco", "sync_every": 2},
        STREAMING,
        {"codec": "terngrad", "sync_every": 3, "overlap_steps": 2},
    ],
)
@on_threads(2)
def test_evaluation_uses_the_anchor_and_the_end_the_exact_mean(
    world: World, settings: dict[str, Any]
) -> None:
    """Whatever is compressed or under way."""
    worker = world.worker(plain(dtype=torch.float32), **settings)
    worker.train(7)
    own, anchors = worker.weights(), worker.anchors()
    with worker.updates.anchor_weights():
        require_same(worker.weights(), anchors)
    require_same(worker.weights(), own)
    worker.updates.finish()
    require_same(worker.weights(), worker.anchors())
    assert not torch.equal(worker.anchors()[0], anchors[0])
    torch.testing.assert_close(worker.weights(), mean_of(world.of_all(own)))
    steps = worker.updates.comm_stats()["steps"]
    worker.updates.finish()  # nothing has changed
    assert worker.updates.comm_stats()["steps"] == steps


@pytest.mark.parametrize("known", [True, False])
@on_threads(2)
def test_the_last_step_of_a_known_number_is_followed_by_the_mean(world: World, known: bool) -> None:
    """Full outer momentum would overshoot after an inner learning rate that has decayed."""
    worker = world.worker(plain(), sync_every=2, codec="none", outer_momentum=0.9)
    decay = torch.optim.lr_scheduler.LinearLR(worker.optimizer, 1.0, 0.0, total_iters=8)
    worker.updates.total_steps = 8 if known else None
    for _ in range(8):
        worker.learn()
        own = worker.weights()
        worker.updates.step()
        decay.step()
    assert all(map(torch.allclose, worker.weights(), mean_of(world.of_all(own)))) == known


@pytest.mark.parametrize("size", [4, 3])
@on_threads("size")
def test_hosts_count_the_same_whatever_ranks_they_have(world: World, size: int) -> None:
    """Two orthogonal pseudo-gradients, of two ranks and of two or one."""
    index = world.rank.rank // 2
    node = world.rank.group("node", [range(2), range(2, size)][index])
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(1)).double()
    inside = DistributedDataParallel(model, process_group=node)
    worker = world.worker(inside, sgd, method="local_sgd", sync_every=1, codec="none")
    begin = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[index] += 1
        model[1].running_mean.fill_(index)
    worker.updates.step()
    moved, metrics = model[0].weight.detach() - begin, worker.updates.metrics()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5))
    assert float(model[1].running_mean) == pytest.approx(0.5)
    assert metrics["outer/workers"] == 2
    assert metrics["outer/drift"] == pytest.approx(2**0.5)
    assert metrics["outer/cosine"] == pytest.approx(0, abs=1e-9)


@on_threads(4, ranks_per_node=2)
def test_ranks_of_a_host_are_one_worker(world: World) -> None:
    """DistributedDataParallel inside the nodes, an outer exchange in levels between them."""
    tree = [[0, 1], [2, 3]]
    inside = world.rank.group("node", tree[world.rank.rank // 2])
    model = DistributedDataParallel(plain(dtype=torch.float32), process_group=inside)
    levels = {"rank_groups": tree, "groups": world.rank.groups(tree)}
    worker = world.worker(model, sync_every=3, codec="int8", **levels)
    worker.train(4)
    ranks = world.of_all(worker.weights())
    require_same(ranks[::2], ranks[1::2])
    assert not torch.equal(ranks[0][0], ranks[2][0])
    require_same(worker.anchors(), world.of_all(worker.anchors())[0])
    stats = worker.updates.comm_stats()
    assert stats["steps"] == 1
    assert 0 < stats["inter_bytes"] < stats["raw_bytes"] / 3


@pytest.mark.parametrize(("overlap", "calls", "exposed"), [(0, 4, [4e3, 4e3]), (2, 6, [6e3, 4e3])])
@on_threads(1)
def test_the_time_of_exchanges_is_told(
    world: World, overlap: int, calls: int, exposed: list[float]
) -> None:
    """Of a clock that goes on by a second when it is read."""
    with patch.object(outer_steps, "perf_counter", partial(next, itertools.count())):
        worker = world.worker(plain(), sync_every=4, overlap_steps=overlap)
        for steps, expected in zip((calls, 4), exposed, strict=True):
            worker.train(steps)
            assert worker.updates.metrics()["outer/exposed_ms"] == expected


@on_threads(2)
def test_any_outer_optimizer_and_schedule(world: World) -> None:
    outer = partial(torch.optim.Adam, lr=0.01)
    worker = world.worker(plain(), sync_every=2, outer_optimizer=outer)
    begin = worker.anchors()
    scheduler = torch.optim.lr_scheduler.StepLR(worker.updates.outer_optimizer, 1, gamma=0.0)
    worker.train(2)
    moved = worker.anchors()
    scheduler.step()
    worker.train(2)
    require_same(worker.anchors(), moved)
    require_same(*world.of_all(moved))
    assert not torch.equal(moved[0], begin[0])


@pytest.mark.parametrize("fragments", [1, 2])
@on_threads(2)
def test_an_outer_schedule_steps_with_the_whole_model(world: World, fragments: int) -> None:
    """Outer SGD without momentum: the anchor moves by the factor times the mean."""
    worker = world.worker(
        plain(),
        sgd,
        method="local_sgd",
        sync_every=2,
        fragments=fragments,
        codec="none",
        outer_schedule=lambda each: torch.optim.lr_scheduler.LambdaLR(
            each, lambda step: [0.5, 0.25, 0.125][step]
        ),
    )
    for factor in (0.5, 0.25):
        rates = set()
        for _ in range(2):
            before = worker.anchors()
            worker.learn()
            own = worker.weights()
            if worker.updates.step():
                rates.add(worker.updates.metrics()["outer/lr"])
        assert rates == {factor}
        if fragments == 1:
            pairs = zip(before, mean_of(world.of_all(own)), strict=True)
            expected = [old - factor * (old - mean) for old, mean in pairs]
            torch.testing.assert_close(worker.anchors(), expected)
    worker.learn()
    worker.updates.finish()
    assert worker.updates.outer_scheduler.last_epoch == 2


@on_threads(2)
def test_with_equal_samples_it_is_the_mean_and_the_cosine_that_of_workers(world: World) -> None:
    weights, metrics = [], []
    for weigh_by in ("workers", "samples"):
        worker = world.worker(plain(), sync_every=2, codec="none", weigh_by=weigh_by)
        worker.samples = (lambda rank, step: 32.0) if weigh_by == "samples" else None
        worker.train(4)
        weights.append(worker.weights())
        metrics.append(dict(worker.updates.metrics()))
        del metrics[-1]["outer/exposed_ms"]  # it is of the clock
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)
    assert metrics[1].pop("outer/samples") == 2 * 2 * 32
    assert metrics[1] == pytest.approx(metrics[0])


@on_threads(2)
def test_post_local_sgd_is_ddp_until_it_starts(world: World) -> None:
    stock = world.rank.ddp(plain(dtype=torch.float32))
    optimizer, data = adam(stock.parameters()), batches(world.rank.rank, torch.float32)
    for _ in range(4):
        optimizer.zero_grad()
        stock(next(data)).square().mean().backward()
        optimizer.step()
    model = world.rank.ddp(plain(dtype=torch.float32))
    settings = {"method": "post_local_sgd", "ddp_steps": 4, "sync_every": 2, "codec": "none"}
    worker = world.worker(model, **settings)
    for _ in range(4):
        worker.train(1)
        # What is validated, saved and given to newcomers before the first local step.
        state, _ = worker.updates.spread_state_dict()
        with worker.updates.anchor_weights():
            require_same(worker.weights(), [*state["anchor"].values()])
        require_same(worker.weights(), [*worker.updates.anchor_state_dict().values()])
    require_same(worker.weights(), [p.detach() for p in stock.parameters()])
    for averages in (False, True):
        worker.train(1)
        first, second = world.of_all(worker.weights()[0])
        assert torch.equal(first, second) == averages


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_each_buffer_is_averaged_by_itself(world: World, size: int) -> None:
    """In its own dtype, over the workers whose own is finite; equal ones keep their bits."""
    own, model = world.rank.rank, plain()
    buffers = {
        "mask": torch.full((4, 4), -torch.inf).triu(1),
        "constant": torch.rand(100, generator=torch.Generator().manual_seed(0)),
        "statistics": torch.full((3,), float(own)),
        "precise": torch.tensor(1 + own * 2.0**-40, dtype=torch.float64),
        "short": torch.tensor([2.0 * own], dtype=torch.bfloat16),
        "overflown": torch.tensor([torch.inf if own == 0 else 3.0 + own]),
        "nowhere finite": torch.full((2,), torch.inf if own else torch.nan),
        "batches": torch.tensor(5 + own),
    }
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer.clone())
    worker = world.worker(model, sync_every=2, codec="none")
    for name, buffer in buffers.items():  # after those of rank 0 were sent
        worker.updates.buffers()[name].copy_(buffer)
    worker.train(2)
    found, mean = worker.updates.buffers(), (size - 1) / 2
    for name in ("mask", "constant", "batches", "nowhere finite"):
        assert torch.equal(found[name].nan_to_num(7), buffers[name].nan_to_num(7)), name
    assert found["statistics"].tolist() == pytest.approx([mean] * 3)
    assert float(found["precise"]) - 1 == pytest.approx(mean * 2.0**-40, rel=1e-3)
    assert found["short"].tolist() == [2 * mean]
    assert found["overflown"].tolist() == [3 + size / 2]


@on_threads(2)
def test_weights_that_are_loaded_later_are_not_those_of_the_anchor(world: World) -> None:
    worker = world.worker(plain(), sync_every=2, codec="none")
    worker.model.load_state_dict(plain(seed=5).state_dict())
    get_optimizer_state_dict(worker.model, worker.optimizer)  # makes it by a step that does nothing
    with pytest.raises(ValueError, match=r"changed since; load them before, or call anchor_from"):
        worker.train(1)
    worker.updates.anchor_from_weights()
    worker.train(2)


@on_threads(2)
def test_the_cosine_of_two_workers(world: World) -> None:
    worker = world.worker(plain(), method="local_sgd", sync_every=2, codec="none")
    begin = worker.anchors()
    worker.train(1)
    worker.learn()
    own = torch.cat([(a - b).reshape(-1) for a, b in zip(begin, worker.weights(), strict=True)])
    worker.updates.step()
    a, b = world.of_all(own)
    metrics, squares = worker.updates.metrics(), float(a @ a + b @ b) / 2
    assert metrics["outer/cosine"] == pytest.approx(float(a @ b) / squares)
    assert metrics["outer/drift"] == pytest.approx(squares**0.5)
    assert metrics["outer/pseudo_gradient_norm"] == pytest.approx(float(((a + b) / 2).norm()))
