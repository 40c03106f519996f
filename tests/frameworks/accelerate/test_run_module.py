"""``python -m lightning_dist.run``: scripts of Accelerate's, unchanged."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from processes import run
from scenarios.accelerating import forget_accelerators

from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.codecs import Int4
from lightning_dist.frameworks.accelerate.patch import attached_everywhere
from lightning_dist.frameworks.accelerate.transformers import residuals_in_checkpoints

HERE = Path(__file__).parent
SCRIPT = HERE / "unchanged_training.py"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def launched(python: list[str], *words: str, **environ: str) -> tuple[list[Any], list[str]]:
    """What both ranks of the script say, and lines of the output."""
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = [*python, "-m", "accelerate.commands.launch", *options, "--no_python"]
    module = [*python, "-m", "lightning_dist.run", SCRIPT, *words]
    done = run([*launch, *module], limit=100, **environ).require_success()
    said = [json.loads(x) for x in re.findall(r"SAID(\{.*?\})", done.output)]  # of two at once
    return said, done.output.splitlines()


def test_every_rank_gets_the_plugin(quick_python: list[str]) -> None:
    said, lines = launched(quick_python, "--lr", "1", LIGHTNING_DIST_CODEC="int4")
    expected = {"name": "__main__", "arguments": ["--lr", "1"], "ranks": 2, "steps": 2}
    assert said == [{**expected, "codec": repr(Int4())}] * 2
    (line,) = [each for each in lines if "outside of the code" in each]
    assert line.endswith("codec='int4' (LIGHTNING_DIST_CODEC)")


def test_with_a_method_every_rank_takes_local_steps(quick_python: list[str]) -> None:
    said, _ = launched(quick_python, LIGHTNING_DIST_METHOD="local_sgd")
    assert [each["attempted"] for each in said] == [2, 2]


def test_a_module_and_its_arguments(quick_python: list[str]) -> None:
    words = [*quick_python, "-m", "lightning_dist.run"]
    words += ["-m", "unchanged_training", "--no-model"]
    done = run(words, limit=60, PYTHONPATH=str(HERE)).require_success()
    assert "unchanged_training has prepared no model with an Accelerator" in done.output


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ([], {}, "No script"),
        (["--lr", "1"], {}, "No script"),
        (["-m"], {}, "No script"),
        (["missing.py"], {}, "There is no script missing.py"),
        ([SCRIPT], {"LIGHTNING_DIST_METHOD": "dilocco"}, "method must be local_sgd"),
        ([SCRIPT], {"LIGHTNING_DIST_CODCE": "int8"}, r"did you mean 'LIGHTNING_DIST_CODEC'\?"),
        (
            [SCRIPT],
            {"LIGHTNING_DIST_CODEC": "int9"},
            r"got 'int9'.*\(set outside of the code: codec from LIGHTNING_DIST_CODEC\)$",
        ),
    ],
)
def test_bad_input(
    words: list[str | Path], environ: dict[str, str], said: str, quick_python: list[str]
) -> None:
    done = run([*quick_python, "-m", "lightning_dist.run", *words], limit=60, **environ)
    assert done.returncode == 2
    (line,) = [line for line in done.output.splitlines() if "lightning_dist.run: " in line]
    assert re.search(said, line)
    assert "Traceback" not in done.output


@pytest.fixture
def attached() -> Iterator[list[Accelerator]]:
    """The Accelerators that were to be attached; the methods of the class are as before."""
    forget_accelerators()
    stock = (Accelerator.prepare, Accelerator.prepare_model)
    yield []
    assert (Accelerator.prepare, Accelerator.prepare_model) == stock
    forget_accelerators()


def test_a_plugin_of_the_script_counts(attached: list[Accelerator]) -> None:
    with attached_everywhere(attached.append) as seen:
        mine, plain = Accelerator(cpu=True), Accelerator(cpu=True)
        CompressedDDPPlugin().attach(mine)
        for accelerator in (mine, plain, plain):
            accelerator.prepare(torch.nn.Linear(2, 2))
    assert attached == [plain], "once"
    assert seen == [mine, plain]


def test_every_way_to_prepare_a_model_and_nothing_else(attached: list[Accelerator]) -> None:
    one, two, three = (Accelerator(cpu=True) for _ in range(3))
    with attached_everywhere(attached.append):
        one.prepare(torch.optim.SGD([torch.ones(1)], lr=1.0))
        assert attached == [], "an optimizer is no model"
        one.prepare_model(torch.nn.Linear(2, 2))
        two.prepare_model(model=torch.nn.Linear(2, 2))
        with pytest.raises(TypeError):
            three.prepare(torch.nn.Linear(2, 2), nonsense=1)
    assert attached == [one, two, three]
    one.prepare(torch.nn.Linear(2, 2))
    assert attached == [one, two, three]


def test_a_state_that_was_reset_is_accelerates_matter(attached: list[Accelerator]) -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    with (
        attached_everywhere(attached.append),
        pytest.raises(AttributeError, match=r"object has no attribute .* was called and"),
    ):
        accelerator.prepare(torch.nn.Linear(2, 2))
    assert attached == []


def test_the_class_is_given_back_when_the_script_fails(attached: list[Accelerator]) -> None:
    with pytest.raises(SystemExit), attached_everywhere(attached.append):
        raise SystemExit(3)


class Trainer:
    """The methods of transformers' that count here."""

    def __init__(self, accelerator: object) -> None:
        self.accelerator = accelerator
        self.done: list[str] = []

    def create_accelerator_and_postprocess(self) -> None: ...

    def _wrap_model(self) -> None: ...

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.done.append(f"saved {output_dir}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.done.append(f"loaded {checkpoint}")


def test_checkpoints_of_transformers_trainers_have_residuals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Trainer=Trainer))
    stock = dict(vars(Trainer))
    mine, other = Trainer("mine"), Trainer("other")

    def said(what: str) -> Any:
        return lambda folder: mine.done.append(f"{what} residuals of {folder}")

    compression: Any = SimpleNamespace(save=said("saved"), load=said("loaded"))
    with residuals_in_checkpoints() as add:
        add("mine", compression)
        for each in (mine, other):
            each._save_optimizer_and_scheduler("a")
            each._load_optimizer_and_scheduler("b")
            each._load_optimizer_and_scheduler(None)
    residuals = ["saved a", "saved residuals of a", "loaded b", "loaded residuals of b"]
    assert mine.done == [*residuals, "loaded None"]
    assert other.done == ["saved a", "loaded b", "loaded None"]
    assert dict(vars(Trainer)) == stock
