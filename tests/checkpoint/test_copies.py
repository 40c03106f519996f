"""The copy is the state at the trigger, and optimizer steps wait for it and no longer."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_copies import LIMIT, Held, held_copies
from snapshots import assert_equal, trained
from torch import nn

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.snapshot.fence import Fence


class Foreign(torch.optim.SGD):
    """Of no known package: it may change parameters before it calls its closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(100)
        return super().step(closure)


def parameter_and_optimizer() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_waits_for_another_thread_and_the_time_is_counted() -> None:
    parameter, optimizer = parameter_and_optimizer()
    fence, entered = Fence(), threading.Event()
    fence.watch([optimizer])
    fence.close()
    thread = threading.Thread(target=lambda: (entered.wait(LIMIT), fence.open()))
    thread.start()
    optimizer.step(lambda: entered.set())
    thread.join(LIMIT)
    assert parameter.tolist() == [0.5] * 4
    assert fence.waited > 0


def test_a_step_that_the_scaler_skips_does_not_wait() -> None:
    parameter, optimizer = parameter_and_optimizer()
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
    (one, watched), (other, forgotten) = (parameter_and_optimizer() for _ in range(2))
    fence = Fence()
    fence.watch([forgotten])
    fence.watch([watched])
    fence.close()
    forgotten.step()
    fence.unwatch()
    watched.step()
    assert one.tolist() == other.tolist() == [0.5] * 4
    assert fence.waited == 0


Watch = Callable[..., Checkpointer]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A checkpointer that watches these optimizers."""
    checkpointer = Checkpointer(CheckpointSettings(writer="thread"))
    checkpointer.open(str(tmp_path))

    def watch(*optimizers: torch.optim.Optimizer) -> Checkpointer:
        checkpointer.watch(optimizers)
        return checkpointer

    yield watch
    checkpointer.close()


def let_go_when_begun(held: Held) -> None:
    threading.Thread(target=lambda: (held.begun.wait(LIMIT), held.go.set())).start()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}


def frozen(state: Any) -> Any:
    """The same values in memory of their own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, frozen(value)) for key, value in state.items())
    return [frozen(value) for value in state] if isinstance(state, list) else state


def backward(model: nn.Module) -> torch.Tensor:
    loss = (model(torch.full((4, 13), 0.5)) ** 2).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (Foreign, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("closure", [None, lambda: 0.0], ids=["step", "closure"])
def test_a_step_right_behind_the_copy_is_not_in_it(
    kind: Any,
    arguments: dict[str, Any],
    closure: Callable[[], Any] | None,
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = trained(kind, **arguments)
    checkpointer = watch(optimizer)
    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, optimizer))
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/a.ckpt", step=1)
        backward(model)  # changes the buffers of the batch norm, and gradients
        let_go_when_begun(held)
        optimizer.step(closure)
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "a.ckpt"), before)
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])
    assert [type(event) for event in checkpointer.poll()] == [Committed]


@pytest.mark.parametrize("positional", [True, False])
def test_a_step_with_a_closure_lets_the_passes_run_first(
    positional: bool, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    checkpointer = watch(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(model)
        held.go.set()
        return loss

    for step in range(2):  # the second has a state to copy
        with held_copies(monkeypatch) as held:
            before = frozen(state_of(model, optimizer))
            checkpointer.save(state_of(model, optimizer), f"{tmp_path}/{step}.ckpt", step=step)
            optimizer.step(closure) if positional else optimizer.step(closure=closure)
        checkpointer.wait(LIMIT)
        assert_equal(torch.load(tmp_path / f"{step}.ckpt"), before)
    checkpointer.close()
    assert [type(event) for event in checkpointer.poll()] == [Committed] * 2


def test_two_optimizers_of_one_state(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained()
    backward(model)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    checkpointer = watch(*optimizers)
    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, *optimizers))
        checkpointer.save(state_of(model, *optimizers), f"{tmp_path}/a.ckpt", step=1)
        let_go_when_begun(held)
        for optimizer in reversed(optimizers):
            optimizer.step()
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "a.ckpt"), before)


TEARS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.add_(1),
    "through data": lambda p: p.data.add_(1),
    "through data, not at its start": lambda p: p.data[3:].add_(1),
    "one element": lambda p: p[3, 5].fill_(7),
}


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("tear", TEARS)
def test_a_write_outside_a_step_drops_that_save_and_ends_overlapping(
    tear: str, after: bool, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    checkpointer = watch(optimizer)
    with held_copies(monkeypatch, after=after) as held:
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/torn.ckpt", step=1)
        assert held.begun.wait(LIMIT)
        with torch.no_grad():
            TEARS[tear](model[0].weight)
    checkpointer.wait(LIMIT)
    (event,) = checkpointer.poll()
    assert isinstance(event, Failed)
    assert event.reason.startswith("Parameter of shape (7, 13) was changed outside an optimizer")
    assert "snapshot='blocking'" in event.reason
    assert not (tmp_path / "torn.ckpt").exists()

    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, optimizer))
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/next.ckpt", step=2)
        with torch.no_grad():
            TEARS[tear](model[0].weight)
        backward(model)
        optimizer.step()
        assert not held.begun.is_set(), "the next save was not copied at once"
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "next.ckpt"), before)


def test_an_error_of_the_copy_fails_the_save_and_opens_the_fence(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    checkpointer = watch(optimizer)

    def fail(_: object) -> str:
        raise RuntimeError("no such memory")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_dist.checkpoint.snapshot.copying.LaterCopy.run", fail)
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/a.ckpt", step=1)
        backward(model)
        optimizer.step()
        checkpointer.wait(LIMIT)
    (event,) = checkpointer.poll()
    assert isinstance(event, Failed)
    assert event.reason == "the snapshot failed: RuntimeError('no such memory')"
    checkpointer.save(state_of(model, optimizer), f"{tmp_path}/b.ckpt", step=2)
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "b.ckpt"), state_of(model, optimizer))
