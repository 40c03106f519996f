"""`compress_ddp` on a DistributedDataParallel; in every framework one training ends in its bits."""

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from messages import refused
from replicas import of_all as of_ranks
from replicas import require_equal
from scenarios.accelerating import forget_accelerators
from scenarios.fitting import compressed as compressed_net
from scenarios.fitting import make_trainer, parameters
from scenarios.models import Regression, loader
from scenarios.world import rank, world_size
from threads import of_all, on_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset
from worlds import Rank

from lightning_dist import by_name, compress_ddp
from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.base.private import timeout_of
from lightning_dist.fabric import CompressedDDPStrategy
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.step_end import require_equal_hyperparameters
from lightning_dist.sync.base import sync_of


def two_branches() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})


class Chosen(nn.Module):
    """Uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = two_branches()

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return sum((self.branches[name](x).square().mean() for name in names), torch.zeros(()))


def compressed(rank: Rank, module: nn.Module, **arguments: Any) -> tuple[Any, Any]:
    model = rank.ddp(module, **arguments)
    return model, compress_ddp(model, "int8", min_compress_numel=0, groups=rank.groups())


def batch(rank: Rank, step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank.rank))


@on_threads(2)
def test_an_unused_parameter_keeps_its_residual_even_with_an_old_gradient(rank: Rank) -> None:
    """DDP puts the gradient that is still in ``.grad`` into the bucket of an unused parameter, and
    does not apply what comes back: nothing was paid, so nothing may be taken off what is owed.
    """
    model, reducer = compressed(rank, Chosen(), find_unused_parameters=True)
    model(batch(rank, 0), "ab").backward()
    before = reducer.residuals["branches.b.weight"].clone()
    model(batch(rank, 1), "a").backward()  # b.weight.grad is of the step before
    assert before.any()
    assert torch.equal(reducer.residuals["branches.b.weight"], before)
    reducer.close()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_threads(2)
def test_a_gradient_survives_a_backward_that_does_not_use_it(rank: Rank, view: bool) -> None:
    """Two losses before one optimizer step: what the first left in ``.grad`` stays as in DDP."""
    arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    model, reducer = compressed(rank, Chosen(), **arguments)
    for step in range(3):  # DDP keeps its buckets from the second step on
        model.zero_grad()
        model(batch(rank, step), "a").backward()
        gradient = model.module.branches["a"].weight.grad
        before = gradient.clone()
        model(batch(rank, step), "b").backward()
    assert before.any()
    assert torch.equal(gradient, before)
    reducer.close()


@on_threads(2)
def test_replicas_stay_equal_and_state_goes_on(rank: Rank) -> None:
    model, reducer = compressed(rank, Chosen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step), "ab").backward()
        optimizer.step()
    stats = reducer.comm_stats()
    assert stats["steps"] == 5
    assert stats["wire_bytes"] < stats["raw_bytes"]
    first, second = of_all(rank, [p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, first, second))
    reducer.close()


@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused"])
@on_threads(2)
def test_layers_that_are_unfrozen_and_frozen_again(rank: Rank, unused: bool) -> None:
    """What is trained is averaged, from its first step on; what is frozen keeps its residual."""
    module = Chosen()
    layers = module.branches
    layers["b"].requires_grad_(False)
    model, reducer = compressed(rank, module, find_unused_parameters=unused)
    phases = ("a", "ab", "b", "ab", "a", "b")
    optimizer, owed = torch.optim.SGD(model.parameters(), lr=0.1), dict[str, Tensor]()
    for step, phase in enumerate(each for each in phases for _ in range(2)):
        for name, layer in layers.items():
            layer.requires_grad_(name in phase)
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(rank, step), "ab")  # as a validation
        model(batch(rank, step), "ab").backward()
        for name, layer in layers.items():
            kept = reducer.residuals.get(f"branches.{name}.weight")
            if name in phase:
                assert torch.equal(*of_all(rank, layer.weight.grad)), (step, name)
                assert kept is not None
            elif kept is not None and kept.any():
                assert torch.equal(kept, owed[name])
            owed |= {name: kept.clone()} if kept is not None else {}
        optimizer.step()
    assert reducer.step == 2 * len(phases)
    assert all(torch.equal(*of_all(rank, each.detach())) for each in model.parameters())
    reducer.close()


@on_threads(2)
def test_a_static_graph_does_not_change(rank: Rank) -> None:
    model, reducer = compressed(rank, Chosen(), static_graph=True)
    model(batch(rank, 0), "ab").backward()
    model.module.branches["b"].weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"'branches\.b\.weight' was frozen; leave static_graph out"
    ):
        model(batch(rank, 1), "ab")
    reducer.close()


@on_threads(2)
def test_what_is_stepped_and_not_sent_is_refused(rank: Rank) -> None:
    model, reducer = compressed(rank, Chosen())
    model.module.branches["c"] = nn.Linear(16, 16)
    model(batch(rank, 0), "abc").backward()
    with pytest.raises(
        ValueError, match=r"got 'branches\.c\.weight', whose gradient no rank sends"
    ):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    reducer.close()


@on_threads(2)
def test_a_second_optimizer_is_refused_with_means_of_the_step_before(rank: Rank) -> None:
    model = rank.ddp(Chosen())
    reducer = compress_ddp(model, "int8", delay=1, groups=rank.groups())
    first, second = (
        torch.optim.SGD(b.parameters(), lr=0.1) for b in model.module.branches.values()
    )
    model(batch(rank, 0), "ab").backward()
    first.step()
    with pytest.raises(ValueError, match="belong to the same optimizer, got 2 optimizers"):
        second.step()
    reducer.close()


@pytest.mark.parametrize("begin", [0, 3])
@patch("lightning_dist.reducer.pipeline._COMPARED_EVERY", 5)
@on_threads(2)
def test_hyperparameters_that_differ_between_ranks(rank: Rank, begin: int) -> None:
    """As of a search that each rank has drawn for itself."""
    model, reducer = compressed(rank, Chosen())
    groups = [{"params": each.parameters()} for each in model.module.branches.values()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def train() -> None:
        for step in range(6):
            if step == begin and rank.rank == 1:
                optimizer.param_groups[1]["lr"] = 0.2
            model(batch(rank, step), "ab").backward()
            optimizer.step()

    says = (
        r"(?s)lr of AdamW of 'branches\.a\.bias', group 1: '0\.1' on rank 0; '0\.2' on rank 1\n"
        ".*replicas have drifted apart"
    )
    with pytest.raises(RuntimeError, match=says) as caught:
        train()
    assert "weight_decay" not in str(caught.value)
    reducer.close()


@on_threads(2)
def test_a_rank_that_has_joined_knows_of_no_hyperparameters(rank: Rank) -> None:
    own = {} if rank.rank else {"lr": "0.1", "eps": "1e-8"}
    require_equal_hyperparameters(own, rank.network())
    with pytest.raises(
        RuntimeError, match=r"differ in\n  lr: '0\.1' on rank 0; '0\.2' on rank 1\n"
    ):
        require_equal_hyperparameters(own or {"lr": "0.2"}, rank.network())


@on_threads(2)
def test_the_reducer_of_a_module_is_the_last_that_was_attached(rank: Rank) -> None:
    module = nn.Linear(16, 16)
    _, first = compressed(rank, module)
    assert reducer_of(module) is first
    assert sync_of(copy.deepcopy(module)) is None
    wrapped, second = compressed(rank, module)
    assert reducer_of(module) is reducer_of(wrapped) is second
    first.close()
    second.close()
    assert sync_of(module) is None


def reducer_of(module: nn.Module) -> Reducer | None:
    sync = sync_of(module)
    return None if sync is None else sync.reducer


def of_mixed_precision(rank: Rank) -> Any:
    model = rank.ddp(nn.Linear(2, 2))
    model.mixed_precision = object()  # the real one needs an accelerator
    return model


def without_streams(rank: Rank) -> Any:
    """Its gradients would be sent by the worker for CPUs, from memory that is not the host's."""
    return rank.ddp(nn.Linear(2, 2, device="meta"), init_sync=False)


