"""Residuals in Lightning checkpoints: resume, other strategies, other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from replicas import (
    mean_of_all,
    of_all,
    require_compressed,
    require_equal,
    require_replicas,
    world_of,
)
from scenarios.fitting import AtStart, compressed, fit, make_trainer, plain, snapshot
from scenarios.models import Regression
from scenarios.world import Facts

KEY = "lightning_dist"
WEIGHTS = ["net.0.weight", "net.2.weight"]  # the bias is smaller than min_compress_numel


def ours() -> Any:
    """Biases stay uncompressed, weights travel in several buckets."""
    return compressed(min_compress_numel=100, bucket_cap_mb=0.001)


def model() -> Regression:
    return Regression(optimizer="adam")


def fit_and_save(path: Path, strategy: Any, *, epochs: int, **arguments: Any) -> Facts:
    """Saves ``path`` after every epoch, over the one before."""
    saver = ModelCheckpoint(
        path.parent, filename=path.stem, enable_version_counter=False, every_n_epochs=1
    )
    callbacks = [saver, *arguments.pop("callbacks", [])]
    given = {"max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": True}
    facts = fit(model(), strategy, **given, **arguments)
    dist.barrier()
    return facts


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.on_ranks(2)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    """8 steps in one go, and 4 + 4 with a checkpoint between, which has every rank's residuals in
    plain values; without them it would not."""
    path, end = tmp_path / "half.ckpt", tmp_path / "whole.ckpt"
    whole = fit_and_save(end, ours(), epochs=2)
    half = fit_and_save(path, ours(), epochs=1)
    state = loaded(path)[KEY]
    assert sorted(state) == ["residuals", "step", "strides", "version", "world_size"]
    assert (state["step"], state["world_size"]) == (4, 2)
    assert sorted(state["residuals"]) == WEIGHTS
    mine = {name: rows[dist.get_rank()] for name, rows in state["residuals"].items()}
    require_equal(mine, half["residuals"])
    assert all(residual.any() for residual in mine.values())
    assert not torch.equal(*state["residuals"][WEIGHTS[0]])

    resumed = fit_and_save(tmp_path / "resumed.ckpt", ours(), epochs=2, ckpt_path=path)
    assert resumed["digests"] == whole["digests"][4:]
    require_equal(resumed["parameters"], whole["parameters"])
    require_equal(resumed["residuals"], whole["residuals"])
    require_compressed(resumed, steps=4)
    first, second = (
        loaded(each)["optimizer_states"][0]["state"] for each in (end, tmp_path / "resumed.ckpt")
    )
    for index, moments in first.items():
        require_equal(second[index], moments)

    stripped = tmp_path / f"stripped.{dist.get_rank()}.ckpt"
    torch.save({name: value for name, value in loaded(path).items() if name != KEY}, stripped)
    without = fit_and_save(tmp_path / "other.ckpt", ours(), epochs=2, ckpt_path=stripped)
    require_replicas(without)
    assert without["digests"][-1] != whole["digests"][-1]


@pytest.mark.on_ranks(2)
def test_a_checkpoint_of_ours_loads_under_plain_ddp(tmp_path: Path) -> None:
    fit_and_save(tmp_path / "ours.ckpt", ours(), epochs=1)
    assert KEY in loaded(tmp_path / "ours.ckpt")
    found = fit_and_save(tmp_path / "ddp.ckpt", plain(), epochs=2, ckpt_path=tmp_path / "ours.ckpt")
    require_replicas(found)
    assert found["optimizer_steps"] == 8
    assert KEY not in loaded(tmp_path / "ddp.ckpt")


@pytest.mark.on_ranks(2)
def test_a_plain_checkpoint_loads_under_ours_without_residuals(tmp_path: Path) -> None:
    """Not even what the strategy still owed from a fit before it."""
    fit_and_save(tmp_path / "plain.ckpt", plain(), epochs=1)
    start = AtStart()
    trainer = make_trainer(ours(), max_epochs=2, callbacks=[start])
    trainer.fit(model())
    assert any(residual.any() for residual in snapshot(trainer)["residuals"].values())
    trainer.fit(model(), ckpt_path=tmp_path / "plain.ckpt")
    assert not any(residual.any() for residual in start.residuals.values())
    assert start.step == 0
    resumed = snapshot(trainer)
    assert sorted(resumed["residuals"]) == WEIGHTS
    require_compressed(resumed, steps=4)


@pytest.mark.on_ranks(2)
def test_weights_alone_have_no_residuals_and_a_save_after_the_fit_has(tmp_path: Path) -> None:
    trainer = make_trainer(ours(), max_epochs=1, limit_val_batches=1.0)
    trainer.fit(model())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    weights, after = (loaded(tmp_path / f"{name}.ckpt") for name in ("weights", "after"))
    assert KEY not in weights
    assert "state_dict" in weights
    rows = after[KEY]["residuals"]
    require_equal(
        {name: each[dist.get_rank()] for name, each in rows.items()}, snapshot(trainer)["residuals"]
    )
    (validated,) = trainer.validate(model(), ckpt_path=tmp_path / "after.ckpt", verbose=False)
    assert of_all(validated) == [validated] * 2
    assert validated["val_loss"] < 1


@pytest.mark.on_ranks(3)
def test_another_number_of_ranks_starts_from_the_mean_residual(tmp_path: Path) -> None:
    """What is owed to the model is the mean over ranks: 2 -> 3 and 2 -> 1 conserve it."""
    path = tmp_path / "half.ckpt"
    with world_of(2) as is_here:
        if is_here:
            fit_and_save(path, ours(), epochs=1)
    owed = {name: rows.mean(0) for name, rows in loaded(path)[KEY]["residuals"].items()}
    for size in (3, 1):
        with world_of(size) as is_here:
            if not is_here:
                continue
            start, end = AtStart(), tmp_path / f"{size}.ckpt"
            resumed = fit_and_save(end, ours(), epochs=2, callbacks=[start], ckpt_path=path)
            started = mean_of_all(start.residuals)
            assert started.keys() == owed.keys()
            for name, residual in owed.items():
                torch.testing.assert_close(started[name], residual, rtol=1e-6, atol=0.0)
            assert start.step == 4
            require_replicas(resumed)
            if size == 3:
                require_compressed(resumed, steps=4)
                assert loaded(end)[KEY]["world_size"] == 3


@pytest.mark.on_ranks(3)
def test_three_ranks_resume_bit_for_bit_too(tmp_path: Path) -> None:
    """Two rounds on the wire, and owners that carry the second rounding."""
    path = tmp_path / "half.ckpt"
    whole = fit_and_save(tmp_path / "whole.ckpt", ours(), epochs=2)
    fit_and_save(path, ours(), epochs=1)
    resumed = fit_and_save(tmp_path / "resumed.ckpt", ours(), epochs=2, ckpt_path=path)
    assert resumed["digests"] == whole["digests"][4:]
    require_equal(resumed["residuals"], whole["residuals"])
    require_compressed(resumed, steps=4)
