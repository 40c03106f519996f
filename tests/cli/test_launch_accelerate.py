"""``lightning-dist launch`` where Accelerate is configured: which of the two runs, and how."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from calls import program, refusal
from click.testing import Result
from processes import run

TORCHRUN = "lightning_dist.elastic.launcher"
ACCELERATE = "lightning_dist.frameworks.accelerate.launch"
PROGRAM = ["-c", "from lightning_dist.cli import main; main()", "launch"]
SCRIPT = """
import json, os, sys
from accelerate import Accelerator
accelerator = Accelerator()
config = os.environ.get("LIGHTNING_DIST_CONFIG")
said = [accelerator.num_processes, accelerator.distributed_type.value, config, sys.argv[1:]]
print("SAID" + json.dumps(said), flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [*os.environ]:
        if name.startswith(("LIGHTNING_DIST_", "ACCELERATE_", "TORCH_DISABLE_SHARE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "hf/accelerate").mkdir(parents=True)
    return tmp_path / "hf/accelerate"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


FSDP2 = {"distributed_type": "FSDP", "use_cpu": False, "fsdp_config": {"fsdp_version": 2}}


def configure(path: Path, *, sidecar: str | None = "codec: int8\n", **fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, **fields}
    path.write_text(yaml.safe_dump(content))
    if sidecar is not None:
        path.with_name("lightning_dist.yaml").write_text(sidecar)
    return path


def invoke(*words: str | Path) -> Result:
    return program("launch", "--dry-run", *words)


def refused(*words: str | Path) -> str:
    return refusal("launch", "--dry-run", *words)


def planned(*words: str | Path) -> tuple[dict[str, str], str, list[str], str]:
    """Variables, the module, its arguments, and the first note of a dry run."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    parts = shlex.split(result.stdout)
    start = parts.index(sys.executable)
    variables = dict(part.split("=", 1) for part in parts[:start])
    return variables, parts[start + 2], parts[start + 3 :], result.stderr.splitlines()[0]


def test_a_named_file_is_for_accelerate(tmp_path: Path, script: Path) -> None:
    file = configure(tmp_path / "x/two.yaml")
    variables, module, arguments, note = planned("--config_file", file, script, "--lr", "1")
    ours = str(file.with_name("lightning_dist.yaml"))
    assert variables == {"LIGHTNING_DIST_CONFIG": ours, "ACCELERATE_USE_CPU": "true"}
    assert module == ACCELERATE
    options = ["--config_file", str(file), "--multi_gpu", "--main_process_port=0"]
    assert arguments == [*options, str(script), "--lr", "1"]
    assert note.startswith(f"lightning-dist: accelerate launch (--config_file={file}")


def test_a_relative_file_is_handed_on_as_an_absolute_path(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path / "two.yaml")
    monkeypatch.chdir(tmp_path)
    variables, *_ = planned("--config-file=two.yaml", script)
    assert variables["LIGHTNING_DIST_CONFIG"] == str(tmp_path / "lightning_dist.yaml")


def test_the_default_place_is_for_accelerate_too(home: Path, script: Path) -> None:
    file = configure(home / "default_config.yaml")
    _, module, arguments, note = planned("--num_processes=3", script)
    assert module == ACCELERATE
    assert arguments[0] == f"--config_file={file}"
    assert "--torchrun for the other" in note


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nproc-per-node", "2"], "unrecognized arguments: --nproc-per-node"),
        (["--nnodes=1:4", "--rdzv-endpoint=a:1"], "unrecognized arguments"),
        (["--torchrun"], "--torchrun"),
        (["--torchrun", "--nproc-per-node=2"], "--torchrun"),
    ],
)
def test_options_of_torchrun_are_for_torchrun(
    home: Path, script: Path, words: list[str], why: str
) -> None:
    configure(home / "default_config.yaml")
    _, module, arguments, note = planned(*words, script)
    assert module == TORCHRUN
    assert "--torchrun" not in arguments
    assert note.startswith("lightning-dist: torchrun (")
    assert why in note


@pytest.mark.parametrize("sidecar", [None, "codec: int8\n"])
def test_accelerates_own_file_alone_changes_nothing(
    home: Path, script: Path, sidecar: str | None
) -> None:
    if sidecar is None:
        configure(home / "default_config.yaml", sidecar=None)
    else:
        (home / "lightning_dist.yaml").write_text(sidecar)
    _, module, _, note = planned(script)
    assert module == TORCHRUN
    assert "no file of lightning-dist config" in note


def test_config_file_after_the_script_is_the_scripts(script: Path) -> None:
    _, module, arguments, _ = planned("--nproc-per-node=2", script, "--config_file", "x")
    assert module == TORCHRUN
    assert arguments[-3:] == [str(script), "--config_file", "x"]


def test_cpu_and_the_number_of_the_command_line(tmp_path: Path, script: Path) -> None:
    fields = {"distributed_type": "NO", "use_cpu": False, "num_processes": 1}
    file = configure(tmp_path / "one.yaml", **fields)
    variables, _, arguments, _ = planned(
        "--config_file", file, "--cpu", "--num_processes", "2", script
    )
    assert variables["ACCELERATE_USE_CPU"] == "true"
    assert "--cpu" not in arguments
    assert "--multi_gpu" in arguments


def test_one_process_is_left_alone(tmp_path: Path, script: Path) -> None:
    file = configure(tmp_path / "one.yaml", distributed_type="NO", num_processes=1)
    variables, _, arguments, _ = planned("--config_file", file, script)
    assert set(variables) == {"LIGHTNING_DIST_CONFIG"}
    assert arguments == ["--config_file", str(file), str(script)]


def test_a_variable_of_the_user_stays(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("codec: sign")
    monkeypatch.setenv("LIGHTNING_DIST_CONFIG", str(tmp_path / "mine.yaml"))
    file = configure(tmp_path / "x/two.yaml")
    result = invoke("--config_file", file, script)
    assert "LIGHTNING_DIST_CONFIG=" not in result.stdout
    assert f"is {tmp_path}/mine.yaml already: {tmp_path}/x/lightning_dist.yaml is" in result.stderr


def test_settings_that_are_not_beside_the_file_are_reported(
    home: Path, tmp_path: Path, script: Path
) -> None:
    (home / "lightning_dist.yaml").write_text("codec: sign\n")
    result = invoke("--config_file", configure(tmp_path / "x/two.yaml", sidecar=None), script)
    assert f"in force: codec='sign' ({home}/lightning_dist.yaml)" in result.stderr


@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ({"distributed_type": "FSDP"}, [], "is FSDP, which has no DDP"),
        ({**FSDP2, "sidecar": "hierarchical: true"}, [], "is a setting of DDP"),
        ({}, ["--use_fsdp", "--fsdp_version", "1"], "is FSDP"),
        ({"distributed_type": "DEEPSPEED"}, [], "is DEEPSPEED"),
        ({}, ["--use_fsdp"], "is FSDP"),
        ({"sidecar": "codek: int8"}, [], "Unknown setting 'codek'"),
        ({"distributed_type": "NO", "use_cpu": False}, [], "would start one process"),
        ({"distributed_type": False, "use_cpu": False}, [], "two.yaml --set accelerate.num_pro"),
        ({"sidecar": "codec: int5"}, [], "lightning_dist.yaml"),
        ({"distributed_type": "FSDP"}, [], "remove the settings of "),
        ({"lightning_dist": {}}, [], "had unknown keys"),
        ({}, ["--torchrun"], "and --torchrun torchrun; remove one of them"),
        ({}, ["--nnodes", "2"], "unrecognized arguments: --nnodes"),
    ],
    ids=str,
)
def test_traps_are_errors(
    tmp_path: Path, script: Path, fields: dict[str, str], words: list[str], said: str
) -> None:
    file = configure(tmp_path / "two.yaml", **fields)
    assert said in refused("--config_file", file, *words, script)


@pytest.mark.parametrize(
    ("fields", "words"), [(FSDP2, []), ({}, ["--use_fsdp", "--fsdp_version", "2"])], ids=str
)
def test_fsdp2_is_compressed(
    tmp_path: Path, script: Path, fields: dict[str, object], words: list[str]
) -> None:
    file = configure(tmp_path / "two.yaml", **{"use_cpu": False, **fields})
    variables, _, arguments, _ = planned("--config_file", file, *words, script)
    assert variables == {"LIGHTNING_DIST_CONFIG": str(tmp_path / "lightning_dist.yaml")}
    assert arguments == ["--config_file", str(file), *words, str(script)]


def test_without_settings_other_kinds_of_training_are_accelerates_matter(
    tmp_path: Path, script: Path
) -> None:
    fields = {"distributed_type": "FSDP", "use_cpu": False, "sidecar": None}
    file = configure(tmp_path / "two.yaml", **fields)
    assert planned("--config_file", file, script)[1] == ACCELERATE


@pytest.mark.parametrize("words", [["/no/such.yaml", "SCRIPT"], ["FILE", "missing.py"], ["FILE"]])
def test_files_that_are_missing(tmp_path: Path, script: Path, words: list[str]) -> None:
    names = {"SCRIPT": script, "FILE": configure(tmp_path / "two.yaml")}
    said = refused("--config_file", *(names.get(word, word) for word in words))
    assert said.startswith(("There is no ", "No script: "))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU"])
def test_two_processes_are_one_training(
    tmp_path: Path, script: Path, kind: str, quick_executable: str
) -> None:
    file = configure(tmp_path / "two.yaml", distributed_type=kind)
    command = [quick_executable, *PROGRAM, "--config_file", file, script, "--lr", "1"]
    done = run(command, limit=100).require_success()
    said = [json.loads(x) for x in re.findall(r"SAID(\[.*?\]\])", done.output)]  # of two at once
    assert said == [[2, "MULTI_CPU", str(tmp_path / "lightning_dist.yaml"), ["--lr", "1"]]] * 2


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
@pytest.mark.parametrize("text", [*LIGHTNING, *OF_ACCELERATE])
def test_a_script_is_for_the_launcher_of_what_it_imports(tmp_path: Path, text: str) -> None:
    _, module, arguments, note = planned(write(tmp_path, text), "--lr", "1")
    assert arguments[-2:] == ["--lr", "1"]
    if text in LIGHTNING:
        assert module == TORCHRUN
        assert "train.py imports " in note
        assert "--config_file" in note
    else:
        assert module == ACCELERATE
        assert "--torchrun for the other" in note


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize(("text", "why"), UNCLEAR.items(), ids=list(UNCLEAR))
def test_a_script_that_does_not_say_it_is_asked_about(tmp_path: Path, text: str, why: str) -> None:
    said = refused(write(tmp_path, text))
    assert why in said
    assert "select a launcher with --torchrun, or --config_file=" in said


def test_an_answer_is_taken(tmp_path: Path, configured: Path) -> None:
    """Options of one launcher are one too."""
    script = write(tmp_path, "import torch")
    assert planned("--torchrun", script)[1] == TORCHRUN
    assert planned("--config_file", configured, script)[1] == ACCELERATE
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
    assert "imports neither" in refused(write(tmp_path, "import engine"))


@pytest.mark.usefixtures("configured")
def test_modules_that_are_not_here(tmp_path: Path) -> None:
    assert planned("-m", "lightning_dist.run", write(tmp_path, "import os"))[1] == ACCELERATE
    assert "somewhere.else cannot be read" in refused("-m", "somewhere.else")


def test_without_a_configuration_nothing_is_asked(tmp_path: Path) -> None:
    for text in (*LIGHTNING, *OF_ACCELERATE, *UNCLEAR):
        assert planned(write(tmp_path, text))[1] == TORCHRUN


@pytest.mark.usefixtures("configured")
def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"There is no script {tmp_path / 'no.py'}" in refused(tmp_path / "no.py")