def on_two_devices(rank: Rank) -> Any:
    """DDP takes several GPUs; here they are planted once it has taken the model."""
    model = rank.ddp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model.module[1].to_empty(device="meta")
    return model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


@pytest.mark.parametrize("how", ["frozen", "ignored"])
@on_threads(2)
def test_sparse_gradients_that_are_not_exchanged(rank: Rank, how: str) -> None:
    model = Words()
    if how == "frozen":
        model.table.requires_grad_(False)
    else:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])
    ddp = rank.ddp(model)
    reducer = compress_ddp(ddp, groups=rank.groups(), min_compress_numel=0)
    ddp(torch.tensor([1 + rank.rank])).sum().backward()
    assert torch.equal(*of_all(rank, model.head.weight.grad))
    assert "table.weight" not in reducer.residuals
    assert how == "frozen" or model.table.weight.grad.is_sparse
    reducer.close()


@pytest.mark.parametrize("table", [0, 2], ids=["first bucket", "last bucket"])
@on_threads(2)
def test_sparse_gradients_are_averaged_as_by_ddp(rank: Rank, table: int) -> None:
    """The rows that a rank has used, by name uncompressed; all else is compressed."""
    layers: list[nn.Module] = [nn.Linear(16, 16), nn.Linear(16, 16)]
    layers.insert(table, nn.Embedding(12, 16, sparse=True))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(copy.deepcopy(layers))

        def forward(self, words: Tensor) -> Tensor:
            rest = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
            found = self.layers[table](words)
            return rest[1](torch.tanh(rest[0](found))) * found

    codec = by_name("int8", {rf"layers\.{table}\.": "none"})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in (each for layer in layers for each in layer.parameters()):
            each.copy_(torch.randn(each.shape, generator=generator) / 4)
    ours, stock = (rank.ddp(Model()) for _ in range(2))
    reducer = compress_ddp(ours, codec, groups=rank.groups(), min_compress_numel=0)
    for step in range(3):
        words = torch.randint(
            12, (5,), generator=torch.Generator().manual_seed(7 * step + rank.rank)
        )
        for model in (ours, stock):
            model.zero_grad()
            model(words).square().sum().backward()
        own, native = (model.module.layers[table].weight.grad for model in (ours, stock))
        assert own.is_sparse
        assert torch.equal(own.to_dense(), native.to_dense())
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            if not mine.grad.is_sparse:
                assert torch.equal(*of_all(rank, mine.grad))
                largest = float(theirs.grad.abs().max())
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0.05 * largest)
    assert reducer.step == 3
    stats = reducer.comm_stats()["per_codec"]
    assert stats["none"]["raw_bytes"] == stats["none"]["wire_bytes"] > 3 * 2 * 16 * 4
    reducer.close()


