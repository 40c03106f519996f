"""AsyncTorchCheckpointIO under ModelCheckpoint and Fabric; models with a say in what they load."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Between,
    Faults,
    Net,
    digest,
    fit,
    flip,
    listing,
    require_same,
    whole_checkpoints,
    writer_pid,
)
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.disk.errors import CheckpointError, CorruptCheckpointError

SETTINGS: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 2},
    "best two and the last": {"monitor": "score", "save_top_k": 2, "save_last": True},
    "a link": {"save_last": "link"},
    "weights": {"save_weights_only": True, "save_top_k": -1},
}


@pytest.mark.parametrize("snapshot", ["blocking", "sync"])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_leaves_what_lightnings_own_leaves(name: str, snapshot: Any, tmp_path: Path) -> None:
    io = AsyncTorchCheckpointIO(snapshot=snapshot, writer="thread")
    for folder, plugins in (("stock", []), ("ours", [io])):
        fit(ModelCheckpoint(tmp_path / folder, **SETTINGS[name]), plugins=plugins, max_epochs=4)
    assert listing(tmp_path / "ours") == listing(tmp_path / "stock")
    for file in listing(tmp_path / "ours"):
        found, expected = (
            torch.load(tmp_path / folder / file, weights_only=True) for folder in ("ours", "stock")
        )
        for state in (found, expected):
            state.pop("callbacks", None)  # paths
        require_same(found, expected, file)


def test_the_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path) -> None:
    """Lightning's own removes it before the new one is there."""
    io, seen = AsyncTorchCheckpointIO(), {}
    faults = Faults(io, tmp_path)
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)

    def look_and_go_on() -> None:
        seen[2] = whole_checkpoints(tmp_path)
        faults.let_writer_go_on()
        io.wait()
        seen[3] = whole_checkpoints(tmp_path)

    fit(callback, Between({1: faults.stop_writer, 2: look_and_go_on}), plugins=[io])
    assert seen == {2: ["step=1.ckpt"], 3: ["step=2.ckpt"]}
    assert listing(tmp_path) == ["step=6.ckpt"]
    assert io.last_committed is None  # torn down


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_errors_come_out_of_the_next_save(on_error: Any, tmp_path: Path) -> None:
    io = AsyncTorchCheckpointIO(on_error=on_error)
    faults = Faults(io, tmp_path)
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    steps = Between({1: faults.short_of_space, 2: faults.space_again})
    text = f"{tmp_path}/step=2.ckpt of step 2 was not written: OSError: .Errno 27. File too large"
    if on_error == "raise":
        with pytest.raises(CheckpointError, match=text):
            fit(callback, steps, plugins=[io])
        assert list(steps.digests) == [1, 2, 3]
        assert whole_checkpoints(tmp_path) == ["step=1.ckpt"]
        return
    with pytest.warns(UserWarning, match=text) as warned:
        fit(callback, steps, plugins=[io])
    failed = [w for w in warned if "was not written" in str(w.message)]
    assert len(failed) == 1
    assert whole_checkpoints(tmp_path) == ["step=6.ckpt"]


def test_the_last_error_comes_out_of_the_fit(tmp_path: Path) -> None:
    io = AsyncTorchCheckpointIO(writer="process")
    faults = Faults(io, tmp_path)
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    steps = Between({3: faults.stop_writer, 4: lambda: os.kill(writer_pid(io), signal.SIGKILL)})
    with pytest.raises(CheckpointError, match=r"step=4.ckpt of step 4 was not written: the check"):
        fit(callback, steps, plugins=[io], max_steps=5)
    assert whole_checkpoints(tmp_path) == ["step=2.ckpt"]


def test_what_is_loaded_is_verified(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    fit(callback, plugins=[AsyncTorchCheckpointIO()])
    path, model = tmp_path / "step=6.ckpt", Net()
    trainer = fit(plugins=[AsyncTorchCheckpointIO()], ckpt_path=path, max_epochs=3, logger=False)
    assert trainer.global_step == 9
    flip(path)
    before = digest(model)
    with pytest.raises(CorruptCheckpointError, match=f"{path} is not a complete checkpoint"):
        fit(model=model, plugins=[AsyncTorchCheckpointIO()], ckpt_path=path)
    assert digest(model) == before
    fit(plugins=[AsyncTorchCheckpointIO(verify="never")], ckpt_path=path, max_epochs=3)


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    io = AsyncTorchCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    saved = []
    for step in range(1, 4):
        fabric.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save(tmp_path / f"{step}.ckpt", {"model": model, "step": step})
        saved.append({name: value.clone() for name, value in model.state_dict().items()})
    io.wait()
    assert whole_checkpoints(tmp_path) == ["1.ckpt", "2.ckpt", "3.ckpt"]
    assert io.last_committed is not None
    assert io.last_committed.target == str(tmp_path / "3.ckpt")
    assert (io.metrics.saves, io.metrics.failed) == (3, 0)
    for step, state in enumerate(saved, 1):
        rest = fabric.load(tmp_path / f"{step}.ckpt", {"model": model})
        assert rest == {"step": step}
        require_same(dict(model.state_dict()), state)
    io.teardown()
    io.teardown()
    assert (io.metrics.saves, io.metrics.in_flight) == (3, 0)
    assert io.metrics.write_ms > 0


def test_options_of_a_storage_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no meaning for AsyncTorch"):
        AsyncTorchCheckpointIO().save_checkpoint({}, tmp_path / "x", storage_options={"a": 1})


def test_one_name_saved_again_while_the_first_is_written(tmp_path: Path) -> None:
    io = AsyncTorchCheckpointIO(max_in_flight=2)
    for step in range(5):
        io.save_checkpoint({"global_step": step}, tmp_path / "x.ckpt")
    io.remove_checkpoint(tmp_path / "y.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"global_step": 4}
    io.teardown()
    assert listing(tmp_path) == ["x.ckpt"]


class Shrinks(Net):
    """Takes a bias of another name, as a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if "old" in state:
            state["net.0.bias"] = state.pop("old")


class Overrides(Net):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = {name.replace("old", "net.0.bias"): value for name, value in state_dict.items()}
        return super().load_state_dict(state, *args, **kwargs)


@pytest.mark.parametrize("kind", [Shrinks, Overrides])
def test_a_model_that_has_a_say_in_what_it_loads(kind: Any, tmp_path: Path) -> None:
    fit(AsyncCheckpoint(tmp_path, "{step}"), max_epochs=1)
    state = torch.load(tmp_path / "step=3.ckpt")
    state["state_dict"]["old"] = state["state_dict"].pop("net.0.bias")
    torch.save(state, tmp_path / "old.ckpt")
    trainer = fit(AsyncCheckpoint(tmp_path), model=kind(), ckpt_path=tmp_path / "old.ckpt")
    assert trainer.global_step == 6
    with pytest.raises(ValueError, match="is a checkpoint of another model"):
        fit(AsyncCheckpoint(tmp_path), ckpt_path=tmp_path / "old.ckpt")


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.LazyLinear(6)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)


def test_parameters_that_are_not_there_yet(tmp_path: Path) -> None:
    model = Lazy()
    model.net(torch.zeros(5, 4))
    fit(AsyncCheckpoint(tmp_path, "{step}"), model=model, max_epochs=1)
    trainer = fit(AsyncCheckpoint(tmp_path), model=Lazy(), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == 6
