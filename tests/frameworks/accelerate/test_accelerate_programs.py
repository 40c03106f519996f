"""Whole programs on two CPU processes: the examples, and the checks of ``accelerate test``."""

import json
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import accelerate.test_utils.scripts
import pytest
from processes import ROOT, SUPPORT, Finished, port, run, torchrun
from wandb_runs import history

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("WANDB_MODE", "offline")


def logged(folder: Path) -> list[dict[str, list[str]]]:
    """JSON of values by name, of each offline run of wandb, the oldest first."""
    return [history(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, quick_python: list[str]) -> Start:
    """What an example prints on two ranks, in the folder ``out``."""

    def run_example(name: str, epochs: int) -> str:
        words = ["--epochs", str(epochs), "--folder", tmp_path / "out"]
        done = torchrun(EXAMPLES / name, *words, ranks=2, limit=120, python=quick_python)
        return done.require_success().output

    return run_example


def test_the_example_trains_and_goes_on(tmp_path: Path, start: Start) -> None:
    first, second = (start("accelerate_train.py", 2) for _ in range(2))
    losses = [float(x) for x in re.findall(r"mean squared error ([\d.]+)", first + second)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "going on from" not in first
    assert second.count("going on from") == 1
    assert "16 steps" in first, "2 epochs of 16 batches, by twos"
    assert re.search(r"(\d+\.\d) times less than DDP", first)
    assert (tmp_path / "out" / "state" / "lightning_dist_reducer_0.bin").exists()
    runs = logged(tmp_path / "out")
    assert [len(run["comm/wire_bytes"]) for run in runs] == [2, 2]
    errors = [float(value) for run in runs for value in run["mean_squared_error"]]
    assert errors == pytest.approx(losses, abs=1e-4)


def test_the_example_under_accelerate_launch(tmp_path: Path, quick_executable: str) -> None:
    """As its first lines say."""
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command = [
        *(quick_executable, "-m", "accelerate.commands.launch", *launch),
        *("--main_process_port", str(port()), EXAMPLES / "accelerate_train.py"),
        *("--epochs", "1", "--folder", tmp_path / "out"),
    ]
    done = run(command, limit=100).require_success()
    assert "8 steps" in done.output


def test_the_example_in_local_steps_goes_on(tmp_path: Path, start: Start) -> None:
    first, second = (start("accelerate_local_steps.py", 1) for _ in range(2))
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", first + second)]
    assert losses[-1] < losses[0]
    assert "sent in 2 exchanges" in first, "8 steps, by fours"
    assert "going on from step 8" in second
    assert ["comm/total_wire_bytes" in run for run in logged(tmp_path / "out")] == [True, True]


def test_the_example_of_all_engines_goes_on_at_its_second_start(
    tmp_path: Path, start: Start
) -> None:
    """In one loop."""
    first, second = (start("accelerate_engines.py", epochs) for epochs in (1, 2))
    folder = tmp_path / "out"
    assert "elastic: world 2, fresh start; global batch 32" in first
    assert "elastic: world 2 -> 2, resumed at sample 512 (epoch 1, step 16)" in second
    assert "epoch 0: step 16" in first
    assert "epoch 0" not in second.replace("(epoch 0", "")
    assert "epoch 1: step 32" in second
    logs = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1, "both starts log to the same run"
    found = logged(folder)
    assert [json.loads(each["_step"][0]) for each in found] == [16, 32]
    for each in found:
        assert each.keys() >= {"loss", "elastic/world_size", "checkpoint/write_ms"}
    assert sorted(os.listdir(folder / "epochs"))[-2:] == ["epoch-0", "epoch-1"]
    assert (folder / "epochs" / "epoch-1" / "model.safetensors").exists()
    assert (folder / "epochs" / "epoch-1" / "lightning_dist_reducer_0.bin").exists()
    assert list((folder / "profile").glob("run-*/report.html"))
    assert len(list((folder / "elastic").glob("*.ckpt"))) == 2


def test_accelerates_own_checks_pass_under_the_plugin(quick_python: list[str]) -> None:
    script = SUPPORT / "scenarios" / "accelerates_script.py"
    done = torchrun(script, ranks=2, limit=110, python=quick_python).require_success()
    assert len(re.findall(r"steps of ours: [1-9]", done.output)) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", ["test_script.py", "test_sync.py"])
def test_accelerates_own_checks_pass_unchanged(script: str, quick_python: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    path = Path(accelerate.test_utils.scripts.__path__[0]) / script
    ours = [*quick_python, "-m", "lightning_dist.run", path]
    done = run([*quick_python, *launcher, *ours], limit=280).require_success()
    assert "set outside of the code" not in done.output
    assert "compressed DDP: codec int8" in done.output


def _sums(done: Finished) -> set[str]:
    found = re.findall(r"parameters add up to (\S+)", done.require_success().output)
    assert len(found) == 2
    return set(found)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_trainer_example_resumes_bit_for_bit(tmp_path: Path, quick_python: list[str]) -> None:
    example = EXAMPLES / "transformers_trainer.py"

    def train(folder: str, steps: int, *more: str) -> Finished:
        options = ["--codec", "topk:ratio=0.1", "--steps", str(steps)]
        options += ["--folder", tmp_path / folder, *more]
        return torchrun(example, *options, ranks=2, limit=80, python=quick_python)

    whole = train("whole", 10)
    assert "10 steps" in whole.output
    assert "comm/wire_bytes" in whole.output, "in what the Trainer logs"
    (run,) = logged(tmp_path / "whole")
    assert len(run["train/comm/wire_bytes"]) == 2, "every 5 steps"
    (expected,) = _sums(whole)
    _sums(train("parts", 5))
    saved = tmp_path / "parts" / "checkpoint-5" / "lightning_dist_reducer_0.bin"
    assert saved.exists()
    (resumed,) = _sums(train("parts", 10, "--resume"))
    assert resumed == expected
