"""What cannot be written or is not taken, damaged and foreign files: said once, nothing is lost."""

import errno
import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
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
    whole_checkpoints,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError
from lightning_dist.frameworks.lightning.checkpoint.trainer_saves import require_supported


def checkpoint(folder: Path, **arguments: Any) -> AsyncCheckpoint:
    arguments = {"every_n_train_steps": 1, "writer": "process", **arguments}
    return AsyncCheckpoint(folder, "{step}", **arguments)


def said(warned: pytest.WarningsRecorder) -> list[str]:
    texts = [str(each.message) for each in warned]
    return [text for text in texts if "was not written" in text]


def test_training_goes_on_and_the_books_are_right(tmp_path: Path) -> None:
    """Three faults in one run, each followed by a save that succeeds."""
    folder = tmp_path / "here"
    callback = checkpoint(folder, on_error="warn", save_last=True)
    faults = Faults(callback, folder)
    noted: dict[int, Any] = {}

    def note(step: int, *actions: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            callback.wait()
            noted[step] = (books(callback), listing(folder) if folder.is_dir() else None)
            for action in actions:
                action()

        return run

    actions = {
        1: faults.short_of_space,
        2: faults.space_again,  # 2 was not written
        3: note(3, faults.replace_folder),
        4: faults.put_folder_back,  # 4 was not written
        5: note(5, faults.stop_writer),
        6: faults.kill_writer,  # 6 was not written
        7: note(7),
        8: note(8),
    }
    with pytest.warns(UserWarning, match="was not written") as warned:
        fit(callback, Between(actions), max_epochs=3)
    size, replaced, killed = said(warned)
    assert size == (
        f"[lightning_dist] The checkpoint {folder}/step=2.ckpt of step 2 was not written: OSError: "
        f"[Errno {errno.EFBIG}] File too large; the last complete one is {folder}/step=1.ckpt of "
        "step 1"
    )
    assert "/step=4.ckpt of step 4 was not written: FileExistsError" in replaced
    assert replaced.endswith(f"the last complete one is {folder}/step=3.ckpt of step 3")
    assert "/step=6.ckpt of step 6 was not written: the checkpoint writer (process " in killed
    assert f"has ended with exit status -9; the last complete one is {folder}/step=5" in killed
    for step, (state, names) in noted.items():
        assert state["best_model_path"] == f"FOLDER/step={step}.ckpt"
        assert state["last_model_path"] == "FOLDER/last.ckpt"
        assert set(names) == {"last.ckpt", f"step={step}.ckpt"}, step
    assert (callback.metrics.failed, callback.metrics.saves) == (3, 9)
    assert whole_checkpoints(folder) == ["last.ckpt", "step=9.ckpt"]
    assert torch.load(folder / "last.ckpt")["global_step"] == 9


def test_the_first_checkpoint_fails_and_no_book_names_it(tmp_path: Path) -> None:
    callback = checkpoint(tmp_path, on_error="warn", save_last=True, monitor="seen", save_top_k=2)
    faults = Faults(callback, tmp_path)
    with pytest.warns(UserWarning, match="none of this run is complete yet") as warned:
        fit(callback, Between({0: faults.short_of_space}), max_steps=2)
    assert len(said(warned)) == 2
    assert listing(tmp_path) == []
    state = books(callback)
    assert state["best_k_models"] == {}
    assert (state["best_model_path"], state["last_model_path"]) == ("", "")
    assert state["best_model_score"] is None


@pytest.mark.parametrize("name", ["size", "folder", "writer"])
def test_the_next_step_raises_and_only_that(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder = tmp_path / "here"
    callback = checkpoint(folder, save_last=True)
    faults = Faults(callback, folder)
    # Step 2 is not written, and that is known when step 3 ends.
    actions: dict[int, Callable[[], None]] = {
        "size": {1: faults.short_of_space, 2: callback.wait},
        "folder": {1: faults.replace_folder, 2: faults.put_folder_back},
        "writer": {1: faults.stop_writer, 2: faults.kill_writer},
    }[name]
    steps = Between(actions)
    path = f"{folder}/step=2.ckpt of step 2 was not written: "
    with pytest.raises(CheckpointError, match=path) as error:
        fit(callback, steps, max_epochs=3)
    assert str(error.value).endswith(f"the last complete one is {folder}/step=1.ckpt of step 1")
    assert list(steps.digests) == [1, 2, 3]
    assert said(recwarn) == []
    assert whole_checkpoints(folder) == ["last.ckpt", "step=1.ckpt"]
    again = fit(callback, max_epochs=3, ckpt_path="last")
    assert again.global_step == 9
    assert listing(folder) == ["last.ckpt", "step=9.ckpt"]


def test_the_last_checkpoint_fails_and_fit_raises(tmp_path: Path) -> None:
    callback = checkpoint(tmp_path)
    faults = Faults(callback, tmp_path)
    with pytest.raises(CheckpointError, match=r"/step=2\.ckpt of step 2 was not written"):
        fit(callback, Between({1: faults.short_of_space}), max_steps=2)
    assert listing(tmp_path) == ["step=1.ckpt"]


class Unpicklable(L.Callback):
    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            args[1]["lock"] = threading.Lock()


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_state_that_cannot_be_pickled(on_error: Any, tmp_path: Path) -> None:
    """As with ModelCheckpoint: an error of the state, at once, from the step that saves it."""
    callback = checkpoint(tmp_path, on_error=on_error)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        fit(callback, Unpicklable())
    assert whole_checkpoints(tmp_path) == ["step=1.ckpt"]


class Disk(Faults):
    """Is stopped and goes on between the steps of a fit, and remembers what a reader would find."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        super().__init__(checkpoint(folder, **arguments), folder)
        self.seen: dict[str, list[str]] = {}

    def look(self, name: str) -> None:
        self.seen[name] = whole_checkpoints(self.folder)

    def then(self, *actions: Any) -> Callable[[], None]:
        def run() -> None:
            for action in actions:
                self.look(action) if isinstance(action, str) else action()

        return run

    def fit(self, actions: dict[int, Callable[[], None]]) -> None:
        fit(self.callback, Between(actions), max_epochs=2)


@pytest.mark.parametrize(
    ("settings", "names"), [({}, []), ({"max_in_flight": 2, "save_last": True}, ["last.ckpt"])]
)
def test_everything_old_is_there_until_the_new_one_is_durable(
    settings: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    disk = Disk(tmp_path, **settings)
    in_flight = settings.get("max_in_flight", 1)
    before = disk.then(disk.stop_writer, "before")
    under_way = {step: disk.then(f"{step} is written") for step in range(2, 2 + in_flight)}
    under_way[1 + in_flight] = disk.then(f"{1 + in_flight} is written", disk.let_writer_go_on)
    after = disk.then(disk.callback.wait, "after")
    disk.fit({1: before, **under_way, 2 + in_flight: after})
    seen = {each: [*names, "step=1.ckpt"] for each in disk.seen if each != "after"}
    assert len(seen) == 1 + in_flight
    assert disk.seen == {**seen, "after": [*names, f"step={2 + in_flight}.ckpt"]}
    assert listing(tmp_path) == [*names, "step=6.ckpt"]
    assert disk.callback.metrics.failed == 0


def test_a_busy_disk_is_skipped_and_said(tmp_path: Path) -> None:
    disk = Disk(tmp_path, on_busy="skip", save_top_k=-1, save_last=True)
    steps: list[int] = []

    def last_step() -> None:
        steps.append(torch.load(tmp_path / "last.ckpt")["global_step"])

    with pytest.warns(UserWarning, match="on_busy") as warned:
        disk.fit(
            {
                1: disk.stop_writer,
                2: disk.then("one in flight"),  # 3 finds it there
                3: disk.then(last_step, disk.let_writer_go_on, disk.callback.wait),
                4: disk.then(disk.callback.wait, last_step),
                5: disk.callback.wait,
            }
        )
    assert [str(w.message) for w in warned if "on_busy" in str(w.message)] == [
        "[lightning_dist] No checkpoint at step 3: an earlier one is still being written "
        "(on_busy='skip')"
    ]
    names = [f"step={step}.ckpt" for step in (1, 2, 4, 5, 6)]
    assert listing(tmp_path) == ["last.ckpt", *names]
    assert steps == [1, 4]
    assert disk.callback.metrics.skipped == 1
    assert books(disk.callback)["best_model_path"] == "FOLDER/step=6.ckpt"


def test_a_name_that_is_still_being_written_is_taken(tmp_path: Path) -> None:
    """The version counter of ModelCheckpoint looks for files; ours are not there yet."""
    disk = Disk(tmp_path, save_top_k=-1, max_in_flight=3, monitor="seen")
    disk.callback.filename = "model"
    disk.fit({1: disk.stop_writer, 3: disk.let_writer_go_on})
    assert listing(tmp_path) == [*(f"model-v{v}.ckpt" for v in range(1, 6)), "model.ckpt"]


def message(error: type[Exception], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(error) as caught:
        fit(*arguments, **keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"kind": AsyncTorchCheckpointIO, "snapshot": "overlap"},
            "snapshot must be 'blocking' or 'sync', for a CheckpointIO does not know the "
            "optimizers and cannot copy while training goes on (an AsyncCheckpoint can), got "
            "'overlap'",
        ),
        (
            {"kind": AsyncTorchCheckpointIO, "writer": "fork"},
            "writer must be 'auto', 'process' or 'thread', got 'fork'",
        ),
        ({"format": "zip"}, "format must be 'single' or 'sharded', got 'zip'"),
        (
            {"snapshot": "sync", "on_busy": "skip"},
            "snapshot='sync' waits for every save, so on_busy='skip' cannot take effect; leave one "
            "of them out",
        ),
    ],
)
def test_settings_out_of_range(arguments: dict[str, Any], text: str) -> None:
    kind = arguments.get("kind", AsyncCheckpoint)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the whole text is compared)
        kind(**{name: value for name, value in arguments.items() if name != "kind"})
    assert str(error.value) == text


def test_arguments_that_nobody_knows() -> None:
    told = r"Unknown setting 'save_top' in AsyncCheckpoint: did you mean 'save_top_k'\?"
    with pytest.raises(ValueError, match=told):
        AsyncCheckpoint(save_top=1)


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_strategies_that_divide_the_model(kind: Any) -> None:
    with pytest.raises(ValueError, match="keeps a part of the model on each rank") as error:
        require_supported(kind(), sharded=True)
    assert str(error.value) == (
        f"AsyncCheckpoint writes what every rank has in full, and {kind.__name__} keeps a part of "
        "the model on each rank and writes it in a format of its own; use ModelCheckpoint with it"
    )


@pytest.mark.parametrize("plugin", [AsyncTorchCheckpointIO, AsyncCheckpointIO])
def test_another_checkpoint_io(plugin: Any, tmp_path: Path) -> None:
    assert message(ValueError, AsyncCheckpoint(tmp_path), plugins=[plugin()]) == (
        f"AsyncCheckpoint writes its checkpoints itself, so {plugin.__name__} cannot take effect; "
        "leave that plugin out, or use ModelCheckpoint with it"
    )
    assert os.listdir(tmp_path) == []


def test_a_trainer_of_pytorch_lightning(tmp_path: Path) -> None:
    """The package need not be there: its trainer is known by the module of its class."""
    trainer = make_trainer()
    foreign = types.new_class("Trainer", (L.Trainer,))
    foreign.__module__ = "pytorch_lightning.trainer.trainer"
    trainer.__class__ = foreign
    with pytest.raises(ValueError, match="comes from 'pytorch_lightning'"):
        AsyncCheckpoint(tmp_path).setup(trainer, Net(), "fit")


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.nn.Linear(6, 5)
        self.more = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_a_checkpoint_of_another_model(format: Any, tmp_path: Path) -> None:
    fit(AsyncCheckpoint(tmp_path, "{step}", format=format), max_epochs=1)
    path, model = tmp_path / "step=3.ckpt", Other()
    before = digest(model)
    callback = AsyncCheckpoint(tmp_path, format=format)
    assert message(ValueError, callback, model=model, ckpt_path=path) == (
        f"{path} is a checkpoint of another model; parameters and buffers only in the model: "
        "more.bias, more.weight; of another shape: net.2.weight (4, 6) for (5, 6), net.2.bias (4,) "
        "for (5,). Give another folder, or the path of a checkpoint of this model, or set "
        "strict_loading=False on the module"
    )
    assert digest(model) == before
    assert listing(tmp_path) == ["step=3.ckpt"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def shard(path: Path) -> Path:
    return next(path.glob("shard-*"))


DAMAGE: dict[str, tuple[Any, Any]] = {
    "a bit": ("single", flip),
    "half a file": ("single", cut),
    "a bit of a shard": ("sharded", lambda path: flip(shard(path))),
    "half a shard": ("sharded", lambda path: cut(shard(path))),
    "no shard": ("sharded", lambda path: shard(path).unlink()),
    "no manifest": ("sharded", lambda path: (path / "manifest.json").unlink()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest two are damaged: the one before them is whole. By its path, damage is an error."""
    format, damage = DAMAGE[name]

    def callback() -> AsyncCheckpoint:
        settings: dict[str, Any] = {"save_top_k": -1, "format": format, "writer": "thread"}
        return AsyncCheckpoint(tmp_path, "{step}", **settings)

    fit(callback(), max_epochs=3)
    for step in (6, 9):
        damage(tmp_path / f"step={step}.ckpt")
    model = Net()
    before = digest(model)
    text = message(
        CorruptCheckpointError, callback(), model=model, ckpt_path=tmp_path / "step=9.ckpt"
    )
    assert text.startswith(f"{tmp_path}/step=9.ckpt is not a complete checkpoint: ")
    assert digest(model) == before
    trainer = fit(callback(), ckpt_path="last", max_epochs=3)
    assert trainer.ckpt_path == str(tmp_path / "step=3.ckpt")
    passed = [text for text in caplog.messages if "Skipping" in text]
    assert any("step=9.ckpt" in text for text in passed)
    assert any("step=6.ckpt" in text for text in passed)


def test_without_verification_a_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    settings: dict[str, Any] = {"writer": "thread", "verify": "never"}
    fit(AsyncCheckpoint(tmp_path, "{step}", **settings), max_epochs=1)
    flip(tmp_path / "step=3.ckpt")
    trainer = fit(AsyncCheckpoint(tmp_path, **settings), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == 6


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Also those that look like temporary files, and checkpoints of other runs."""
    names = ["notes.txt", ".hidden", "model.ckpt", ".step=3.ckpt.tmp", "step=1.ckpt.tmp-1", "sub"]
    for name in names[:-1]:
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    callback = AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    fit(callback, ckpt_path=None)
    fit(AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1), max_epochs=1)
    assert listing(tmp_path) == sorted([*names, "step=3.ckpt", "step=6.ckpt"])
    for name in names[:-1]:
        assert (tmp_path / name).read_text() == name


def test_last_in_a_folder_without_checkpoints(tmp_path: Path) -> None:
    """Lightning starts from the beginning, and warns: the first run of a script that resumes."""
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer = fit(AsyncCheckpoint(tmp_path / "none"), ckpt_path="last")
    assert trainer.global_step == 6
    assert len(whole_checkpoints(tmp_path / "none")) == 1
