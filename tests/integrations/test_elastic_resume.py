"""One process that fails in any hook of any step, and a second that goes on to the same weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import FailAt, Fault, Net, Numbered, Step, committed, fit, hash_of, make_loader

SETTINGS: dict[str, dict[str, Any]] = {
    "validation after each epoch": {},
    "no validation": {"validate": False},
    "validation within epochs": {"val_check_interval": 5},
    "accumulation": {"accumulate_grad_batches": 2},
    "limited epochs": {"limit_train_batches": 7},
    "half epochs, half validations": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "validations of two batches": {"limit_val_batches": 2, "max_epochs": 2},
    "checkpoints of epochs": {"elastic": {"every_n_train_steps": None}},
    "sharded": {"elastic": {"format": "sharded", "writer": "process"}, "max_epochs": 2},
}
HOOKS = [
    ("on_train_batch_start", 3),
    ("on_after_backward", 7),
    ("on_train_batch_end", 11),
    ("on_train_batch_end", 12),
    ("on_validation_start", 12),
    ("on_validation_batch_end", 10),
    ("on_validation_end", 12),
    ("on_train_epoch_end", 12),
    ("on_train_epoch_start", 12),
    ("on_train_end", 36),
]


@pytest.fixture(scope="module", params=SETTINGS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[int, Step], str]:
    settings = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp("reference")
    _, module = fit(folder, **settings)
    return settings, committed(folder / "account"), hash_of(module)


@pytest.mark.parametrize(("hook", "step"), HOOKS)
def test_a_second_process_goes_on_to_the_same_end(
    hook: str, step: int, reference: Any, tmp_path: Path
) -> None:
    settings, expected, weights = reference
    with suppress(Fault):  # not every hook comes at this step
        fit(tmp_path, FailAt(hook, step), **settings)
    trainer, module = fit(tmp_path, **settings)
    found = committed(tmp_path / "account")
    assert [each.ids for each in found.values()] == [each.ids for each in expected.values()]
    assert hash_of(module) == weights
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


class SkipsSome(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class EndsEpochsEarly(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 else None


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (WaitsForAMetric, {}),
        (StepsByItself, {}),
        (KnowsItsSteps, {}),
        (SkipsSome, {}),
        (EndsEpochsEarly, {}),
        (Net, {"max_steps": 31, "max_epochs": -1}),
        (Net, {"reload_dataloaders_every_n_epochs": 1}),
        (Net, {"check_val_every_n_epoch": None, "val_check_interval": 5}),
        (Net, {"num_sanity_val_steps": 2}),
        (Net, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 5}),
        (Net, {"loader": lambda: make_loader(Numbered(50), drop_last=True)}),
        (Net, {"loader": lambda: make_loader(Numbered(50)), "accumulate_grad_batches": 3}),
    ],
)
def test_modules_and_trainers_of_every_kind(module: Any, arguments: Any, tmp_path: Path) -> None:
    trainer, whole = fit(tmp_path / "whole", module=module(), **arguments)
    expected = committed(tmp_path / "whole" / "account")
    for hook, step in (("on_after_backward", 7), ("on_train_epoch_end", 12)):
        with suppress(Fault):
            fit(tmp_path / hook, FailAt(hook, step), module=module(), **arguments)
        again, resumed = fit(tmp_path / hook, module=module(), **arguments)
        found = committed(tmp_path / hook / "account")
        assert [each.ids for each in found.values()] == [each.ids for each in expected.values()]
        assert hash_of(resumed) == hash_of(whole)
        assert (again.global_step, again.current_epoch) == (
            trainer.global_step,
            trainer.current_epoch,
        )
