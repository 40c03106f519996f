"""Local steps and outer steps: against a naive twin, after a restart, with a worker that fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist import OneBitAdam, local_updates
from lightning_dist.codecs import CODECS, TopK, resolve_codec
from lightning_dist.integrations.torch.outer_steps import LocalUpdates

WIDTH = 24
T = TypeVar("T")


class Net(nn.Module):
    """A tied weight, a frozen part, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.frozen(torch.tanh(self.norm(self.first(x))))))


def plain(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    model = nn.Sequential(*layers).to(dtype)
    generator = torch.Generator().manual_seed(seed)  # threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return model


def batches(rank: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)


@dataclass
class Worker:
    """One rank's training."""

    rank: Rank
    model: nn.Module
    optimizer: torch.optim.Optimizer
    updates: LocalUpdates
    data: Iterator[Tensor]

    def learn(self) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        self.model(next(self.data)).square().mean().backward()
        self.optimizer.step()

    samples: Callable[[int, int], float] | None = None

    def train(self, steps: int, *, poison: int | None = None) -> None:
        for step in range(steps):
            self.learn()
            if step == poison and self.rank.rank == 0:
                with torch.no_grad():
                    next(self.model.parameters())[0, 0] = float("inf")
            if self.samples is None:
                self.updates.step()
            else:
                self.updates.step(self.samples(self.rank.rank, self.updates.attempted + 1))

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def anchors(self) -> list[Tensor]:
        return [
            a.detach().clone()
            for g in self.updates.outer_optimizer.param_groups
            for a in g["params"]
        ]


@dataclass
class World:
    """One rank, and the workers that it has had."""

    rank: Rank
    stack: ExitStack

    def worker(
        self,
        model: nn.Module,
        make: Callable[[Any], torch.optim.Optimizer] = adam,
        **settings: Any,
    ) -> Worker:
        optimizer = make(model.parameters())
        settings = {"groups": self.rank.groups(), "min_compress_numel": 0, **settings}
        updates = local_updates(model, optimizer, **settings)
        self.stack.callback(updates.close)
        dtype = next(model.parameters()).dtype
        return Worker(self.rank, model, optimizer, updates, batches(self.rank.rank, dtype))


def run(train: Callable[[World], T], size: int, **arguments: Any) -> list[T]:
    """Results of ``train`` on every rank, which end their exchanges before that."""

    def run_rank(rank: Rank) -> T:
        with ExitStack() as stack:
            return train(World(rank, stack))

    return run_threads(run_rank, size, **arguments)


@dataclass
class Twin:
    """All workers one after the other, on whole tensors, in float64: the rules as in the papers."""

    workers: int
    sync_every: int
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    samples: Callable[[int, int], float] = lambda rank, step: 1.0

    def train(self, steps: int, make: Callable[[Any], torch.optim.Optimizer]) -> list[list[Tensor]]:
        models = [plain() for _ in range(self.workers)]
        optimizers = [make(model.parameters()) for model in models]
        data = [batches(rank) for rank in range(self.workers)]
        anchor = [p.detach().clone() for p in models[0].parameters()]
        velocity = [torch.zeros_like(a) for a in anchor]
        fragments = self.parts(models[0])
        sent: dict[int, tuple[int, list[Tensor]]] = {}
        before = [0] * len(fragments)
        for step in range(1, steps + 1):
            for model, optimizer, batch in zip(models, optimizers, data, strict=True):
                optimizer.zero_grad()
                model(next(batch)).square().mean().backward()
                optimizer.step()
            for when in ("before", "after"):
                if step in sent:
                    part, means = sent.pop(step)
                    for i, mean in zip(fragments[part], means, strict=True):
                        velocity[i] = self.momentum * velocity[i] + mean
                        anchor[i] = anchor[i] - self.lr * (mean + self.momentum * velocity[i])
                        for model in models:
                            own = list(model.parameters())[i].data
                            own.copy_(self.mixing * own + (1 - self.mixing) * anchor[i])
                interval = self.sync_every // self.fragments
                if when == "before" and step % interval == 0:
                    part = (step // interval - 1) % self.fragments
                    of = [
                        [list(m.parameters())[i].detach() for m in models] for i in fragments[part]
                    ]
                    counts = [
                        sum(self.samples(rank, each) for each in range(before[part] + 1, step + 1))
                        for rank in range(self.workers)
                    ]
                    before[part] = step
                    means = [
                        sum(n * (anchor[i] - each) for n, each in zip(counts, own, strict=True))
                        / sum(counts)
                        for i, own in zip(fragments[part], of, strict=True)
                    ]
                    sent[step + self.overlap] = part, means
        return [[p.detach() for p in model.parameters()] for model in models]

    def parts(self, model: nn.Module) -> list[list[int]]:
        """The same cut as ours where fragments are layers."""
        count = len(list(model.parameters()))
        if self.fragments == 1:
            return [list(range(count))]
        assert self.fragments == 2
        return [[0, 1], [2, 3, 4, 5]]


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
    for found in run(train, size):
        for ours, theirs in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "twin"),
    [
        ({"method": "local_sgd", "sync_every": 3}, {}),
        ({"method": "diloco", "sync_every": 4}, {"lr": 0.7, "momentum": 0.6}),
        (
            {"method": "diloco", "sync_every": 4, "overlap_steps": 2},
            {"lr": 0.7, "momentum": 0.6, "overlap": 2},
        ),
        (
            {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1},
            {"lr": 0.4, "momentum": 0.9, "fragments": 2, "overlap": 1, "mixing": 0.5},
        ),
    ],
)
def test_uncompressed_it_is_the_rule(settings: dict[str, Any], twin: dict[str, Any]) -> None:
    def train(world: World) -> list[Tensor]:
        worker = world.worker(plain(world.rank.rank), codec="none", **settings)
        worker.train(13)
        return worker.weights()

    expected = Twin(2, settings["sync_every"], **twin).train(13, adam)
    for found, wanted in zip(run(train, 2), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def unequal(rank: int, step: int) -> float:
    """Samples of a worker's step; now and then none."""
    return float((3 * rank + 1) * (step % 3) * 100)


@pytest.mark.parametrize(
    ("settings", "twin"),
    [
        ({"method": "local_sgd", "sync_every": 3}, {}),
        (
            {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1},
            {"lr": 0.4, "momentum": 0.9, "fragments": 2, "overlap": 1, "mixing": 0.5},
        ),
    ],
)
def test_workers_count_by_their_samples(settings: dict[str, Any], twin: dict[str, Any]) -> None:
    def train(world: World) -> list[Tensor]:
        worker = world.worker(plain(world.rank.rank), codec="none", weigh_by="samples", **settings)
        worker.samples = unequal
        worker.train(13)
        assert worker.updates.metrics()["outer/samples"] > 0
        return worker.weights()

    expected = Twin(2, settings["sync_every"], **twin, samples=unequal).train(13, adam)
    for found, wanted in zip(run(train, 2), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_with_equal_samples_it_is_the_mean_and_the_cosine_that_of_workers() -> None:
    def train(world: World, **settings: Any) -> tuple[list[Tensor], dict[str, float]]:
        worker = world.worker(plain(), sync_every=2, codec="none", **settings)
        worker.samples = None if not settings else lambda rank, step: 32.0
        worker.train(4)
        return worker.weights(), dict(worker.updates.metrics())

    equal = run(train, 2)
    weighted = run(lambda world: train(world, weigh_by="samples"), 2)
    for (ours, of_ours), (theirs, of_theirs) in zip(weighted, equal, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert of_ours.pop("outer/samples") == 2 * 2 * 32
        assert of_ours == pytest.approx(of_theirs)


def test_samples_are_given_where_they_count() -> None:
    def train(world: World) -> None:
        with pytest.raises(ValueError, match="needed there"):
            world.worker(plain(), weigh_by="samples").updates.step()
        with pytest.raises(ValueError, match="is for weigh_by='samples'"):
            world.worker(plain()).updates.step(32)

    run(train, 1)


def test_an_anchor_on_the_host_changes_nothing() -> None:
    def train(world: World, *, offload: bool) -> list[Tensor]:
        worker = world.worker(plain(dtype=torch.float32), offload=offload, **SCHEDULE)
        worker.train(8)
        worker.updates.finish()
        return worker.weights() + worker.anchors()

    for here, there in zip(
        run(lambda world: train(world, offload=True), 2),
        run(lambda world: train(world, offload=False), 2),
        strict=True,
    ):
        assert all(map(torch.equal, here, there))


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


@pytest.mark.parametrize("overlap", [0, 2])
def test_the_anchor_is_the_same_everywhere_with_every_codec(overlap: int) -> None:
    codecs = [name for name in CODECS if name != "dgc"]

    def train(world: World) -> dict[str, list[Tensor]]:
        found = {}
        for codec in codecs:
            worker = world.worker(
                plain(dtype=torch.float32), codec=codec, sync_every=3, overlap_steps=overlap
            )
            worker.train(7)
            found[codec] = worker.anchors()
            worker.updates.close()
        return found

    first, second = run(train, 2)
    for codec in codecs:
        assert all(map(torch.equal, first[codec], second[codec])), codec
        assert all(each.isfinite().all() for each in first[codec]), codec


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", ["int4", "topk:ratio=0.1"])
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


SCHEDULE = {"sync_every": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.5, "codec": "int4"}


@pytest.mark.parametrize("weigh_by", ["workers", "samples"])
@pytest.mark.parametrize("at", [2, 3, 4, 5, 6], ids=lambda at: f"after step {at}")
def test_a_resumed_training_is_bit_exact(at: int, weigh_by: str) -> None:
    """Inside a window, where an exchange begins, while it is under way, and when it is over."""
    samples = unequal if weigh_by == "samples" else None
    saved: dict[str, Any] = {}

    def train(world: World) -> tuple[list[Tensor], list[Tensor]]:
        whole = world.worker(plain(), method="diloco", weigh_by=weigh_by, **SCHEDULE)
        whole.samples = samples
        whole.train(at)
        model, optimizer = whole.model.state_dict(), whole.optimizer.state_dict()
        own = copy.deepcopy((model, optimizer))
        state = whole.updates.state_dict()
        assert (state is None) == (world.rank.rank > 0)
        if state is not None:
            saved.update(copy.deepcopy(state))
        world.rank.barrier.wait()
        whole.train(11 - at)
        resumed = world.worker(plain(7), method="diloco", weigh_by=weigh_by, **SCHEDULE)
        resumed.samples = samples
        resumed.model.load_state_dict(own[0])
        resumed.optimizer.load_state_dict(own[1])
        resumed.updates.load_state_dict(copy.deepcopy(saved))
        for _ in range(at):
            next(resumed.data)
        resumed.train(11 - at)
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

    for plain_run, saved_run in run(train, 2):
        for name, value in plain_run.items():
            assert torch.equal(value, saved_run[name]), name


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
        of_fragment = worker.updates._flat.nbytes
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


def test_models_with_tied_and_frozen_parts_and_statistics() -> None:
    def train(world: World) -> dict[str, Tensor]:
        worker = world.worker(Net(), sync_every=3, codec="none", mixing=0.0)
        start = worker.model.frozen.weight.clone()
        worker.train(3)
        assert torch.equal(worker.model.frozen.weight, start)
        assert worker.model.last.weight is worker.model.first.weight
        return {name: value.clone() for name, value in worker.model.state_dict().items()}

    first, second = run(train, 2)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert first["norm.running_mean"].abs().sum() > 0


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
        for i, found in enumerate(end):
            torch.testing.assert_close(found, (ranks[0][0][i] + ranks[1][0][i]) / 2)


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


def test_ranks_that_want_different_things_are_told() -> None:
    def train(world: World) -> str:
        with pytest.raises(ValueError, match="local updates") as error:
            world.worker(plain(), sync_every=4 + world.rank.rank)
        return str(error.value)

    assert all("sync_every" in each for each in run(train, 2))


def test_a_state_of_another_model_is_refused() -> None:
    def train(world: World) -> None:
        worker = world.worker(plain(), sync_every=4)
        state = worker.updates.state_dict()
        assert state is not None
        state["anchor"]["another"] = state["anchor"].pop("0.weight")
        with pytest.raises(ValueError, match="the same trained parameters"):
            worker.updates.load_state_dict(state)

    run(train, 1)


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
        worker = world.worker(start(), sgd, method="sparseloco", sync_every=2)
        generator = torch.Generator().manual_seed(world.rank.rank)
        for _ in range(2 * windows):
            learn(worker.model, generator)
            worker.updates.step()
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
