"""`compress_ddp` on a DistributedDataParallel: ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist import compress_ddp
from lightning_dist.integrations.torch.ddp import reducer_of


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


def test_an_unused_parameter_keeps_its_residual_even_with_an_old_gradient() -> None:
    """DDP puts the gradient that is still in ``.grad`` into the bucket of an unused parameter, and
    does not apply what comes back: nothing was paid, so nothing may be taken off what is owed.
    """

    def train(rank: Rank) -> tuple[bool, bool]:
        model, reducer = compressed(rank, Chosen(), find_unused_parameters=True)
        model(batch(rank, 0), "ab").backward()
        before = reducer.residuals["branches.b.weight"].clone()
        model(batch(rank, 1), "a").backward()  # b.weight.grad is of the step before
        after = reducer.residuals["branches.b.weight"].clone()
        reducer.close()
        return bool(before.any()), torch.equal(after, before)

    assert run_threads(train, 2) == [(True, True), (True, True)]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_a_gradient_survives_a_backward_that_does_not_use_it(view: bool) -> None:
    """Two losses before one optimizer step: what the first left in ``.grad`` stays as in DDP."""

    def train(rank: Rank) -> bool:
        arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        model, reducer = compressed(rank, Chosen(), **arguments)
        for step in range(3):  # DDP keeps its buckets from the second step on
            model.zero_grad()
            model(batch(rank, step), "a").backward()
            gradient = model.module.branches["a"].weight.grad
            before = gradient.clone()
            model(batch(rank, step), "b").backward()
        reducer.close()
        return bool(before.any()) and torch.equal(gradient, before)

    assert run_threads(train, 2) == [True, True]


def test_replicas_stay_equal_and_state_goes_on() -> None:
    def train(rank: Rank) -> tuple[dict[str, Any], list[torch.Tensor]]:
        model, reducer = compressed(rank, Chosen())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(rank, step), "ab").backward()
            optimizer.step()
        stats = dict(reducer.comm_stats())
        reducer.close()
        return stats, [p.detach().clone() for p in model.parameters()]

    (stats, first), (_, second) = run_threads(train, 2)
    assert stats["steps"] == 5
    assert stats["wire_bytes"] < stats["raw_bytes"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_reducer_of_a_module_is_the_last_that_was_attached() -> None:
    def attach_twice(rank: Rank) -> list[bool]:
        module = nn.Linear(16, 16)
        _, first = compressed(rank, module)
        found = [reducer_of(module) is first, reducer_of(copy.deepcopy(module)) is None]
        _, second = compressed(rank, module)
        found.append(reducer_of(module) is second)
        first.close()
        second.close()
        return [*found, reducer_of(module) is None]

    assert run_threads(attach_twice, 2) == [[True] * 4] * 2


def _refusal(prepare: Callable[[Rank], nn.Module]) -> str:
    def attempt(rank: Rank) -> str:
        with pytest.raises(ValueError) as refused:  # noqa: PT011  (the caller looks at the text)
            compress_ddp(prepare(rank))
        return str(refused.value)

    one, other = run_threads(attempt, 2)
    assert one == other
    return one


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    message = _refusal(lambda rank: nn.Linear(2, 2))
    assert "needs a DistributedDataParallel, got Linear" in message


def test_a_second_hook_is_refused() -> None:
    def prepare(rank: Rank) -> nn.Module:
        model = rank.ddp(nn.Linear(2, 2))
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    assert "fp16_compress_hook is registered already" in _refusal(prepare)


def test_compressing_twice_is_refused() -> None:
    def attempt(rank: Rank) -> str:
        model, reducer = compressed(rank, nn.Linear(2, 2))
        reducer.close()
        with pytest.raises(ValueError, match="one communication hook") as refused:
            compress_ddp(model)
        return str(refused.value)

    assert all(
        "that of compress_ddp is registered already" in said for said in run_threads(attempt, 2)
    )


def test_ddps_mixed_precision_is_refused() -> None:
    def prepare(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        model.mixed_precision = object()  # the real one needs an accelerator
        return model

    assert "mixed_precision=...) installs a communication hook" in _refusal(prepare)


def test_a_sparse_embedding_is_refused_by_name() -> None:
    model = nn.ModuleDict({"words": nn.EmbeddingBag(5, 3, sparse=True), "out": nn.Linear(3, 1)})
    assert "'words' was made with sparse=True" in _refusal(lambda rank: rank.ddp(model))


def test_a_device_without_streams_is_refused() -> None:
    """Its gradients would be sent by the worker for CPUs, from memory that is not the host's."""

    def prepare(rank: Rank) -> nn.Module:
        return rank.ddp(nn.Linear(2, 2, device="meta"), init_sync=False)

    said = _refusal(prepare)
    assert "must be on the CPU or on an accelerator with streams" in said
    assert "'weight' is on meta; use plain DDP" in said


def test_a_model_on_several_devices_is_refused() -> None:
    """DDP takes several GPUs; here they are planted once it has taken the model."""

    def prepare(rank: Rank) -> nn.Module:
        model = rank.ddp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model.module[1].to_empty(device="meta")  # type: ignore[operator,union-attr]
        return model

    said = _refusal(prepare)
    assert "one device per process" in said
    assert "'0.weight' is on cpu and '1.weight' on meta" in said


def test_a_silent_rank_fails_the_step_within_the_timeout() -> None:
    def train(rank: Rank) -> None:
        model = rank.ddp(two_branches()["a"])
        reducer = compress_ddp(model, groups=rank.groups(), exchange_timeout=0.3)
        if rank.rank == 0:  # the other one does not come
            with pytest.raises(RuntimeError, match=r"No answer from the other ranks within 0\.3 s"):
                model(batch(rank, 1)).sum().backward()
        rank.barrier.wait()
        reducer.close()

    run_threads(train, 2)
