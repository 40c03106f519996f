"""What a failed step has changed is put back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.elastic.recovery.undo import StepUndo, UndoError


class Counts(nn.Module):
    """Its buffer is another tensor after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> Tensor:
        self.count = self.count + 1
        return self.weight.sum()


def undo_of(net: nn.Module, *optimizers: torch.optim.Optimizer, **objects: Any) -> StepUndo:
    undo = StepUndo(net, optimizers=optimizers, objects=objects)
    undo.begin()
    return undo


def test_tensors_that_were_replaced() -> None:
    model, other = Counts(), Counts()
    undo = undo_of(model, other=other)
    count, drawn = model.count, torch.rand(3)
    model()
    undo.give_up()
    other()
    other.weight.data = torch.zeros(2)
    undo.put_back()
    assert (int(model.count), int(other.count)) == (0, 0)
    assert model.count is count
    assert other.weight.tolist() == [1, 1]
    assert torch.equal(torch.rand(3), drawn)


class Caches(nn.Module):
    """Some of its buffers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(2))
        self.register_buffer("after", None)

    def forward(self) -> None:
        self.before, self.after = None, torch.ones(3)
        self.register_buffer("late", torch.ones(4), persistent=False)


def test_buffers_that_come_and_go() -> None:
    for gives_up in (False, True):
        model = Caches()
        undo, before = undo_of(model, model=model), model.before
        model()
        if gives_up:
            undo.give_up()
        undo.put_back()
        assert model.before is before
        assert before.tolist() == [0, 0]
        model()
        for _ in range(2):
            undo.begin()
            model.late += 1
            undo.put_back()
            assert model.late.tolist() == [1] * 4


def test_a_tensor_that_was_replaced_before_it_was_copied_is_named() -> None:
    model, other = Counts(), Counts()
    undo = undo_of(model, other=other)
    other()
    with pytest.raises(UndoError, match="'other'"):
        undo.put_back()
    undo.begin()
    with torch.no_grad():
        other.count.add_(1)
    with pytest.raises(UndoError, match="'other'"):
        undo.put_back()


def test_rates_of_either_kind() -> None:
    """torch's compiled optimizers have them as tensors, which schedulers write to."""
    for rate in (1.0, torch.tensor(1.0)):
        model = Counts()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        undo = undo_of(model, optimizer, scheduler=scheduler)
        undo.give_up()
        optimizer.step()
        scheduler.step()
        undo.put_back()
        found = optimizer.param_groups[0]["lr"]
        assert float(found) == 1.0
        assert found is rate or isinstance(rate, float)  # a compiled step keeps the tensor
        assert scheduler.last_epoch == 0


def test_what_was_changed_before_it_was_copied_is_named() -> None:
    model, average = Counts(), Counts()
    undo = undo_of(model, average=average, model=model)
    with torch.no_grad():
        average.weight.mul_(0.5)
    for gives_up in (False, True):
        if gives_up:
            undo.give_up()
        with pytest.raises(UndoError, match=r"state\['average'\] was changed in a step before"):
            undo.put_back()
    undo.begin()
    model()  # changes buffers, as each pass may
    undo.put_back()
    assert int(model.count) == 0


def test_tensors_that_nobody_can_change() -> None:
    """Of a teacher that was made in inference mode."""
    model = Counts()
    with torch.inference_mode():
        teacher = Counts()
    undo = undo_of(model, teacher=teacher)
    undo.give_up()
    undo.put_back()
