"""Local steps and outer steps, against a naive twin and with every codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from local_worlds import Net, Twin, World, adam, batches, plain, require_same, run, sgd, unequal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import local_updates
from lightning_dist.codecs import CODECS, TopK, resolve_codec
from lightning_dist.integrations.torch.local import outer_steps


@pytest.mark.parametrize("size", [2, 3])
def test_every_step_averaged_is_data_parallel_training(size: int) -> None:
    """One local step, outer SGD of rate 1, inner SGD: the mean of the gradients."""

    def train(world: World) -> list[Tensor]:
        worker = world.worker(
            plain(world.rank.rank), sgd, method="local_sgd", sync_every=1, codec="none"
        )
        worker.train(5)
        return worker.weights()

    model = plain()
    optimizer = sgd(model.parameters())
    data = [batches(rank) for rank in range(size)]
    for _ in range(5):
        optimizer.zero_grad()
        sum(model(next(each)).square().mean() for each in data).div(size).backward()
        optimizer.step()
    expected = [[*model.parameters()]] * size
    torch.testing.assert_close(run(train, size), expected, rtol=1e-12, atol=1e-12)


LOCAL_SGD = {"method": "local_sgd", "sync_every": 3}
STREAMING = {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1}
OF_STREAMING = {"lr": 0.4, "momentum": 0.9, "fragments": 2, "overlap": 1, "mixing": 0.5}


@pytest.mark.parametrize(
    ("settings", "twin"),
    [
        (LOCAL_SGD, {}),
        ({"method": "diloco", "sync_every": 4}, {"lr": 0.7, "momentum": 0.6}),
        (
            {"method": "diloco", "sync_every": 4, "overlap_steps": 2},
            {"lr": 0.7, "momentum": 0.6, "overlap": 2},
        ),
        (STREAMING, OF_STREAMING),
        ({**LOCAL_SGD, "weigh_by": "samples"}, {"samples": unequal}),
        ({**STREAMING, "weigh_by": "samples"}, {**OF_STREAMING, "samples": unequal}),
    ],
)
def test_uncompressed_it_is_the_rule(settings: dict[str, Any], twin: dict[str, Any]) -> None:
    def train(world: World) -> list[Tensor]:
        worker = world.worker(plain(world.rank.rank), codec="none", **settings)
        worker.samples = twin.get("samples")
        worker.train(13)
        assert worker.samples is None or worker.updates.metrics()["outer/samples"] > 0
        return worker.weights()

    expected = Twin(2, settings["sync_every"], **twin).train(13, adam)
    torch.testing.assert_close(run(train, 2), expected, rtol=1e-10, atol=1e-10)


def test_with_equal_samples_it_is_the_mean_and_the_cosine_that_of_workers() -> None:
    def train(world: World, **settings: Any) -> tuple[list[Tensor], dict[str, float]]:
        worker = world.worker(plain(), sync_every=2, codec="none", **settings)
        worker.samples = None if not settings else lambda rank, step: 32.0
        worker.train(4)
        metrics = dict(worker.updates.metrics())
        del metrics["outer/exposed_ms"]  # it is of the clock
        return worker.weights(), metrics

    equal = run(train, 2)
    weighted = run(lambda world: train(world, weigh_by="samples"), 2)
    for (ours, of_ours), (theirs, of_theirs) in zip(weighted, equal, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert of_ours.pop("outer/samples") == 2 * 2 * 32
        assert of_ours == pytest.approx(of_theirs)


def test_post_local_sgd_is_ddp_until_it_starts() -> None:
    def train(world: World, *, local: bool) -> list[Tensor]:
        model = world.rank.ddp(plain(dtype=torch.float32))
        if local:
            worker = world.worker(
                model, method="post_local_sgd", ddp_steps=4, sync_every=2, codec="none"
            )
            worker.train(4)
            equal = worker.weights()
            worker.train(1)
            apart = worker.weights()
            worker.train(1)
            return [*equal, apart[0], worker.weights()[0]]
        optimizer, data = adam(model.parameters()), batches(world.rank.rank, torch.float32)
        for _ in range(4):
            optimizer.zero_grad()
            model(next(data)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    stock = run(lambda world: train(world, local=False), 2)
    first, second = run(lambda world: train(world, local=True), 2)
    for ours in (first, second):
        assert all(map(torch.equal, ours[:-2], stock[0]))
    assert not torch.equal(first[-2], second[-2])
    assert torch.equal(first[-1], second[-1])


@pytest.mark.parametrize(("overlap", "size"), [(0, 3), (2, 2)])
def test_the_anchor_is_the_same_everywhere_with_every_codec(overlap: int, size: int) -> None:
    """After every step."""
    codecs = [name for name in CODECS if name != "dgc"]

    def train(world: World) -> dict[str, list[Tensor]]:
        found = {}
        for codec in codecs:
            worker = world.worker(
                plain(dtype=torch.float32), codec=codec, sync_every=3, overlap_steps=overlap
            )
            found[codec] = []
            for _ in range(7):
                worker.train(1)
                found[codec] += worker.anchors()
            worker.updates.close()
        return found

    first, *others = run(train, size)
    for codec in codecs:
        for other in others:
            assert all(map(torch.equal, first[codec], other[codec])), codec
        assert all(each.isfinite().all() for each in first[codec]), codec


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
def test_nothing_is_lost(codec: str, rounds: int) -> None:
    """What was applied and what is owed is the sum of the exact means of the pseudo-gradients."""

    def train(world: World) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        worker = world.worker(
            plain(), sgd, method="local_sgd", sync_every=2, codec=codec, mixing=0.0
        )
        changed = [torch.zeros_like(p) for p in worker.weights()]
        begin = worker.anchors()
        for _ in range(rounds):
            before = worker.anchors()
            worker.train(1)
            worker.learn()
            for total, old, new in zip(changed, before, worker.weights(), strict=True):
                total += old - new
            worker.updates.step()
        state = worker.updates.reducer.state_dict()
        owed = {} if state is None else {n: rows.mean(0) for n, rows in state["residuals"].items()}
        moved = [a - b for a, b in zip(begin, worker.anchors(), strict=True)]
        return changed, owed, moved

    ranks = run(train, 2)
    _, owed, found = ranks[0]
    names = [name for name, _ in plain().named_parameters()]
    for i, name in enumerate(names):
        exact = sum(changed[i] for changed, _, _ in ranks).reshape(-1) / 2
        of_all = found[i].reshape(-1) + owed.get(name, torch.zeros(()))
        torch.testing.assert_close(of_all, exact, rtol=1e-5, atol=1e-6)


def test_several_optimizers_make_one_step() -> None:
    def train(world: World, *, several: bool) -> list[Tensor]:
        model = plain()
        first, *rest = model.children()
        worker = world.worker(model, sync_every=2, codec="none")
        if several:
            halves = [adam(first.parameters()), adam(nn.ModuleList(rest).parameters())]
            settings = {"groups": world.rank.groups(), "min_compress_numel": 0}
            worker.updates.close()
            worker.updates = local_updates(model, halves, sync_every=2, codec="none", **settings)
            world.stack.callback(worker.updates.close)
            worker.optimizer = halves[0]
            halves[0].register_step_post_hook(lambda *_: halves[1].step())
            halves[0].register_step_post_hook(lambda *_: halves[1].zero_grad())
        worker.train(5)
        assert worker.updates.attempted == 5
        return worker.weights()

    one, both = (run(partial(train, several=several), 2) for several in (False, True))
    require_same(both, one)


def test_fragments_are_whole_parameters_for_powersgd() -> None:
    def train(world: World) -> list[Tensor]:
        settings = {"sync_every": 4, "fragments": 2, "codec": "powersgd:rank=2"}
        worker = world.worker(plain(dtype=torch.float32), **settings)
        worker.train(9)
        cut = [[part.whole == part.numel for part in each.slices] for each in worker.parts()]
        assert len(cut) == 2
        assert all(map(all, cut))
        return worker.anchors()

    first, second = run(train, 2)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], plain(dtype=torch.float32)[0].weight)


def test_models_with_tied_and_frozen_parts_and_statistics() -> None:
    def train(world: World) -> dict[str, Tensor]:
        worker = world.worker(Net(), sync_every=3, codec="none", mixing=0.0)
        start = worker.model.frozen.weight.clone()
        worker.train(3)
        assert torch.equal(worker.model.frozen.weight, start)
        assert worker.model.last.weight is worker.model.first.weight
        return {name: value.clone() for name, value in worker.model.state_dict().items()}

    first, second = run(train, 2)
    require_same(first, second)
    assert first["norm.running_mean"].abs().sum() > 0


def mean_of(workers: Iterable[list[Tensor]]) -> list[Tensor]:
    return [sum(each) / len(each) for each in zip(*workers, strict=True)]


def test_the_end_is_the_mean_of_the_workers_and_evaluation_the_anchor() -> None:
    def train(world: World) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        worker = world.worker(plain(), sync_every=4, codec="none")
        worker.train(6)
        own, anchors = worker.weights(), worker.anchors()
        with worker.updates.anchor_weights():
            assert all(map(torch.equal, worker.weights(), anchors))
        assert all(map(torch.equal, worker.weights(), own))
        worker.updates.finish()
        return own, worker.weights(), worker.anchors(), anchors

    ranks = run(train, 2)
    for _, end, anchors, before in ranks:
        assert all(map(torch.equal, end, anchors))
        assert not torch.equal(anchors[0], before[0])
        torch.testing.assert_close(end, mean_of(own for own, *_ in ranks))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "sparseloco", "sync_every": 2},
        STREAMING,
        {"codec": "terngrad", "sync_every": 3, "overlap_steps": 2},
    ],
)
def test_the_end_is_the_exact_mean_whatever_is_compressed_or_under_way(
    settings: dict[str, Any],
) -> None:
    def train(world: World) -> tuple[list[Tensor], list[Tensor], int]:
        worker = world.worker(plain(dtype=torch.float32), **settings)
        worker.train(7)
        own = worker.weights()
        worker.updates.finish()
        steps = worker.updates.comm_stats()["steps"]
        worker.updates.finish()  # nothing has changed
        return own, worker.weights(), worker.updates.comm_stats()["steps"] - steps

    ranks = run(train, 2)
    for _, end, exchanges in ranks:
        torch.testing.assert_close(end, mean_of(own for own, *_ in ranks))
        assert exchanges == 0


@pytest.mark.parametrize("known", [True, False])
def test_the_last_step_of_a_known_number_is_followed_by_the_mean(known: bool) -> None:
    """Full outer momentum would overshoot after an inner learning rate that has decayed."""

    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        worker = world.worker(plain(), sync_every=2, codec="none", outer_momentum=0.9)
        decay = torch.optim.lr_scheduler.LinearLR(worker.optimizer, 1.0, 0.0, total_iters=8)
        worker.updates.total_steps = 8 if known else None
        for _ in range(8):
            worker.learn()
            own = worker.weights()
            worker.updates.step()
            decay.step()
        return own, worker.weights()

    ranks = run(train, 2)
    mean = mean_of(own for own, _ in ranks)
    for _, end in ranks:
        assert all(map(torch.allclose, end, mean)) == known


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1], [2]]], ids=["2, 2", "2, 1"])
def test_hosts_count_the_same_whatever_ranks_they_have(hosts: list[list[int]]) -> None:
    """Two orthogonal pseudo-gradients."""

    def train(world: World) -> tuple[dict[str, float], float, Tensor]:
        index, host = next((i, h) for i, h in enumerate(hosts) if world.rank.rank in h)
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(1)).double()
        inside = DistributedDataParallel(model, process_group=world.rank.group("host", host))
        worker = world.worker(inside, sgd, method="local_sgd", sync_every=1, codec="none")
        begin = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight[index] += 1
            model[1].running_mean.fill_(index)
        worker.updates.step()
        statistics = float(model[1].running_mean)
        return dict(worker.updates.metrics()), statistics, model[0].weight.detach() - begin

    for metrics, statistics, moved in run(train, sum(map(len, hosts))):
        torch.testing.assert_close(moved, torch.full_like(moved, 0.5))
        assert statistics == pytest.approx(0.5)
        assert metrics["outer/workers"] == 2
        assert metrics["outer/drift"] == pytest.approx(2**0.5)
        assert metrics["outer/cosine"] == pytest.approx(0, abs=1e-9)


def test_ranks_of_a_host_are_one_worker() -> None:
    """DistributedDataParallel inside the hosts, an outer exchange in levels between them."""
    tree = [[0, 1], [2, 3]]

    def train(world: World) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        host = tree[world.rank.rank // 2]
        inside = world.rank.group("host", host)
        model = DistributedDataParallel(plain(dtype=torch.float32), process_group=inside)
        worker = world.worker(
            model, sync_every=3, codec="int8", rank_groups=tree, groups=world.rank.groups(tree)
        )
        worker.train(4)
        return worker.weights(), worker.anchors(), dict(worker.updates.comm_stats())

    ranks = run(train, 4, ranks_per_host=2)
    for pair in (ranks[:2], ranks[2:]):
        assert all(map(torch.equal, pair[0][0], pair[1][0]))
    assert not torch.equal(ranks[0][0][0], ranks[2][0][0])
    for _, anchors, stats in ranks:
        assert all(map(torch.equal, anchors, ranks[0][1]))
        assert stats["steps"] == 1
        assert 0 < stats["inter_bytes"] < stats["raw_bytes"] / 3


def test_the_cosine_of_two_workers() -> None:
    def train(world: World) -> tuple[list[Tensor], dict[str, float]]:
        worker = world.worker(plain(), method="local_sgd", sync_every=2, codec="none")
        begin = worker.anchors()
        worker.train(1)
        worker.learn()
        changed = [a - b for a, b in zip(begin, worker.weights(), strict=True)]
        worker.updates.step()
        return changed, dict(worker.updates.metrics())

    (first, metrics), (second, _) = run(train, 2)
    a, b = (torch.cat([each.reshape(-1) for each in of]) for of in (first, second))
    dot, squares = float(a @ b), (float(a @ a) + float(b @ b)) / 2
    assert metrics["outer/cosine"] == pytest.approx(dot / squares)
    assert metrics["outer/drift"] == pytest.approx(squares**0.5)
    assert metrics["outer/pseudo_gradient_norm"] == pytest.approx(float(((a + b) / 2).norm()))


@pytest.mark.parametrize(("overlap", "calls", "exposed"), [(0, 4, [4e3, 4e3]), (2, 6, [6e3, 4e3])])
def test_the_time_of_exchanges_is_told(
    overlap: int, calls: int, exposed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a clock that goes on by a second when it is read."""
    monkeypatch.setattr(outer_steps, "perf_counter", partial(next, itertools.count()))

    def train(world: World) -> list[float]:
        worker = world.worker(plain(), sync_every=4, overlap_steps=overlap)
        found = []
        for steps in (calls, 4):
            worker.train(steps)
            found.append(worker.updates.metrics()["outer/exposed_ms"])
        return found

    assert run(train, 1) == [exposed]


