"""Where Accelerate is configured, the script says by its imports which launcher it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launch_accelerate import configure, home, invoke, planned

__all__ = ["home"]  # a fixture, for every test here

TORCHRUN, ACCELERATE = "lightning_dist.elastic.agent", "accelerate.commands.launch"
LIGHTNING = [
    "import lightning as L",
    "from lightning.pytorch import Trainer",
    "import pytorch_lightning as pl",
    "from lightning.fabric import Fabric",
    "import transformers\nimport lightning as L",
    "def main():\n    import lightning_dist, lightning",
]
OF_ACCELERATE = [
    "from accelerate import Accelerator",
    "from lightning_dist.accelerate import CompressedDDPPlugin",
    "from lightning_dist import transformers",
    "from transformers import Trainer",
    "import accelerate.utils",
]
UNCLEAR = {
    "import torch": "imports neither accelerate nor lightning",
    "import accelerate, lightning": "imports accelerate and lightning",
    "import accelerator_of_mine, lightnings": "imports neither",
    "this is no Python": "imports neither",
}


@pytest.fixture
def configured(home: Path) -> Path:
    return configure(home / "default_config.yaml")


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("text", LIGHTNING)
def test_a_script_of_lightnings_is_for_torchrun(tmp_path: Path, text: str) -> None:
    _, module, arguments, note = planned(write(tmp_path, text), "--lr", "1")
    assert module == TORCHRUN
    assert arguments[-2:] == ["--lr", "1"]
    assert "train.py imports " in note
    assert "--config_file" in note


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("text", OF_ACCELERATE)
def test_a_script_of_accelerates_is_for_accelerate(tmp_path: Path, text: str) -> None:
    _, module, _, note = planned(write(tmp_path, text))
    assert module == ACCELERATE
    assert "--torchrun for the other" in note


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize(("text", "why"), UNCLEAR.items(), ids=list(UNCLEAR))
def test_a_script_that_does_not_say_it_is_asked_about(tmp_path: Path, text: str, why: str) -> None:
    result = invoke(write(tmp_path, text))
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert "select a launcher with --torchrun, or --config_file=" in result.stderr


def test_an_answer_is_taken(tmp_path: Path, configured: Path) -> None:
    script = write(tmp_path, "import torch")
    assert planned("--torchrun", script)[1] == TORCHRUN
    assert planned("--config_file", configured, script)[1] == ACCELERATE


def test_options_of_one_launcher_are_an_answer(tmp_path: Path, configured: Path) -> None:
    script = write(tmp_path, "import torch")
    assert planned("--nproc-per-node=2", script)[1] == TORCHRUN
    assert planned("--num_processes=2", script)[1] == ACCELERATE
    assert planned("--num_processes=2", write(tmp_path, "import lightning"))[1] == ACCELERATE


@pytest.mark.usefixtures("configured")
def test_a_module_is_read_where_python_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "import lightning", "package/train.py")
    assert planned("-m", "package.train")[1] == TORCHRUN
    write(
        tmp_path, "from .lightning import x\nfrom accelerate import Accelerator", "it/__main__.py"
    )
    assert planned("-m", "it")[1] == ACCELERATE


@pytest.mark.usefixtures("configured")
def test_modules_beside_the_script_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "import lightning", "engine.py")
    assert "imports neither" in invoke(write(tmp_path, "import engine")).stderr


@pytest.mark.usefixtures("configured")
def test_modules_that_are_not_here(tmp_path: Path) -> None:
    assert planned("-m", "lightning_dist.run", write(tmp_path, "import os"))[1] == ACCELERATE
    result = invoke("-m", "somewhere.else")
    assert "somewhere.else cannot be read" in result.stderr


def test_without_a_configuration_nothing_is_asked(tmp_path: Path) -> None:
    for text in (*LIGHTNING, *OF_ACCELERATE, *UNCLEAR):
        assert planned(write(tmp_path, text))[1] == TORCHRUN


@pytest.mark.usefixtures("configured")
def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "no.py")
    assert result.exit_code == 2
    assert f"There is no script {tmp_path / 'no.py'}" in result.stderr
