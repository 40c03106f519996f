"""One process that fails in any hook of any step, and a second that goes on to the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import Net, Numbered, committed, fit, fit_with_faults, hash_of, make_loader

# Settings of a run, its steps in an epoch, and the step of a validation at which it saves too.
SETTINGS: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "validation after each epoch": ({}, 12, 12),
    "no validation": ({"validate": False}, 12, None),
    "validation within epochs": ({"val_check_interval": 5}, 12, 10),
    "accumulation": ({"accumulate_grad_batches": 2}, 6, 6),
    "limited epochs": ({"limit_train_batches": 7}, 7, 7),
    "half epochs, half validations": (
        {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
        *(6, 6),
    ),
    "validations of two batches": ({"limit_val_batches": 2}, 12, 12),
    "checkpoints of epochs": ({"elastic": {"every_n_train_steps": None}}, 12, 12),
    "sharded": ({"elastic": {"format": "sharded", "writer": "process"}}, 12, 12),
}


def faults_around_an_epoch(steps: int, validation: int | None) -> list[tuple[str, int]]:
    """Every hook of the first epoch and of its end, in the order in which they come."""
    names = ("on_validation_start", "on_validation_batch_end", "on_validation_end")
    faults = [
        ("on_train_batch_start", 3),
        ("on_train_batch_end", steps - 1),
        ("on_train_batch_end", steps),
        *((name, validation) for name in names if validation is not None),
        ("on_train_epoch_end", steps),
        ("on_train_epoch_start", steps),
    ]
    return sorted(faults, key=lambda fault: fault[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_later_processes_go_on_to_the_same_end(name: str, tmp_path: Path) -> None:
    settings, steps, validation = SETTINGS[name]
    settings = {"max_epochs": 2, **settings}
    _, whole = fit(tmp_path / "whole", **settings)
    expected = committed(tmp_path / "whole" / "account")
    assert len(expected) == 2 * steps
    for folder, faults in {
        tmp_path / "around": faults_around_an_epoch(steps, validation),
        tmp_path / "within": [("on_after_backward", 7), ("on_train_end", 2 * steps)],
    }.items():
        trainer, module = fit_with_faults(folder, faults, **settings)
        assert committed(folder / "account") == expected
        assert hash_of(module) == hash_of(whole)
        assert trainer.global_step == len(expected)
        assert trainer.fit_loop.epoch_loop._batches_that_stepped == len(expected)


class WaitsForAMetric(Net):
    """Its learning rate depends on what the validation of every epoch says."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "score"},
        }


class StepsByItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class KnowsItsSteps(Net):
    """Asks for the number of steps before anything is restored, which makes the loader."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WantsToStop(Net):
    """Once, before it may."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True


class SkipsSome(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class EndsEpochsEarly(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 else None


@pytest.mark.parametrize(
    ("module", "arguments", "steps"),
    [
        *((kind, {}, 12) for kind in (WaitsForAMetric, StepsByItself, KnowsItsSteps, SkipsSome)),
        (EndsEpochsEarly, {}, 8),
        (Net, {"max_steps": 31, "max_epochs": -1}, 12),
        (Net, {"reload_dataloaders_every_n_epochs": 1}, 12),
        (Net, {"check_val_every_n_epoch": None, "val_check_interval": 5}, 12),
        (Net, {"num_sanity_val_steps": 2}, 12),
        (Net, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 5}, 3),
        (Net, {"loader": lambda: make_loader(Numbered(50), drop_last=True)}, 12),
        (Net, {"loader": lambda: make_loader(Numbered(50)), "accumulate_grad_batches": 3}, 5),
        (WantsToStop, {"min_epochs": 2, "max_epochs": 9}, 12),
        (WantsToStop, {"min_steps": 21, "max_epochs": 9}, 12),
    ],
)
def test_modules_and_trainers_of_every_kind(
    module: Any, arguments: Any, steps: int, tmp_path: Path
) -> None:
    """A restart at the end of an epoch, one within the next, and the end of that one."""
    trainer, whole = fit(tmp_path / "whole", module=module(), **arguments)
    faults = [("on_train_epoch_end", steps), ("on_after_backward", steps + steps // 2)]
    again, resumed = fit_with_faults(tmp_path / "parts", faults, make_module=module, **arguments)
    assert committed(tmp_path / "parts" / "account") == committed(tmp_path / "whole" / "account")
    assert hash_of(resumed) == hash_of(whole)
    assert again.global_step == trainer.global_step
    assert again.current_epoch == trainer.current_epoch
