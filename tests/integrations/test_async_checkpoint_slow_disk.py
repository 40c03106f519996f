"""A disk that stands still: the writer process is stopped, and goes on when the test says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Between, books, fit, listing, whole_checkpoints, writer_pid

from lightning_dist import AsyncCheckpoint


class Disk:
    """Stops and goes on between the steps of a fit, and remembers what a reader would find."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.folder = folder
        self.callback = AsyncCheckpoint(
            folder, "{step}", every_n_train_steps=1, writer="process", **arguments
        )
        self.seen: dict[str, list[str]] = {}

    def stop(self) -> None:
        self.callback.wait()
        os.kill(writer_pid(self.callback), signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(writer_pid(self.callback), signal.SIGCONT)

    def look(self, name: str) -> None:
        self.seen[name] = whole_checkpoints(self.folder)

    def then(self, *actions: Any) -> Callable[[], None]:
        def run() -> None:
            for action in actions:
                self.look(action) if isinstance(action, str) else action()

        return run

    def fit(self, actions: dict[int, Callable[[], None]]) -> None:
        fit(self.callback, Between(actions), max_epochs=2)


def test_the_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.fit(
        {
            1: disk.then(disk.stop, "before"),
            2: disk.then("while 2 is written", disk.go_on),
            3: disk.then(disk.callback.wait, "after"),
        }
    )
    assert disk.seen == {
        "before": ["step=1.ckpt"],
        "while 2 is written": ["step=1.ckpt"],
        "after": ["step=3.ckpt"],
    }
    assert listing(tmp_path) == ["step=6.ckpt"]


def test_two_in_flight_and_everything_old_is_there_until_then(tmp_path: Path) -> None:
    disk = Disk(tmp_path, max_in_flight=2, save_last=True)
    disk.fit(
        {
            1: disk.then(disk.stop, "before"),
            2: disk.then("one in flight"),
            3: disk.then("two in flight", disk.go_on),
            4: disk.then(disk.callback.wait, "after"),
        }
    )
    first = ["last.ckpt", "step=1.ckpt"]
    assert disk.seen == {
        "before": first,
        "one in flight": first,
        "two in flight": first,
        "after": ["last.ckpt", "step=4.ckpt"],
    }
    assert disk.callback.metrics.failed == 0


def test_a_busy_disk_is_skipped_and_said(tmp_path: Path) -> None:
    disk = Disk(tmp_path, on_busy="skip", save_top_k=-1, save_last=True)
    steps: list[int] = []

    def last_step() -> None:
        steps.append(torch.load(tmp_path / "last.ckpt")["global_step"])

    with pytest.warns(UserWarning, match="on_busy") as warned:
        disk.fit(
            {
                1: disk.stop,
                2: disk.then("one in flight"),  # 3 finds it there
                3: disk.then(last_step, disk.go_on, disk.callback.wait),
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
    disk.fit({1: disk.stop, 3: disk.go_on})
    assert listing(tmp_path) == [*(f"model-v{v}.ckpt" for v in range(1, 6)), "model.ckpt"]
