"""Several callbacks or trainers in one folder, and a trainer that is killed while it writes."""

import os
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
    checkpointer_of,
    fit,
    listing,
    require_same,
    whole_checkpoints,
)
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from processes import environment_of, readable

from lightning_dist import AsyncCheckpoint
from lightning_dist.checkpoint.disk.format import CheckpointError, Origin
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.frameworks.lightning.checkpoint import async_checkpoint
from lightning_dist.frameworks.lightning.checkpoint.checkpoint_session import PendingTopK
from lightning_dist.ranks.agreement import Ranks
from lightning_dist.settings.run import CheckpointSettings

PAIRS: dict[str, list[dict[str, Any]]] = {
    "one name": [
        {"filename": "m", "every_n_train_steps": 2},
        {"filename": "m", "every_n_train_steps": 4, "save_top_k": -1},
    ],
    "steps": [
        {"filename": "{step}", "every_n_train_steps": 2},
        {"filename": "{step}", "every_n_train_steps": 4, "save_top_k": -1},
    ],
    "two that are called last": [
        {"filename": "a-{step}", "every_n_train_steps": 2, "save_last": True},
        {"filename": "b-{step}", "every_n_train_steps": 4, "save_last": True},
    ],
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_two_callbacks_leave_what_two_of_stock_leave(
    writer: Any, name: str, tmp_path: Path
) -> None:
    stock = [ModelCheckpoint(tmp_path / "stock", **each) for each in PAIRS[name]]
    settings: dict[str, Any] = {"writer": writer, "max_in_flight": 2}
    ours = [AsyncCheckpoint(tmp_path / "ours", **each, **settings) for each in PAIRS[name]]
    fit(*stock, max_epochs=4)
    fit(*ours, max_epochs=4)
    assert whole_checkpoints(tmp_path / "ours") == listing(tmp_path / "stock")
    for found, expected in zip(ours, stock, strict=True):
        require_same(books(found), books(expected))
    for file in listing(tmp_path / "stock"):
        steps = [torch.load(tmp_path / k / file)["global_step"] for k in ("ours", "stock")]
        assert steps[0] == steps[1]


class Scores(Net):
    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self.scores = scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", self.scores[self.global_step])
        return self.loss()


# Scores of the steps, the steps before and after which there is no space, settings, and the best.
DISPLACED: dict[str, tuple[list[float], tuple[int, int], dict[str, Any], list[int]]] = {
    "a later one is better": ([0, 1, 4, 3, 5, 0], (2, 3), {}, [5]),
    "none is written any more": ([0, 1, 2, 3], (2, 4), {}, [2]),
    "a later one displaces for good": ([1, 5, 9, 2, 0, 0], (2, 3), {"save_top_k": 2}, [2, 4]),
    "a later one is the last alone": ([5, 9, 2], (1, 2), {"save_last": True}, [1]),
}


@pytest.mark.parametrize("name", DISPLACED)
def test_what_a_failed_save_displaced_is_among_the_best_again(name: str, tmp_path: Path) -> None:
    """It stays when others are saved, of which some are better and some are not."""
    scores, (full, mended), settings, best = DISPLACED[name]
    settings = {"mode": "max", "every_n_train_steps": 1, "on_error": "warn", **settings}
    callback = AsyncCheckpoint(tmp_path, "{step}", "score", **settings)
    faults = Faults(callback, tmp_path)
    actions = {full: faults.short_of_space, mended: faults.space_again}
    told = rf"step={full + 1}\.ckpt of step {full + 1} was not written"
    with pytest.warns(UserWarning, match=told):
        fit(callback, Between(actions), model=Scores(scores), max_steps=len(scores), max_epochs=-1)
    names = [f"step={step}.ckpt" for step in best]
    last = ["last.ckpt"] if "save_last" in settings else []
    assert listing(tmp_path) == whole_checkpoints(tmp_path) == [*last, *names]
    assert not last or torch.load(tmp_path / "last.ckpt")["global_step"] == len(scores)
    state = books(callback)
    assert sorted(state["best_k_models"]) == [f"FOLDER/{name}" for name in names]
    for key, value, which in (("best", "best_model_score", max), ("kth_best", "kth_value", min)):
        step = which(best, key=lambda step: scores[step - 1])
        assert state[f"{key}_model_path"] == f"FOLDER/step={step}.ckpt"
        assert float(state[value]) == scores[step - 1]


def test_a_chain_of_failures_gives_the_first_one_back() -> None:
    score = {name: torch.tensor(float(value)) for value, name in enumerate("abc")}
    books = PendingTopK()
    books.note("b", before={"a": score["a"]}, after={"b": score["b"]})
    books.note("c", before={"b": score["b"]}, after={"c": score["c"]})
    assert books.fail("b") == {}
    assert books.fail("c") == {"a": score["a"]}
    books.note("a", before={"a": score["a"]}, after={"a": score["b"]})  # under its own name
    assert books.fail("a") == {"a": score["a"]}
    books.note("c", before={"b": score["b"]}, after={"c": score["c"]})
    books.succeed("c")
    assert books.fail("c") == {}


class _Polled:
    """A checkpointer that has bad news."""

    last_committed: Committed | None = None

    settings = CheckpointSettings()

    def __init__(self, *events: Failed) -> None:
        self.events = list(events)

    def poll(self) -> list[Failed]:
        events, self.events = self.events, []
        return events


def failed(step: int, *, dropped: bool = False) -> Failed:
    return Failed(f"/x/{step}.ckpt", Origin(f"{step:016}", step, 0), f"reason {step}", dropped)


def test_all_failures_are_said() -> None:
    polled: Any = _Polled(failed(1), failed(2, dropped=True), failed(3))
    saves = Saves(polled, ranks=Ranks(None), warn=warnings.warn)
    with (
        pytest.warns(UserWarning, match="of step 2 was not written") as warned,
        pytest.raises(CheckpointError) as error,
    ):
        saves.report_own()
    assert len(warned) == 1
    assert [line.partition(" was ")[0] for line in str(error.value).splitlines()] == [
        "The checkpoint /x/1.ckpt of step 1",
        "The checkpoint /x/3.ckpt of step 3",
    ]


def test_a_fit_raises_for_all_that_failed(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1, max_in_flight=2)
    faults = Faults(callback, tmp_path)

    class Late(L.Callback):
        """Nothing is heard of it between the steps."""

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                assert callback._session is not None
                callback._session.deliver = lambda: None
                callback._session.agree_on_failures = lambda: [{"busy": False}]
                faults.short_of_space()

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                callback.wait()
                del callback._session.agree_on_failures

    with pytest.raises(CheckpointError) as error:
        fit(Late(), callback, max_steps=3)
    assert "/step=2.ckpt of step 2 was not written" in str(error.value)
    assert books(callback)["best_model_path"] == "FOLDER/step=1.ckpt"


class Replaces(Net):
    """Has other optimizers from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.5)]


def test_replaced_optimizers_are_watched(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}
    callback = AsyncCheckpoint(tmp_path, "{step}", **settings)
    model, watched = Replaces(), []

    def note() -> None:
        optimizers = checkpointer_of(callback)._snapshots.optimizers
        watched.append(optimizers == model.trainer.optimizers)

    fit(callback, Between({2: note, 4: note}), model=model, max_epochs=2)
    assert watched == [True, True]
    # The save of step 2 is under way when the optimizer is replaced: nobody holds the new one back,
    # so it is whole or it was dropped.
    expected = [f"step={step}.ckpt" for step in (1, 3, 4, 5, 6)]
    assert [name for name in whole_checkpoints(tmp_path) if name != "step=2.ckpt"] == expected


class FailsInTest(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        raise ArithmeticError("of the user")


def test_an_error_outside_a_fit_saves_nothing(tmp_path: Path) -> None:
    callback = AsyncCheckpoint(tmp_path, "{step}", save_on_exception=True)
    trainer = fit(callback, max_epochs=1)
    trainer.fit_loop.epoch_loop._batches_that_stepped = 7
    callback._last_global_step_saved = -1
    with pytest.raises(ArithmeticError):
        trainer.test(FailsInTest(), verbose=False)
    assert listing(tmp_path) == ["step=3.ckpt"]


def test_a_failed_training_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_checkpoint, "_PATIENCE", 0.2)
    callback = AsyncCheckpoint(
        *(tmp_path, "{step}"), every_n_train_steps=1, save_on_exception=True, writer="process"
    )
    faults = Faults(callback, tmp_path)

    def fail() -> None:
        raise ArithmeticError("of the user")

    began = time.monotonic()
    actions = {1: faults.stop_writer, 2: fail}
    with (
        pytest.warns(UserWarning, match="continues without this process"),
        pytest.raises(ArithmeticError),
    ):
        fit(callback, Between(actions))
    assert time.monotonic() - began < 30
    faults.let_writer_go_on()


def test_settings_that_cannot_take_effect(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'never', 'resume'") as error:
        fit(AsyncCheckpoint(tmp_path), AsyncCheckpoint(tmp_path, monitor="seen", verify="never"))
    assert "each AsyncCheckpoint needs the same verify=" in str(error.value)
    averaging = WeightAveraging()
    with pytest.raises(ValueError, match="cannot take effect; set snapshot='auto'"):
        fit(averaging, AsyncCheckpoint(tmp_path, snapshot="overlap"))
    fit(WeightAveraging(), AsyncCheckpoint(tmp_path), max_epochs=1)
    assert len(whole_checkpoints(tmp_path)) == 1


LIMIT = 60.0
OWNER = Path(__file__).with_name("checkpoint_owner.py")


@dataclass
class Owner:
    """The other trainer, with a checkpoint of its first step."""

    process: subprocess.Popen[bytes]
    pid: int
    writer: int

    def dies(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.wait(LIMIT) == -signal.SIGKILL

    def disk_goes_on(self, number: int = signal.SIGCONT) -> None:
        with suppress(ProcessLookupError):  # the writer has ended by now
            os.kill(self.writer, number)


@contextmanager
def owner_of(python: list[str], folder: Path, format: str) -> Iterator[Owner]:
    process = subprocess.Popen(
        [*python, str(OWNER), str(folder), format],
        env=environment_of({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert readable(process.stdout.fileno(), LIMIT), "it did not come to its first checkpoint"
        pid, writer = map(int, process.stdout.readline().split())
        owner = Owner(process, pid, writer)
        stack.callback(owner.disk_goes_on, signal.SIGKILL)
        yield owner


@pytest.mark.parametrize("format", ["single", "sharded"])
def test_the_writer_finishes_for_a_dead_trainer(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_python: list[str]
) -> None:
    """And while that one lives, a second one is refused; the next one is not."""

    def callback() -> AsyncCheckpoint:
        return AsyncCheckpoint(tmp_path, "{step}", every_n_train_steps=1, format=format)

    with owner_of(quick_python, tmp_path, format) as owner:
        with pytest.raises(ValueError, match="Only one trainer may write") as error:
            fit(callback())
        assert str(error.value) == (
            f"No checkpoints can be written to {tmp_path}: Only one trainer may write to a "
            f"checkpoint folder, and {tmp_path} belongs to process {owner.pid} on "
            f"{socket.gethostname()}; wait for it, end it, or give this run another dirpath"
        )
        owner.dies()
        assert _names(tmp_path) == ["last.ckpt", "step=1.ckpt"]
        with monkeypatch.context() as patch:
            # The next trainer waits for the writer of the dead one: only then the disk goes on.
            pause = time.sleep
            patch.setattr(time, "sleep", lambda seconds: (owner.disk_goes_on(), pause(seconds)))
            steps = Between({})
            trainer = fit(callback(), steps, ckpt_path="last")
    assert list(steps.digests) == [3, 4, 5, 6]
    assert Path(str(trainer.ckpt_path)).name in ("last.ckpt", "step=2.ckpt")
    uninterrupted = Between({})
    fit(uninterrupted, enable_checkpointing=False)
    assert all(uninterrupted.digests[step] == value for step, value in steps.digests.items())
    assert "step=1.ckpt" not in _names(tmp_path)
    assert "step=6.ckpt" in _names(tmp_path)
    if format == "single":
        assert whole_checkpoints(tmp_path) == _names(tmp_path)
        assert torch.load(tmp_path / "last.ckpt")["global_step"] == 2


def _names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))