@on_threads(2)
def test_sparse_gradients_alone(rank: Rank) -> None:
    module = nn.Embedding(12, 4, sparse=True)
    model = rank.ddp(module)
    reducer = compress_ddp(model, "none", groups=rank.groups())
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([rank.rank, 5])).sum().backward()
        assert torch.equal(*of_all(rank, module.weight.grad.to_dense()))
    reducer.state_dict()  # nothing else waits for the end of a step without a dense gradient
    assert reducer.step == reducer.comm_stats()["steps"] == 2
    reducer.close()


@pytest.mark.parametrize("table", [0, 1], ids=["last bucket", "first bucket"])
@on_threads(2)
def test_sparse_gradients_that_are_not_finite(rank: Rank, table: int) -> None:
    """A GradScaler skips the step: residuals stay."""
    layers: list[nn.Module] = [nn.Linear(16, 16)]
    layers.insert(table, nn.Embedding(12, 16, sparse=True))
    module = nn.ModuleList(layers)
    module.forward = lambda words: layers[1 - table](layers[table](words))  # type: ignore[method-assign]
    model = rank.ddp(module)
    codec = by_name("int8", {rf"^{table}\.": "none"})
    arguments = {"groups": rank.groups(), "min_compress_numel": 0}
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # makes the scale
    reducer = compress_ddp(model, codec, grad_scaler=scaler, **arguments)
    model(torch.arange(4)).square().sum().backward()
    before = {name: each.clone() for name, each in reducer.residuals.items()}
    assert all(each.any() for each in before.values())
    if rank.rank == 0:
        layers[table].weight.register_hook(lambda gradient: gradient * torch.inf)
    model(torch.arange(4)).square().sum().backward()
    assert all(torch.equal(each, before[name]) for name, each in reducer.residuals.items())
    reducer.close()


@pytest.mark.on_ranks(2)
def test_new_groups_have_the_timeout_of_the_model_s() -> None:
    """Not torch's default, half an hour."""
    group = dist.new_group(timeout=timedelta(seconds=41))
    model = DistributedDataParallel(two_branches()["a"], process_group=group)
    reducer = compress_ddp(model)
    found = [timeout_of(channel.group) for channel in reducer.network.channels]
    assert found == [timedelta(seconds=41)] * len(found)
    reducer.close()


@pytest.mark.on_ranks(2)
def test_copies_of_the_model() -> None:
    """As for averaged weights; they exchange nothing."""
    model = DistributedDataParallel(two_branches()["a"])
    reducer = compress_ddp(model)
    for copied in (copy.deepcopy(model), AveragedModel(model).module):
        assert isinstance(copied, DistributedDataParallel)
        assert all(map(torch.equal, copied.parameters(), model.parameters()))
    model(torch.ones(1, 16)).sum().backward()
    assert reducer.step == 1
    reducer.close()


