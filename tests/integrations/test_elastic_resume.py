"""One process that fails in any hook of any step, and a second that goes on to the same weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import FailAt, Fault, Step, committed, fit, hash_of

SETTINGS: dict[str, dict[str, Any]] = {
    "validation after each epoch": {},
    "no validation": {"validate": False},
    "validation within epochs": {"val_check_interval": 5},
    "accumulation": {"accumulate_grad_batches": 2},
    "limited epochs": {"limit_train_batches": 7},
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
