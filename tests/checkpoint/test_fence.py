"""Optimizer steps wait until the copy is complete, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_copies import LIMIT
from torch import Tensor, nn

from lightning_dist.checkpoint.snapshot.fence import Fence


class Foreign(torch.optim.SGD):
    """Of no known package: it may change parameters before it calls its closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(100)
        return super().step(closure)


Run = tuple[nn.Parameter, torch.optim.Optimizer]


def parameter_and(kind: Any, **arguments: Any) -> Run:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return parameter, kind([parameter], **{"lr": 0.5, **arguments})


def step_behind(fence: Fence, step: Callable[[], Any], entered: threading.Event) -> None:
    """Call ``step`` while the fence is closed; it opens once ``entered`` is set."""
    fence.close()
    thread = threading.Thread(target=lambda: (entered.wait(LIMIT), fence.open()))
    thread.start()
    step()
    thread.join(LIMIT)


def seen_at_the_wait(fence: Fence, parameter: Tensor, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Values of ``parameter`` whenever a step begins to wait; the fence opens there."""
    values: list[Tensor] = []

    def wait() -> None:
        values.append(parameter.detach().clone())
        fence.open()

    patch.setattr(fence, "wait", wait)
    return values


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (Foreign, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else value.__name__,
)
def test_nothing_changes_before_the_fence_opens(
    kind: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter, optimizer = parameter_and(kind, **arguments)
    fence = Fence()
    fence.watch([optimizer])
    seen = seen_at_the_wait(fence, parameter, monkeypatch)
    fence.close()
    optimizer.step()
    assert [value.tolist() for value in seen] == [[1.0] * 4]
    assert not torch.equal(parameter, torch.ones(4))


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures_of_torch_optimizers_run_before_the_wait(
    kind: Any, positional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the copy goes on during the forward and backward pass."""
    parameter, optimizer = parameter_and(kind)
    fence = Fence()
    fence.watch([optimizer])
    seen = seen_at_the_wait(fence, parameter, monkeypatch)
    seen_by_closure = []

    def closure() -> Tensor:
        seen_by_closure.append((len(seen), parameter.detach().clone().tolist()))
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    fence.close()
    loss = optimizer.step(closure) if positional else optimizer.step(closure=closure)
    assert loss.item() == 4.0
    assert seen_by_closure[0] == (0, [1.0] * 4), "the wait came before the first closure"
    assert seen[0].tolist() == [1.0] * 4
    assert not torch.equal(parameter, torch.ones(4))


def test_closures_of_other_optimizers_run_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, optimizer = parameter_and(Foreign)
    fence = Fence()
    fence.watch([optimizer])
    seen = seen_at_the_wait(fence, parameter, monkeypatch)
    fence.close()
    optimizer.step(lambda: len(seen))
    assert [value.tolist() for value in seen] == [[1.0] * 4]


def test_a_step_waits_for_another_thread_and_the_time_is_counted() -> None:
    parameter, optimizer = parameter_and(torch.optim.SGD)
    fence, entered = Fence(), threading.Event()
    fence.watch([optimizer])
    step_behind(fence, lambda: optimizer.step(lambda: entered.set()), entered)
    assert parameter.tolist() == [0.5] * 4
    assert fence.waited > 0


def test_a_step_that_the_scaler_skips_does_not_wait() -> None:
    parameter, optimizer = parameter_and(torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fence = Fence()
    fence.watch([optimizer])
    scaler.scale((parameter * torch.inf).sum()).backward()
    fence.close()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0] * 4
    assert fence.waited == 0


def test_only_watched_optimizers_wait() -> None:
    (one, watched), (other, forgotten) = (parameter_and(torch.optim.SGD) for _ in range(2))
    fence = Fence()
    fence.watch([forgotten])
    fence.watch([watched])
    fence.close()
    forgotten.step()
    fence.unwatch()
    watched.step()
    assert one.tolist() == other.tolist() == [0.5] * 4
    assert fence.waited == 0


def test_all_of_several_optimizers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [parameter_and(torch.optim.SGD), parameter_and(torch.optim.AdamW)]
    fence = Fence()
    fence.watch([optimizer for _, optimizer in runs])
    for parameter, optimizer in runs:
        seen = seen_at_the_wait(fence, parameter, monkeypatch)
        fence.close()
        optimizer.step()
        assert [value.tolist() for value in seen] == [[1.0] * 4]