def test_any_outer_optimizer_and_schedule() -> None:
    def train(world: World) -> list[Tensor]:
        worker = world.worker(
            plain(),
            sync_every=2,
            outer_optimizer=lambda each: torch.optim.Adam(each, lr=0.01),
        )
        scheduler = torch.optim.lr_scheduler.StepLR(worker.updates.outer_optimizer, 1, gamma=0.0)
        worker.train(2)
        moved = worker.anchors()
        scheduler.step()
        worker.train(2)
        assert all(map(torch.equal, moved, worker.anchors()))
        return moved

    first, second = run(train, 2)
    assert not torch.equal(first[0], plain()[0].weight)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_outer_schedule_steps_with_the_whole_model(fragments: int) -> None:
    """Outer SGD without momentum: the anchor moves by the factor times the mean."""

    def train(world: World) -> None:
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
                before = [a.clone() for a in worker.anchors()]
                worker.learn()
                own = worker.weights()
                if worker.updates.step():
                    rates.add(worker.updates.metrics()["outer/lr"])
            assert rates == {factor}
            if fragments == 1:
                for anchor, old, weight in zip(worker.anchors(), before, own, strict=True):
                    mean = old - weight
                    world.rank.group("test").allreduce([mean]).wait()
                    torch.testing.assert_close(anchor, old - factor * mean / 2)
        worker.learn()
        worker.updates.finish()
        assert worker.updates.outer_scheduler.last_epoch == 2

    run(train, 2)


