"""A checkpoint callback through fits, interrupts, loggers, and other ways to save and load."""

import csv
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import (
    Between,
    Faults,
    Net,
    books,
    digest,
    fit,
    flip,
    listing,
    make_trainer,
    require_same,
    whole_checkpoints,
    writer_pid,
)
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from processes import run

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError


class Listener(CSVLogger):
    """Notes, whenever it is told of a checkpoint, which ones can be loaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="log")
        self.told: list[tuple[str, int]] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = checkpoint_callback.last_committed.target
        self.told.append((Path(path).name, torch.load(path)["global_step"]))

    def rows(self) -> list[dict[str, float]]:
        with open(self.experiment.metrics_file_path, newline="") as file:
            rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
        return [{k: float(v) for k, v in row.items()} for row in rows if "checkpoint/bytes" in row]


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_loggers_hear_of_files_that_are_there(writer: Any, tmp_path: Path) -> None:
    logger = Listener(tmp_path)
    callback = AsyncCheckpoint(filename="{step}", every_n_train_steps=2, writer=writer)
    fit(callback, Between({3: callback.wait, 5: callback.wait}), logger=logger)
    assert callback.dirpath == str(tmp_path / "log" / "version_0" / "checkpoints")
    assert logger.told == [(f"step={step}.ckpt", step) for step in (2, 4, 6)]
    rows = logger.rows()
    assert len(rows) == 3
    size = Path(callback.best_model_path).stat().st_size
    times = "blocking_ms queue_ms optimizer_wait_ms write_ms"
    expected = {f"checkpoint/{n}" for n in f"{times} bytes in_flight skipped failed".split()}
    for row in rows:
        assert {name for name in row if name.startswith("checkpoint/")} == expected
        assert abs(row["checkpoint/bytes"] - size) < 1000
        assert row["checkpoint/blocking_ms"] > 0
        assert row["checkpoint/write_ms"] > 0


def test_a_line_for_every_checkpoint_and_the_last_is_a_file_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = AsyncCheckpoint(tmp_path, save_last=True)
    with caplog.at_level("INFO"):
        fit(callback, max_epochs=1)
    (line,) = [text for text in caplog.messages if "Checkpoint epoch" in text]
    assert line.startswith("[lightning_dist] Checkpoint epoch=0-step=3.ckpt of step 3 is ")
    assert " kB in " in line
    assert "training was blocked for" in line
    assert callback._last_checkpoint_saved == callback.last_model_path == f"{tmp_path}/last.ckpt"


def test_one_callback_for_two_fits(tmp_path: Path) -> None:
    callback, steps = AsyncCheckpoint(tmp_path, every_n_train_steps=2), Between({})
    model, trainer = Net(), make_trainer(callback, steps)
    trainer.fit(model)
    first = callback.last_committed
    assert callback.metrics.saves == 3
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model)
    assert callback.last_committed is not None
    assert first is not None
    assert (first.origin.step, callback.last_committed.origin.step) == (6, 12)
    assert listing(tmp_path) == ["epoch=3-step=12.ckpt"]
    other = fit(callback, model=Net(), ckpt_path="last", max_epochs=5)
    assert other.global_step == 15
    source = "epoch=3-step=12.ckpt"  # which ModelCheckpoint never removes
    assert listing(tmp_path) == [source, "epoch=4-step=14.ckpt"]


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_two_callbacks_share_a_folder(writer: Any, tmp_path: Path) -> None:
    often = AsyncCheckpoint(tmp_path, "often-{step}", every_n_train_steps=2, writer=writer)
    best = AsyncCheckpoint(tmp_path, "best-{step}", "score", save_top_k=2, writer=writer)
    fit(often, best, max_epochs=3)
    best_two = ["best-step=3.ckpt", "best-step=6.ckpt"]
    assert whole_checkpoints(tmp_path) == [*best_two, "often-step=8.ckpt"]
    last = fit(often, best, ckpt_path="last", max_epochs=4)
    assert last.global_step == 12
    assert Path(last.ckpt_path).name == "often-step=8.ckpt"


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_save_by_hand_is_there_when_it_returns(writer: Any, tmp_path: Path) -> None:
    """In the folder that the callback writes to, while it does, and after the fit."""
    callback = AsyncCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, writer=writer)
    steps: dict[str, int] = {}
    trainer = make_trainer(callback)

    def by_hand(name: str) -> None:
        trainer.save_checkpoint(tmp_path / name)
        steps[name] = torch.load(tmp_path / name)["global_step"]

    trainer.callbacks.insert(0, Between({2: lambda: by_hand("hand.ckpt")}))
    model = Net()
    trainer.fit(model)
    by_hand("after.ckpt")
    assert steps == {"hand.ckpt": 2, "after.ckpt": 6}
    loaded = torch.load(tmp_path / "after.ckpt", weights_only=True)
    require_same(loaded["state_dict"], model.state_dict())
    assert len(whole_checkpoints(tmp_path)) == 8
    elsewhere = tmp_path / "elsewhere"
    trainer.save_checkpoint(elsewhere / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(elsewhere / "weights.ckpt")
    assert os.listdir(elsewhere) == ["weights.ckpt"]  # others may save there too: no lock


@pytest.mark.parametrize("format", ["single", "sharded"])
@pytest.mark.parametrize("ckpt_path", ["best", "last", "path"])
def test_evaluation_of_a_checkpoint(format: Any, ckpt_path: str, tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, monitor="score", format=format, writer="thread")
    trainer, model = make_trainer(callback, max_epochs=3), Net()
    trainer.fit(model)
    trained = digest(model)
    (name,) = listing(tmp_path)
    assert (tmp_path / name).is_dir() == (format == "sharded")
    given = {"path": str(tmp_path / name)}.get(ckpt_path, ckpt_path)
    trainer.test(model, ckpt_path=given, verbose=False)
    assert trainer.ckpt_path == str(tmp_path / name)
    assert digest(model) != trained
    assert listing(tmp_path) == [name]


class Stops(Net):
    """Meets a reason to stop in its sixth step."""

    def __init__(self, reason: Callable[[], Any]) -> None:
        super().__init__()
        self.reason = reason

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.reason()


def fail(error: type[BaseException]) -> None:
    raise error


@pytest.mark.parametrize("save_on_exception", [False, True])
@pytest.mark.parametrize(
    ("reason", "error", "steps"),
    [
        (lambda: fail(ArithmeticError), ArithmeticError, 5),
        (lambda: fail(KeyboardInterrupt), SystemExit, 5),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), SIGTERMException, 6),
    ],
    ids=["exception", "keyboard", "sigterm"],
)
def test_training_stops_when_all_is_written(
    reason: Callable[[], None],
    error: type[BaseException],
    steps: int,
    save_on_exception: bool,
    tmp_path: Path,
) -> None:
    settings = {"every_n_train_steps": 4, "save_on_exception": save_on_exception}
    callback = AsyncCheckpoint(tmp_path, "{step}", save_last=True, **settings)
    model = Stops(reason)
    with pytest.raises(error):
        fit(callback, model=model, max_epochs=3)
    assert callback._session is None
    if not save_on_exception:
        assert whole_checkpoints(tmp_path) == ["last.ckpt", "step=4.ckpt"]
        return
    assert whole_checkpoints(tmp_path) == ["last.ckpt", "step=4.ckpt", f"step={steps}.ckpt"]
    saved = torch.load(tmp_path / "last.ckpt")
    assert saved["global_step"] == steps
    require_same(dict(saved["state_dict"]), dict(model.state_dict()))


@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_fast_dev_run_writes_nothing(save_last: Any, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    callback = AsyncCheckpoint(folder, every_n_train_steps=1, save_last=save_last)
    fit(callback, fast_dev_run=True)
    assert not folder.exists()
    assert books(callback)["best_model_path"] == ""


def test_a_tuner_saves_and_restores_around_itself(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path / "here")
    finder = LearningRateFinder(num_training_steps=3, attr_name="rate")
    model = Net()
    model.rate = 0.1
    fit(finder, callback, model=model, default_root_dir=tmp_path)
    assert len(listing(tmp_path / "here")) == 1
    assert os.listdir(tmp_path) == ["here"]


FIRST_SAVE = """
import sys
from pathlib import Path
from checkpoint_runs import Net, fit
from lightning_dist import AsyncCheckpoint
from lightning_dist.frameworks.lightning.checkpoint.checkpoint_session import CheckpointSession
save, new = CheckpointSession.save, []
def note(self, *args, **kwargs):
    before = set(sys.modules)
    save(self, *args, **kwargs)
    new.append(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
CheckpointSession.save = note
fit(AsyncCheckpoint(sys.argv[1], "{step}", every_n_train_steps=1), max_epochs=1)
print("imported:", new[0])
"""


def test_the_first_save_imports_no_package_anew(tmp_path: Path, torch_python: list[str]) -> None:
    """Which took Lightning most of the time of the first save of a small model."""
    finished = run([*torch_python, "-c", FIRST_SAVE, tmp_path], limit=100)
    assert "imported: []" in finished.require_success().output


def remembered(of: object, seen: set[int]) -> dict[str, int]:
    """Entries of every list, set and dict of ours that can be reached from an object."""
    found: dict[str, int] = {}
    for name, value in vars(of).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | set | dict):
            found[f"{type(of).__name__}.{name}"] = len(value)
        elif type(value).__module__.startswith("lightning_dist.") and hasattr(value, "__dict__"):
            found |= remembered(value, seen)
    return found


def test_what_is_remembered_of_saves_does_not_grow_with_their_number(tmp_path: Path) -> None:
    counts: list[dict[str, int]] = []
    callback = AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last=True)

    def note() -> None:
        callback.wait()
        assert callback._session is not None
        counts.append(remembered(callback._session, {id(callback)}))

    fit(callback, Between({4: note, 29: note}), max_epochs=10)
    few, many = counts
    assert len(few) > 8
    # A save that is just being reported may be in one of the counts; 25 more are between them.
    assert {name: (few[name], n) for name, n in many.items() if n > few[name] + 2} == {}


@pytest.mark.parametrize("enforced", ["overlap", "blocking", "sync"])
def test_the_memory_limit_is_kept(enforced: Any, tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, snapshot=enforced, host_memory_limit=1000)
    with pytest.raises(ValueError, match="host_memory_limit=1000 bytes is less than the "):
        fit(callback)
    assert listing(tmp_path) == []


def test_a_pickled_callback_is_the_same(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, monitor="score", save_last=True)
    assert vars(pickle.loads(pickle.dumps(callback))) == vars(callback)


def test_outside_of_a_fit_it_saves_at_once_as_a_model_checkpoint(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, "{step}", save_last=True, monitor=None)
    trainer = make_trainer(callback)
    trainer.strategy.connect(Net())
    callback._save_topk_checkpoint(trainer, {"step": torch.tensor(0), "epoch": torch.tensor(0)})
    callback._save_last_checkpoint(trainer, {})
    assert whole_checkpoints(tmp_path) == ["last.ckpt", "step=0.ckpt"]


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
