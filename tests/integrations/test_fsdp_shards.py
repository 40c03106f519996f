"""Models sharded over all ranks, whose own collectives are quantised, on real processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import torchrun

RANKS = Path(__file__).with_name("shard_ranks.py")
LIMIT = 240.0
pytestmark = [pytest.mark.timeout(LIMIT + 30), pytest.mark.ranks(2)]
SCENARIOS = ("equal_to_twin", "bytes_sent", "uncompressed", "resumed", "profile", "refusals")


def facts(folder: Path, scenario: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"{scenario}.*.pt"))
    return [torch.load(path, weights_only=True)["facts"] for path in paths]


def launch(folder: Path, python: list[str], ranks: int, *scenarios: str) -> Path:
    torchrun(RANKS, folder, *scenarios, ranks=ranks, limit=LIMIT, python=python).require_success()
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    return launch(tmp_path_factory.mktemp("shards"), quick_python, 2, *SCENARIOS)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return launch(folder, quick_python, 4, *SCENARIOS[:-1], "training")


@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.exhaustive)])
def test_it_is_its_definition(ranks: str, request: pytest.FixtureRequest) -> None:
    """Against a twin in one process, in float64."""
    found = facts(request.getfixturevalue(ranks), "equal_to_twin")
    assert len(found) == {"two": 2, "four": 4}[ranks]
    for each in found:
        assert each["from the twin"] < 1e-12
        assert each["from the start"] > 1e-3


@pytest.mark.parametrize("scenario", ["bytes_sent", "uncompressed", "resumed", "profile"])
@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.exhaustive)])
def test_facts(ranks: str, scenario: str, request: pytest.FixtureRequest) -> None:
    for each in facts(request.getfixturevalue(ranks), scenario):
        assert all(each.values()), each


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_compiled_kernels(tmp_path: Path, quick_python: list[str]) -> None:
    launch(tmp_path, quick_python, 2, "compiled_kernels")
    for each in facts(tmp_path, "compiled_kernels"):
        assert all(each.values()), each


@pytest.mark.exhaustive
def test_it_trains_as_without(four: Path) -> None:
    for each in facts(four, "training"):
        assert all(each.pop("equal")), "ranks compute with the same weights"
        none, begins = each.pop("none"), each.pop("begins")
        assert none < begins / 2
        assert all(abs(loss - none) < 0.05 * none for loss in each.values()), each


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("scaled", "got a GradScaler"),
        ("biased", "error_feedback=True"),
        ("fed back", "Error feedback diverges"),
        ("sparse", "not sparse"),
        ("matrices", "must be of blocks"),
        ("sparse parameters", "Parameters are gathered whole"),
        ("random parameters", "Parameters are gathered whole"),
        ("start", "leave start_step and commit out"),
        ("commit", "leave start_step and commit out"),
        ("not sharded", "fully_shard has sharded over all ranks"),
        ("several replicas", "with several replicas"),
        ("fp16", "float16"),
        ("offload", "CPUOffloadPolicy"),
        ("dtypes", "one floating-point dtype"),
        ("unequal", "differ in"),
    ],
)
def test_what_cannot_work_is_refused(two: Path, case: str, says: str) -> None:
    for each in facts(two, "refusals"):
        assert says in str(each[case])
