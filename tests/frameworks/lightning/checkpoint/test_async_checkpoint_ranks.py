"""AsyncCheckpoint on two ranks: resume, what one rank alone finds or cannot do, refusals; and what
three ranks and one make of its files."""

import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Between, digest, flip, writer_pid
from lightning.pytorch.callbacks import ModelCheckpoint
from replicas import mean_of_all, of_all, require_equal, world_of
from scenarios.fitting import AtStart, compressed, make_trainer, plain, residuals
from scenarios.models import WIDTH, Regression
from scenarios.world import Facts, rank
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.folder_owner import owner_of
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.scan import describe
from lightning_dist.checkpoint.reading import load
from lightning_dist.frameworks.lightning.checkpoint import resume

pytestmark = pytest.mark.on_ranks(2)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": plain,
    "int8": lambda: compressed(min_compress_numel=100, bucket_cap_mb=0.001),
}
FORMATS = ("single", "sharded")
STEPS, HALF = 6, 3  # of 4 batches an epoch: the half is in mid-epoch


class ByStep(Regression):
    """The data of a step depend on its number and the rank, so that any step can be the first."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_step + rank())
        x = torch.randn(8, WIDTH, generator=generator)
        return nn.functional.mse_loss(self(x), x.flip(1))


class Steps(Between):
    """And a digest of the module before the first step."""

    first = b""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.first = digest(module)


def fit(
    strategy: Any,
    *callbacks: L.Callback,
    model: L.LightningModule | None = None,
    ckpt_path: Any = None,
    steps: int = STEPS,
    actions: dict[int, Callable[[], None]] | None = None,
    **arguments: Any,
) -> Facts:
    """Fit; what every step left, and what is owed at the end."""
    observed = Steps(actions or {})
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[observed, *callbacks],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        **arguments,
    )
    trainer.fit(model or ByStep(), ckpt_path=ckpt_path)
    dist.barrier()
    owed = residuals(trainer.strategy) if hasattr(trainer.strategy, "_reducer") else {}
    found = {"first": observed.first, "digests": observed.digests, "residuals": owed}
    return found | {"from": str(trainer.ckpt_path)}


def error_of(*arguments: Any, **keywords: Any) -> str:
    """Type and text of what a fit raises."""
    dist.barrier()
    with pytest.raises(Exception) as raised:  # noqa: PT011 (the caller compares it)
        fit(plain(), *arguments, **keywords)
    dist.barrier()  # rank 0 has given the folder back
    return f"{raised.typename}: {raised.value}"


def checkpoint(where: Path, **arguments: Any) -> AsyncCheckpoint:
    arguments = {"every_n_train_steps": HALF, "save_top_k": -1, "writer": "process", **arguments}
    return AsyncCheckpoint(where, "{step}", **arguments)


def names(where: Path) -> list[str]:
    """What is in a folder; no lock of it is left, whichever rank ends last."""
    return sorted(os.listdir(where))


def shards_of(path: Path) -> list[int]:
    """Bytes of every rank's part."""
    return sorted(file.stat().st_size for file in path.glob("shard-*"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    name: str, form: str, tmp_path: Path
) -> None:
    """From the middle of an epoch; parameters, moments and residuals of every rank."""
    whole = fit(STRATEGIES[name](), checkpoint(tmp_path, format=form))
    path, again = tmp_path / "step=3.ckpt", checkpoint(tmp_path / "again", format=form)
    resumed = fit(STRATEGIES[name](), again, ckpt_path=path)
    assert list(whole["digests"]) == [1, 2, 3, 4, 5, 6]
    assert list(resumed["digests"]) == [4, 5, 6]
    assert resumed["digests"].items() <= whole["digests"].items()
    require_equal(resumed["residuals"], whole["residuals"])
    assert names(tmp_path) == ["again", "step=3.ckpt", "step=6.ckpt"]
    assert names(tmp_path / "again") == ["step=6.ckpt"]
    mine, other = of_all(whole["residuals"])
    assert any(not torch.equal(mine[each], other[each]) for each in mine) == (name == "int8")
    if (name, form) == ("ddp", "sharded"):
        small, large = shards_of(path)
        # But for what only rank 0 has: the pickle, buffers, loops.
        assert 0 <= large - small < 6000 < small


def test_the_last_checkpoint_is_found_on_all_ranks(tmp_path: Path) -> None:
    fit(STRATEGIES["int8"](), checkpoint(tmp_path, format="sharded", writer="thread"))
    found = fit(compressed(), checkpoint(tmp_path), ckpt_path="last", steps=STEPS + 2)
    assert found["from"] == str(tmp_path / "step=6.ckpt")
    assert list(found["digests"]) == [7, 8]


def limit_writer(callback: AsyncCheckpoint, nbytes: int, *, of: int) -> None:
    """The writer of a rank can write files of so many bytes."""
    callback.wait()
    dist.barrier()
    if rank() == of:
        limits = (nbytes, resource.RLIM_INFINITY)
        resource.prlimit(writer_pid(callback), resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize(("form", "breaks"), [("single", 0), ("sharded", 0), ("sharded", 1)])
def test_all_ranks_know_what_was_not_written(
    form: str, breaks: int, on_error: str, tmp_path: Path
) -> None:
    """The disk below a rank is full for a while.

    Step 2 is not written, and with "warn" 3 and 4 are, and the last one, 5, is not. With "raise" 2
    is the last one: between the steps rank 0 raises alone.
    """
    settings = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}
    callback = checkpoint(tmp_path, format=form, on_error=on_error, **settings)
    books: list[list[str]] = []

    def note() -> None:
        callback.wait()
        dist.barrier()
        found = (callback.best_model_path, callback.last_model_path)
        seen = [name for name in names(tmp_path) if name[0] != "."]
        books.append([*(Path(path).name for path in found), *seen])

    def failure(step: int, kept: int) -> str:
        reason = "rank 1 could not write: OSError" if breaks == 1 else "OSError"
        return (
            f"The checkpoint {tmp_path}/step={step}.ckpt of step {step} was not written: {reason}: "
            f"[Errno 27] File too large; the last complete one is {tmp_path}/step={kept}.ckpt of "
            f"step {kept}"
        )

    def full() -> None:
        limit_writer(callback, 2000, of=breaks)

    def mended() -> None:
        limit_writer(callback, resource.RLIM_INFINITY, of=breaks)

    reached: list[int] = []
    actions = {1: full, 2: mended, 3: note, 4: full}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_error == "warn":
            reached += fit(plain(), callback, actions=actions, steps=5)["digests"]
            note()
        else:
            with pytest.raises(CheckpointError) as raised:
                fit(plain(), callback, actions=actions, steps=2)
    said = [str(each.message) for each in caught if "was not written" in str(each.message)]
    if on_error == "warn":
        expected = [f"[lightning_dist] {failure(*steps)}" for steps in ((2, 1), (5, 4))]
        assert said == (expected if rank() == 0 else [])
        assert reached == [1, 2, 3, 4, 5]
        assert books == [
            [f"step={step}.ckpt", "last.ckpt", "last.ckpt", f"step={step}.ckpt"] for step in (3, 4)
        ]
    else:
        assert str(raised.value) == failure(2, 1)
        assert said == []
        dist.barrier()
        assert [each for each in names(tmp_path) if each[0] != "."] == ["last.ckpt", "step=1.ckpt"]


def test_the_displaced_best_is_back_on_all_ranks(tmp_path: Path) -> None:
    """A best save is not written: what it displaced is the best again."""
    best = {"every_n_train_steps": 1, "monitor": "step", "mode": "max", "save_top_k": 1}
    callback = checkpoint(tmp_path, on_error="warn", **best)
    actions = {2: lambda: limit_writer(callback, 2000, of=0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(plain(), callback, actions=actions, steps=3)
    assert [Path(path).name for path in callback.best_k_models] == ["step=2.ckpt"]
    assert Path(callback.best_model_path).name == "step=2.ckpt"


def flip_bit(path: Path) -> None:
    if rank() == 0:
        flip(path)
    dist.barrier()


def test_what_rank_0_finds_damaged_is_passed_over_or_raised_on_all_ranks(tmp_path: Path) -> None:
    fit(plain(), checkpoint(tmp_path))
    newest, oldest = tmp_path / "step=6.ckpt", tmp_path / "step=3.ckpt"
    flip_bit(newest)
    with patch.object(resume, "verify", wraps=resume.verify) as verify:
        told = error_of(checkpoint(tmp_path), ckpt_path=newest)
    assert told.startswith(f"CorruptCheckpointError: {newest} is not a complete checkpoint: ")
    assert verify.call_count == (1 if rank() == 0 else 0)
    assert error_of(checkpoint(tmp_path), ckpt_path=tmp_path / "none.ckpt") == (
        f"FileNotFoundError: There is no checkpoint at {tmp_path}/none.ckpt; lightning-dist ckpt "
        "ls DIR lists those of a folder"
    )
    found = fit(plain(), checkpoint(tmp_path / "."), ckpt_path="last", steps=5)
    assert found["from"] == str(oldest), "headers do not show the damage"
    flip_bit(oldest)
    told = error_of(checkpoint(tmp_path), ckpt_path="last")
    assert told.startswith("CheckpointError: ")
    assert str(oldest) in told
    assert str(newest) in told
    assert owner_of(str(tmp_path)) is None


def test_a_folder_that_one_rank_does_not_see(tmp_path: Path) -> None:
    own = tmp_path / str(rank())
    fit(plain(), checkpoint(tmp_path / "0"), steps=3)
    assert error_of(checkpoint(own), ckpt_path="last").startswith(
        f"ValueError: ckpt_path='last' found a checkpoint in {own} on some ranks, and none on "
        "others; put the folder where all ranks see it"
    )


def test_a_rank_that_cannot_open_the_folder(tmp_path: Path) -> None:
    usual = Checkpointer.open

    def open_(self: Checkpointer, path: str, **keywords: Any) -> None:
        if rank() == 1:
            raise OSError(28, "No space left on device")
        usual(self, path, **keywords)

    with patch.object(Checkpointer, "open", open_):
        told = error_of(checkpoint(tmp_path, format="sharded"))
    assert told == (
        f"ValueError: No checkpoints can be written to {tmp_path}: OSError: [Errno 28] No space "
        "left on device"
    )
    assert owner_of(str(tmp_path)) is None


def test_a_file_for_a_folder_and_another_model_are_refused_on_all_ranks(tmp_path: Path) -> None:
    """Before anything has changed."""
    path = tmp_path / "a file"
    path.write_text("a file")
    for form in FORMATS:
        assert error_of(checkpoint(path, format=form)) == (
            f"ValueError: No checkpoints can be written to {path}: FileExistsError: [Errno 17] "
            f"File exists: '{path}'"
        )
    saved = tmp_path / "saved" / "step=3.ckpt"
    fit(plain(), checkpoint(saved.parent, format="sharded", writer="thread"), steps=HALF)
    model = Regression(hidden=7)
    before = digest(model)
    assert error_of(checkpoint(tmp_path / "other"), model=model, ckpt_path=saved).startswith(
        f"ValueError: {saved} is a checkpoint of another model; parameters and buffers of another "
        "shape: net.0.weight (32, 16) for (7, 16)"
    )
    assert digest(model) == before


def test_the_checkpoint_io_under_stock_ddp(tmp_path: Path) -> None:
    """AsyncTorchCheckpointIO with DDPStrategy and ModelCheckpoint, as Lightning has them."""
    ends = []
    for name, plugins in {"ours": [AsyncTorchCheckpointIO], "stock": []}.items():
        where = tmp_path / name
        callback = ModelCheckpoint(where, "{step}", every_n_train_steps=HALF, save_top_k=1)
        fit(plain(), callback, plugins=[make() for make in plugins])
        assert names(where) == ["step=6.ckpt"]
        given = {"ckpt_path": where / "step=6.ckpt", "plugins": [make() for make in plugins]}
        ends.append(fit(plain(), steps=STEPS + 2, **given)["digests"])
    assert ends[0] == ends[1]
    assert list(ends[0]) == [7, 8]
    assert describe(str(tmp_path / "ours" / "step=6.ckpt")).origin.ranks == 2


def test_a_fit_gives_its_process_group_back(tmp_path: Path) -> None:
    """One sharded callback in two fits, each with a default process group of its own."""
    callback = checkpoint(tmp_path, format="sharded")
    assert len(distributed_c10d._world.pg_map) == 1
    fit(plain(), callback, steps=3)
    assert len(distributed_c10d._world.pg_map) == 1
    with world_of(2):
        fit(plain(), callback, steps=6, ckpt_path=tmp_path / "step=3.ckpt")
        assert len(distributed_c10d._world.pg_map) == 1
    assert names(tmp_path) == ["step=3.ckpt", "step=6.ckpt"]


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_other_numbers_of_ranks_go_on_from_either_format(name: str, tmp_path: Path) -> None:
    """Both hold the same."""
    found = []
    for form in FORMATS:
        path, first = tmp_path / form / "step=3.ckpt", set[bytes]()
        with world_of(2) as is_here:
            if is_here:
                saver = checkpoint(path.parent, format=form, writer="thread")
                fit(STRATEGIES[name](), saver, steps=HALF)
        assert describe(str(path)).origin.ranks == 2
        found.append(saved := load(str(path), weights_only=True))
        for size in (3, 1):
            with world_of(size) as is_here:
                if not is_here:
                    continue
                start = [AtStart()] if name == "int8" else []
                where = tmp_path / f"{form} {size}"
                going_on = checkpoint(where, format=form), *start
                after = fit(STRATEGIES[name](), *going_on, ckpt_path=path)
                first |= set(of_all(after["first"]))
                assert list(after["digests"]) == [4, 5, 6]
                assert of_all(after["digests"]) == [after["digests"]] * size
                for parameter, mean in mean_of_all(start[0].residuals).items() if start else ():
                    owed = saved["lightning_dist"]["residuals"][parameter].mean(0)
                    torch.testing.assert_close(mean, owed, rtol=1e-6, atol=0.0)
        assert len(first) == 1
        if (name, form) == ("ddp", "sharded"):
            smallest, *others, largest = shards_of(tmp_path / "sharded 3" / "step=6.ckpt")
            assert len(others) == 1
            assert 0 <= largest - smallest < 6000 < 2 * smallest
    single, sharded = found
    assert single.keys() == sharded.keys()
    require_equal(single["state_dict"], sharded["state_dict"])
    moments = (state["optimizer_states"][0]["state"].values() for state in found)
    for one, other in zip(*moments, strict=True):
        require_equal(one, other)