def test_sparseloco_is_the_rule() -> None:
    """``e <- decay e + D``, ``q = C(e)``, ``e <- e - q``, ``anchor <- anchor - mean q``."""
    workers, windows, width = 2, 4, 64
    codec = resolve_codec("topk:ratio=0.015625,values=int2,decay=0.95")
    assert isinstance(codec, TopK)

    def start() -> nn.Module:
        model = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            model.weight.copy_(
                torch.randn(width, width, generator=torch.Generator().manual_seed(0))
            )
        return model

    def learn(model: nn.Module, generator: torch.Generator) -> None:
        x = torch.randn(8, width, generator=generator)
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad

    def train(world: World) -> tuple[Tensor, dict[str, Any]]:
        worker = world.worker(
            start(), lambda each: torch.optim.SGD(each, lr=0.5), method="sparseloco", sync_every=2
        )
        generator = torch.Generator().manual_seed(world.rank.rank)
        worker.data = (torch.randn(8, width, generator=generator) for _ in range(2 * windows))
        worker.train(2 * windows)
        return worker.weights()[0], dict(worker.updates.comm_stats())

    anchor = start().weight.detach().clone()
    owed = [torch.zeros(1, codec.block) for _ in range(workers)]
    generators = [torch.Generator().manual_seed(rank) for rank in range(workers)]
    for _ in range(windows):
        total = torch.zeros(1, codec.block)
        for rank in range(workers):
            model = start()
            with torch.no_grad():
                model.weight.copy_(anchor)
            for _ in range(2):
                learn(model, generators[rank])
            owed[rank] = 0.95 * owed[rank] + (anchor - model.weight.detach()).view(1, -1)
            sent = codec.decode(codec.encode(owed[rank]), torch.float32)
            owed[rank] = owed[rank] - sent
            total += sent / workers
        anchor = anchor - total.view(width, width)
    for weight, stats in run(train, workers):
        torch.testing.assert_close(weight, anchor, rtol=1e-5, atol=1e-6)
        assert stats["last_step"]["wire_bytes"] == 64 * 12 // 8 + 64 * 2 // 8 + 4 + 4  # padded
