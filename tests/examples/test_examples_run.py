"""Every example trains on two processes of a CPU."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, Finished, port, run, torchrun
from wandb_runs import history

EXAMPLES = ROOT / "examples"
LIMIT = 110.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT * 2 + 20)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def start(python: str, folder: Path, script: str, *arguments: str) -> Finished:
    """``python examples/script arguments`` in ``folder``."""
    words = shlex.join([python, str(EXAMPLES / script), *arguments])
    command = ["sh", "-c", f"cd {shlex.quote(str(folder))} && exec {words}"]
    return run(command, limit=LIMIT, MASTER_PORT=str(port())).require_success()


@pytest.mark.parametrize("steps", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_fabric_goes_on_from_its_checkpoint(
    tmp_path: Path, quick_executable: str, steps: int
) -> None:
    for said in (f"steps 0 to {steps}, ", f"steps {steps} to {2 * steps}, "):
        done = start(quick_executable, tmp_path, "fabric_train.py", "--steps", str(steps))
        assert said in done.output
        assert "3.9 times fewer bytes" in done.output
    runs = logged(tmp_path / "fabric_out")
    assert len(runs) == 2
    if steps == 10:  # it logs every 10 steps
        assert [run["trainer/global_step"] for run in runs] == [[10], [20]]
        assert all(3.5 < run["comm/compression_ratio"][0] < 4 for run in runs)
        assert all(0 < run["accuracy"][0] < 1 for run in runs)


def test_fabric_in_local_steps_goes_on_from_its_checkpoint(
    tmp_path: Path, quick_executable: str
) -> None:
    for said, exchanges in (("steps 0 to 6, ", 2), ("steps 6 to 12, ", 2)):
        done = start(quick_executable, tmp_path, "fabric_local_steps.py", "--steps", "6")
        assert said in done.output
        assert f"MB sent in {exchanges} exchanges" in done.output  # after 4 and 6; 8 and 12
    runs = logged(tmp_path / "fabric_local_out")
    assert [len(run["loss"]) for run in runs] == [6, 6]
    assert all(run.keys() >= {"outer/drift", "comm/total_wire_bytes"} for run in runs)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("loop_local_steps.py", 2),
        pytest.param("fsdp2_local_steps.py", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_loop_in_local_steps_goes_on_from_its_checkpoint(
    tmp_path: Path, quick_python: list[str], script: str, ranks: int
) -> None:
    options = {"ranks": ranks, "limit": LIMIT, "python": quick_python}
    for said, exchanges in (("steps 0 to 6, ", 2), ("steps 6 to 12, ", 2)):
        arguments = ["--folder", str(tmp_path), "--steps", "6"]
        done = torchrun(EXAMPLES / script, *arguments, **options).require_success()
        assert said in done.output
        assert f" in {exchanges} exchanges" in done.output  # after 4 and 6; 8 and 12
    runs = logged(tmp_path)
    assert [len(run["loss"]) for run in runs] == [6, 6]
    assert all(run.keys() >= {"outer/drift", "comm/total_wire_bytes"} for run in runs)


def test_plain_ddp_goes_on_from_its_checkpoint(tmp_path: Path, quick_python: list[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--steps", "5", "--codec", "int4"]
    options = {"ranks": 2, "limit": LIMIT, "python": quick_python}
    for said in ("steps 0 to 5, ", "steps 5 to 10, "):
        done = torchrun(EXAMPLES / "ddp_train.py", *arguments, **options)
        assert said in done.require_success().output
    assert (tmp_path / "last.pt").exists()
    first, second = logged(tmp_path)
    assert (first["_step"][0], second["_step"][0]) == (1, 6)
    assert all(7 < ratio < 8 for ratio in first["comm/compression_ratio"])
    assert len(first["loss"]) == 5
    assert 0 < second["accuracy"][0] < 1


def test_lightning_cli_reads_strategy_profiler_and_checkpoints(
    tmp_path: Path, quick_executable: str
) -> None:
    config = str(EXAMPLES / "lightning_cli" / "config.yaml")
    less = ["--trainer.limit_train_batches=12", "--trainer.limit_val_batches=1"]
    checkpoints = ["--trainer.callbacks.every_n_train_steps=6"]
    start(
        quick_executable,
        tmp_path,
        "lightning_cli/train.py",
        "fit",
        "--config",
        config,
        *less,
        *checkpoints,
    )
    assert list(tmp_path.glob("cli_out/checkpoints/*.ckpt"))
    assert (tmp_path / "cli_out/profile/run-0/report.html").exists()
    (names,) = logged(tmp_path / "cli_out")
    assert names.keys() >= {
        "comm/compression_ratio",
        "comm/exposed_fraction",
        "checkpoint/write_ms",
    }
    assert names.keys() >= {"val_accuracy", "val_perplexity"}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("strategy.codec=int4", "7.7 times fewer bytes"),
        pytest.param("strategy=ddp", "`Trainer.fit` stopped", marks=pytest.mark.exhaustive),
    ],
)
def test_hydra_builds_the_strategy(
    tmp_path: Path, argument: str, said: str, quick_python: list[str]
) -> None:
    pytest.importorskip("hydra", reason="the example needs hydra-core")
    script = EXAMPLES / "hydra" / "train.py"
    arguments = [argument, "steps=4", f"trainer.logger.save_dir={tmp_path}"]
    done = torchrun(script, *arguments, ranks=2, limit=LIMIT, python=quick_python)
    assert said in done.require_success().output
    (names,) = logged(tmp_path)
    assert ("comm/wire_bytes" in names) == (argument != "strategy=ddp")


def test_the_lightning_script(tmp_path: Path, quick_executable: str) -> None:
    done = start(quick_executable, tmp_path, "lightning_train.py", "--steps", "8")
    assert "`Trainer.fit` stopped" in done.output
    (names,) = logged(tmp_path)
    assert names.keys() >= {"train_loss", "val_perplexity", "val_accuracy", "comm/wire_bytes"}


@pytest.mark.exhaustive
def test_a_trainer_in_local_steps(tmp_path: Path, quick_executable: str) -> None:
    done = start(quick_executable, tmp_path, "lightning_local_steps.py", "--steps", "10")
    assert "MB sent in 3 exchanges" in done.output  # after 4, 8 and 10
    (names,) = logged(tmp_path)
    assert names.keys() >= {"train_loss", "val_perplexity", "outer/drift", "comm/wire_bytes"}


@pytest.mark.exhaustive
def test_a_sharded_model_in_two_replicas(tmp_path: Path, quick_executable: str) -> None:
    done = start(quick_executable, tmp_path, "fsdp2_train.py", "--steps", "4")
    assert re.search(r"perplexity \d.*, accuracy 0\.\d", done.output)
    assert "3.9 times fewer bytes between replicas" in done.output
    (names,) = logged(tmp_path)
    assert names.keys() >= {"train_loss", "val_perplexity", "val_accuracy", "comm/wire_bytes"}


@pytest.mark.exhaustive
def test_a_pipeline_in_two_replicas(quick_python: list[str]) -> None:
    script = EXAMPLES / "pipeline_train.py"
    done = torchrun(script, "--steps", "10", ranks=4, limit=LIMIT, python=quick_python)
    assert re.search(r"step 10: loss \d\.\d", done.require_success().output)
    assert "3.9 times fewer bytes between replicas" in done.output


def test_the_profiler_around_a_loop(tmp_path: Path, quick_python: list[str]) -> None:
    script, folder = EXAMPLES / "profile_ddp.py", str(tmp_path)
    arguments = ["int8", "--steps=8", "--folder", folder]
    done = torchrun(script, *arguments, ranks=2, limit=LIMIT, python=quick_python)
    assert "of the step is exposed communication" in done.require_success().output
    assert (tmp_path / "run-0" / "summary.json").exists()


def logged(folder: Path) -> list[dict[str, list[Any]]]:
    """Values by name, of each offline run of wandb, the oldest first."""
    found = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [{k: [*map(json.loads, v)] for k, v in history(path).items()} for path in found]
