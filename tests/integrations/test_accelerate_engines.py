"""The example that has all engines in one loop of Accelerate's, on two ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import port, run
from wandb_runs import history

import lightning_dist

pytestmark = pytest.mark.slow
EXAMPLE = Path(lightning_dist.__file__).parents[1] / "examples" / "accelerate_engines.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    for epochs in ("1", "2"):  # the second start goes on where the first has ended
        launcher = [*quick_python, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        options = ["--master-addr=127.0.0.1", f"--master-port={port()}", "--no-python"]
        words = [EXAMPLE, "--folder", folder, "--epochs", epochs]
        command = [*launcher, *options, *quick_python, *words]
        done = run(
            command, limit=120, ACCELERATE_USE_CPU="true", WANDB_MODE="offline"
        ).require_success()
        (folder / f"output-{epochs}.txt").write_text(done.output)
    return folder


def test_the_second_start_goes_on(folder: Path) -> None:
    first, second = ((folder / f"output-{n}.txt").read_text() for n in "12")
    assert "elastic: world 2, fresh start; global batch 32" in first
    assert "elastic: world 2 -> 2, resumed at sample 512 (epoch 1, step 16)" in second
    assert "epoch 0: step 16" in first
    assert "epoch 0" not in second.replace("(epoch 0", "")
    assert "epoch 1: step 32" in second


def test_both_starts_log_to_the_same_run(folder: Path) -> None:
    logs = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1
    found = [history(log) for log in logs]
    assert [json.loads(each["_step"][0]) for each in found] == [16, 32]
    assert all(
        each.keys() >= {"loss", "elastic/world_size", "checkpoint/write_ms"} for each in found
    )


def test_every_engine_has_left_what_it_leaves(folder: Path) -> None:
    assert sorted(os.listdir(folder / "epochs"))[-2:] == ["epoch-0", "epoch-1"]
    assert (folder / "epochs" / "epoch-1" / "model.safetensors").exists()
    assert (folder / "epochs" / "epoch-1" / "lightning_dist_reducer_0.bin").exists()
    assert list((folder / "profile").glob("run-*/report.html"))
    assert len(list((folder / "elastic").glob("*.ckpt"))) == 2
