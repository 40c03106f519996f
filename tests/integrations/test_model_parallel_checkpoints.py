"""Sharded models under AsyncCheckpoint and ElasticRestart: saved by all ranks, for any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import committed
from processes import torchrun
from torch import Tensor, nn
from typer.testing import CliRunner

from lightning_dist.cli import app

RANKS = Path(__file__).with_name("model_parallel_checkpoints.py")
LIMIT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT + 30), pytest.mark.ranks(4)]
NAME = "epoch=0.ckpt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    """A folder with what two replicas of two shards have saved, and what others make of it."""
    folder = tmp_path_factory.mktemp("saved")
    launch(folder, quick_python, ["resume", "load", "refusals"], ranks=4)
    return folder


@pytest.fixture(scope="module")
def rest(saved: Path, quick_python: list[str]) -> Path:
    """The same folder, with restarts and what other worlds make of it."""
    of_four = ["restarts", "restarts_of_shards"]
    of_both = ["load_others", "meshes", "shards_elsewhere"]
    launch(saved, quick_python, [*of_four, *of_both], ranks=4)
    launch(saved, quick_python, of_both, ranks=2)
    return saved


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    """A folder with restarts under tensor parallelism."""
    folder = tmp_path_factory.mktemp("parts")
    launch(folder, quick_python, ["restarts_of_parts", "own_positions"], ranks=4)
    return folder


def launch(folder: Path, python: list[str], scenarios: list[str], *, ranks: int) -> None:
    finished = torchrun(RANKS, folder, *scenarios, ranks=ranks, limit=LIMIT, python=python)
    finished.require_success()


def facts(folder: Path, scenario: str, *, ranks: int = 4) -> list[dict[Any, Any]]:
    paths = [folder / f"{scenario}.{ranks}.{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.fixture(scope="module")
def single(saved: Path) -> Path:
    """The checkpoint as one file."""
    path = saved / "single.ckpt"
    assert ckpt("consolidate", saved / "epoch" / NAME, path)[0] == 0
    return path


def ckpt(*words: str | Path) -> tuple[int, str]:
    """Exit code of ``lightning-dist ckpt`` with these words, and what it printed."""
    result = CliRunner().invoke(app, ["ckpt", *map(str, words)])
    return result.exit_code, result.stdout


def test_a_resumed_training_is_that_without_a_pause(saved: Path) -> None:
    for each in facts(saved, "resume"):
        assert each["equal"]
        assert each["residuals"]
        assert each["steps"] == 8
        numel, shards = 2700, 2
        assert each["read"] == 4 * 4 * numel // shards, "parameters, two of Adam, and residuals"


def test_every_rank_writes_its_share(saved: Path) -> None:
    first, *others = facts(saved, "resume")[0]["bytes"]
    assert max(others) - min(others) < 100
    assert first - max(others) < 8000, "and rank 0 what is not of tensors"


def test_the_program_verifies_it(saved: Path, single: Path) -> None:
    for path in (saved / "epoch" / NAME, single):
        code, said = ckpt("verify", path)
        assert (code, said.split()[:2]) == (0, ["ok", f"{path}:"])
    code, said = ckpt("verify", saved / "damaged.ckpt")
    assert code == 1
    assert "shard-00003-of-00004-" in said


def test_parameters_and_optimizer_states_are_copied_while_training_goes_on(saved: Path) -> None:
    numel, steps = 2700, 8
    states = 3 * 4 * numel + 4 * steps  # parameters, two of Adam, and its step of each
    for each in facts(saved, "resume"):
        ((now, later),) = each["copied"]
        assert abs(later - states / 4) < 64
        assert now < states / 4, "residuals"


def test_one_file_loads_into_the_plain_module(single: Path) -> None:
    state = torch.load(single, weights_only=True)
    plain = Plain()
    plain.load_state_dict(state["state_dict"])
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(state["optimizer_states"][0])
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Plain(), torch.utils.data.DataLoader(torch.randn(6, 18)), ckpt_path=single)
    assert trainer.global_step == 4 + 6


class Plain(L.LightningModule):
    """The module of the ranks, as one process has it."""

    def __init__(self) -> None:
        super().__init__()
        width = 18
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
                for _ in range(2)
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.blocks(batch).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_another_mesh_loads_it(saved: Path, single: Path) -> None:
    require_loaded(facts(saved, "load"), single, replicas=4)


@pytest.mark.parametrize(
    ("ranks", "replicas"), [(4, 1), (4, 2), (2, 1), (2, 2)], ids=lambda number: f"{number}"
)
def test_any_mesh_loads_it(rest: Path, single: Path, ranks: int, replicas: int) -> None:
    require_loaded(facts(rest, "load_others", ranks=ranks), single, replicas=replicas)


def require_loaded(found: list[dict[Any, Any]], single: Path, *, replicas: int) -> None:
    """Weights and optimizer states to the bit; replicas owe together what they owed."""
    state = torch.load(single, weights_only=True)
    optimizer = state["optimizer_states"][0]["state"]
    begun = [each[replicas] for each in found]
    for each in begun:
        assert each["weights"].keys() == state["state_dict"].keys()
        assert each["steps"] == [4.0]
        for number, (name, weight) in enumerate(each["weights"].items()):
            assert torch.equal(weight, state["state_dict"][name])
            assert torch.equal(each["exp_avg"][name], optimizer[number]["exp_avg"])
    owed = begun[0]["residuals"]
    assert (owed is None) == (replicas == 1), "one replica compresses nothing"
    for name, rows in (owed or {}).items():
        before = state["lightning_dist"]["residuals"][name]
        assert len(rows) == replicas
        assert rows.any()
        if replicas == 2:
            assert torch.equal(rows, before)
        else:
            torch.testing.assert_close(rows.mean(0), before.mean(0))


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("single", "set format='sharded'"),
        ("damaged", "shard-00003-of-00004-"),
        ("shapes", "The state of Reshaped must have the shapes of its sharded parameters"),
    ],
)
def test_what_is_refused(saved: Path, case: str, says: str) -> None:
    for each in facts(saved, "refusals"):
        assert says in each[case], each


@pytest.mark.parametrize("of", ["", " shards"])
def test_a_restarted_run_is_that_without_a_fault(rest: Path, of: str) -> None:
    require_the_same_run(rest, of)


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_restart_too(parts: Path) -> None:
    require_the_same_run(parts, " parts")


def require_the_same_run(rest: Path, of: str) -> None:
    """Failed at six hooks: samples, weights, momenta and residuals to the bit."""
    for each in facts(rest, f"restarts_of{of}".replace(" ", "_") if of else "restarts"):
        straight, restarted = each["straight"], each["restarted"]
        assert straight["residuals"]
        assert all(residual.any() for residual in straight["residuals"].values())
        assert straight["residuals"].keys() == restarted["residuals"].keys()
        for kind in ("weights", "residuals"):
            for name, value in straight[kind].items():
                assert torch.equal(restarted[kind][name], value), (kind, name)
        assert len(straight["momenta"]) == 4
        assert all(map(torch.equal, restarted["momenta"], straight["momenta"]))
    require_same_samples(rest / f"restarted{of}", rest / f"straight{of}", worlds=[4] * 9)


@pytest.mark.exhaustive
def test_loaders_of_tensor_parallel_ranks_go_on(parts: Path) -> None:
    for each in facts(parts, "own_positions"):
        for name, weight in each["straight"].items():
            assert torch.equal(each["restarted"][name], weight), name
    require_same_samples(parts / "own", parts / "own straight", worlds=[4] * 36)


@pytest.mark.parametrize("run", ["meshes", "meshes of parts"])
def test_other_meshes_go_on(rest: Path, run: str) -> None:
    """Two replicas of two ranks, then one of two, then two of one: rounded otherwise at most."""
    (straight, *_), (changed, *_) = facts(rest, "meshes"), facts(rest, "meshes", ranks=2)
    expected = straight["straight"]
    for kind in ("weights", "momenta"):
        torch.testing.assert_close(changed[run][kind], expected[kind], rtol=1e-5, atol=1e-6)
    require_same_samples(rest / run, rest / "exact", worlds=[4] * 4 + [2] * 5)


def test_errors_of_shards_go_to_another_number_of_ranks(rest: Path) -> None:
    first, _ = facts(rest, "shards_elsewhere", ranks=2)
    assert len(first) == 4
    assert all(first.values()), first


def require_same_samples(folder: Path, straight: Path, *, worlds: list[int]) -> None:
    found, expected = (committed(each / "account") for each in (folder, straight))
    assert [step.ids for step in found.values()] == [step.ids for step in expected.values()]
    assert [step.world for step in found.values()] == worlds
    assert all(len(step.hashes) == 1 for step in found.values()), "equal on all ranks"


@pytest.mark.parametrize("scenario", ["tied", "tensor_parallel", "others"])
def test_it_holds(tmp_path: Path, quick_python: list[str], scenario: str) -> None:
    launch(tmp_path, quick_python, [scenario], ranks=4)
    for each in facts(tmp_path, scenario):
        assert all(each.values()), each
