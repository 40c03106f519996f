"""A run that goes on from a checkpoint repeats the uninterrupted one, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Between, Net, fit, make_trainer, require_same

from lightning_dist import AsyncCheckpoint

SETTINGS: dict[str, Any] = {"monitor": "seen", "save_top_k": 2, "every_n_train_steps": 2}
"""In mid-epoch too. The least `seen` is that of step 6, of 8."""


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_it_repeats_the_uninterrupted_run(format: Any, tmp_path: Path) -> None:
    for optimizer, name in itertools.product(("adamw", "sgd"), ("best", "last", "path")):
        folder, steps = tmp_path / f"{optimizer} {name}", Between({})
        callback = AsyncCheckpoint(
            folder, "{step}", format=format, writer="thread", save_last=True, **SETTINGS
        )
        whole = make_trainer(callback, steps, max_steps=8, max_epochs=-1)
        model = Net(optimizer=optimizer)
        whole.fit(model)
        best = folder / "step=6.ckpt"
        assert callback.best_model_path == str(best)
        assert (folder / "last.ckpt").exists()
        if name == "last":  # as if the run had been killed before
            (folder / "last.ckpt").rename(tmp_path / f"{optimizer} {format} last.ckpt")
        again = Between({})
        path = best if name == "path" else name
        # `best` is known to the callback that made it, as with ModelCheckpoint.
        other = callback if name == "best" else AsyncCheckpoint(folder, "{step}", format=format)
        resumed = make_trainer(other, again, max_steps=8, max_epochs=-1)
        found = Net(optimizer=optimizer)
        resumed.fit(found, ckpt_path=path)
        assert str(resumed.ckpt_path) == str(best)
        assert list(again.digests) == [7, 8]
        assert again.digests.items() <= steps.digests.items()
        require_same(dict(found.state_dict()), dict(model.state_dict()))
        require_same(
            resumed.optimizers[0].state_dict()["state"], whole.optimizers[0].state_dict()["state"]
        )


def test_a_wrong_step_would_not(tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    steps, again = Between({}), Between({})
    fit(AsyncCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1), steps)
    state = torch.load(tmp_path / "step=5.ckpt")
    state["optimizer_states"] = torch.load(tmp_path / "step=4.ckpt")["optimizer_states"]
    torch.save(state, tmp_path / "mixed.ckpt")
    fit(AsyncCheckpoint(tmp_path / "again"), again, ckpt_path=tmp_path / "mixed.ckpt")
    assert again.digests[6] != steps.digests[6]