def with_sparse_gradients(rank: Rank) -> Any:
    return rank.ddp(nn.ModuleDict({"words": nn.EmbeddingBag(9999, 9, sparse=True)}))


def with_experts(rank: Rank, **mark: bool) -> Any:
    model = rank.ddp(nn.Linear(4, 4))
    ((name, value),) = mark.items()
    setattr(model.module.weight, name, value)
    return model


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (of_mixed_precision, r"mixed_precision=\.\.\.\) installs a communication hook"),
        (without_streams, r"the CPU or on an accelerator with streams.* 'weight' is on meta; use"),
        (on_two_devices, "one device per process.* '0.weight' is on cpu and '1.weight' on meta"),
        (with_sparse_gradients, r"by_name\(\.\.\., \{'words\.weight': 'none'\}\)"),
        (partial(with_experts, allreduce=False), r"'weight' is .* an expert \(allreduce=False\)"),
        (partial(with_experts, skip_allreduce=True), r"an expert \(skip_allreduce=True\)"),
    ],
)
def test_what_cannot_be_compressed_is_refused(wrap: Any, says: str) -> None:
    assert re.search(says, refused(wrap))


@on_threads(2)
def test_a_model_that_was_compiled_and_has_trained(rank: Rank) -> None:
    """torch.compile does not begin before the first pass, and DDP takes a hook at any time."""
    found = []
    for codec in (None, "none"):
        model = rank.ddp(two_branches()["a"])
        model(batch(rank, 1)).sum().backward()
        whole = torch.compile(model, backend="eager")
        if codec is not None:
            reducer = compress_ddp(whole, codec, groups=rank.groups())
        model(batch(rank, 2)).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    assert reducer.comm_stats()["steps"] == 1
    reducer.close()
    assert all(map(torch.equal, *found))


@on_threads(2)
def test_a_silent_rank_fails_the_step_within_the_timeout(rank: Rank) -> None:
    model = rank.ddp(two_branches()["a"])
    reducer = compress_ddp(model, groups=rank.groups(), exchange_timeout=0.3)
    if rank.rank == 0:  # the other one does not come
        with pytest.raises(RuntimeError, match=r"No answer from the other ranks within 0\.3 s"):
            model(batch(rank, 1)).sum().backward()
    rank.barrier.wait()
    reducer.close()


accelerate = pytest.importorskip("accelerate")


STEPS = 20


def net() -> nn.Module:
    return Regression(optimizer="momentum").net


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> DataLoader[Any]:
    """Of this rank: frameworks deal batches in different ways."""
    everything = loader(STEPS).dataset
    own = list(range(rank(), len(everything), world_size()))
    return DataLoader(Subset(everything, own), batch_size=8)


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]
) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()


class Own(Regression):
    def train_dataloader(self) -> DataLoader[Any]:
        return batches()


def by_lightning(codec: str) -> nn.Module:
    model = Own(optimizer="momentum")
    trainer = make_trainer(compressed_net(codec), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(model)
    assert trainer.global_step == STEPS
    return model.net


def by_fabric(codec: str) -> nn.Module:
    strategy = CompressedDDPStrategy(codec, min_compress_numel=0)
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    module = net()
    loop(*fabric.setup(module, optimizer_of(module)), fabric.backward)
    for reducer in strategy.reducers:
        reducer.close()
    return module


def by_accelerate(codec: str) -> nn.Module:
    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    compression = CompressedDDPPlugin(codec, min_compress_numel=0).attach(accelerator)
    module = net()
    loop(*accelerator.prepare(module, optimizer_of(module)), accelerator.backward)
    compression.close()
    forget_accelerators()
    return module


@cache
def by_plain_ddp(codec: str) -> dict[str, Tensor]:
    module = net()
    model = DistributedDataParallel(module)
    reducer = compress_ddp(model, codec, min_compress_numel=0)
    loop(model, optimizer_of(module), Tensor.backward)
    assert reducer.comm_stats()["steps"] == STEPS
    reducer.close()
    return parameters(module)


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1"])
@pytest.mark.parametrize("way", [by_accelerate, by_fabric, by_lightning])
def test_the_parameters_after_20_steps_are_the_same_bits(
    codec: str, way: Callable[[str], nn.Module]
) -> None:
    expected, start, uncompressed = by_plain_ddp(codec), parameters(net()), by_plain_ddp("none")
    require_equal(parameters(way(codec)), of_ranks(expected)[0])
    for name, value in expected.items():
        assert not torch.equal(value, start[name]), "it has trained"
    different = [not torch.equal(value, uncompressed[name]) for name, value in expected.items()]
    assert any(different), "and the codec took part"
