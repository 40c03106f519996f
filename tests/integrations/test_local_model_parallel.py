"""Local steps of sharded models under a Trainer and Fabric: two hosts of two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import torchrun

RANKS = Path(__file__).with_name("local_model_parallel_ranks.py")
LIMIT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT + 30), pytest.mark.ranks(4)]
FACTS = ("as_in_a_loop", "equal_to_hsdp", "profiled")
LONG_FACTS = ("evaluated", "by_samples", "under_fabric", "other_strategies")
OF_CHECKPOINTS = ("restarted", "elsewhere", "whole_models")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("local_model_parallel")
    return launch(folder, quick_python, (*FACTS, "reports", "refusals"), ranks=4)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("local_model_parallel")
    return launch(folder, quick_python, LONG_FACTS, ranks=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("local_model_parallel_checkpoints")
    return launch(folder, quick_python, OF_CHECKPOINTS, ranks=4)


def launch(folder: Path, python: list[str], scenarios: Sequence[str], *, ranks: int) -> Path:
    finished = torchrun(RANKS, folder, *scenarios, ranks=ranks, limit=LIMIT, python=python)
    finished.require_success()
    return folder


def facts(folder: Path, scenario: str, *, ranks: int = 4) -> list[dict[str, Any]]:
    paths = [folder / f"{scenario}.{ranks}.{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=True)["facts"] for path in paths]


@pytest.mark.parametrize("scenario", FACTS)
def test_it_holds(ran: Path, scenario: str) -> None:
    for each in facts(ran, scenario):
        assert each
        assert all(each.values()), each


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", LONG_FACTS)
def test_it_holds_in_other_forms(long: Path, scenario: str) -> None:
    for each in facts(long, scenario):
        assert each
        assert all(each.values()), each


@pytest.mark.parametrize("scenario", OF_CHECKPOINTS)
def test_it_holds_of_checkpoints(saved: Path, scenario: str) -> None:
    for each in facts(saved, scenario):
        assert each
        assert all(each.values()), each


def test_a_resumed_training_is_that_without_a_pause(
    tmp_path: Path, quick_python: list[str]
) -> None:
    launch(tmp_path, quick_python, ["resumed"], ranks=4)
    for each in facts(tmp_path, "resumed"):
        # Weights, two moments of Adam, and of its own worker these three again; anchor, residual
        # and the mean that is under way (momentum is not there yet): of a shard of 1350 elements.
        assert 0 <= each.pop("read") - 4 * (3 + 3 + 3) * 1350 < 2000
        assert len(each) == 8 + 2
        assert all(each.values()), each


def test_two_workers_of_one_rank_go_on_from_two_of_two(
    saved: Path, quick_python: list[str]
) -> None:
    launch(saved, quick_python, ["elsewhere"], ranks=2)
    for each in facts(saved, "elsewhere", ranks=2):
        assert all(each.values()), each


def test_mesh_samplers_bytes_and_names(ran: Path) -> None:
    for rank, each in enumerate(facts(ran, "reports")):
        assert each["sampler"] == {"num_replicas": 4, "rank": rank}
        assert each["mesh"] == {"replicate": 2, "data_parallel": 2, "tensor_parallel": 1}
        assert each["topology"] == ((0, 1), (2, 3))
        stats = each["stats"]
        assert stats["steps"] == 3, "two windows, and the end"
        assert 0 < stats["inter_bytes"] == stats["wire_bytes"] < stats["raw_bytes"]
        assert {"outer/cosine", "outer/drift", "comm/total_wire_bytes"} <= {*each["logged"]}
        assert each["local"] == 3
        assert each["moved"], "by a second fit"
        assert each["equal"]
        assert each["by name"] == ["diloco", "streaming", "sparseloco", "local_sgd"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("one host", "got one host of 4 ranks"),
        ("native HSDP", "call it with mesh"),
        ("offload", "CPUOffloadPolicy"),
        ("half", "2 of 10 are not"),
        ("no outer step", "must have an outer step"),
        ("second momentum", "gives gradients momentum"),
        ("single", "set format='sharded'"),
        ("shapes", "must have the shapes of its sharded parameters"),
        ("jointly", "fabric.setup_optimizers(optimizer)"),
        ("optimizer first", "call fabric.setup_module(model) first"),
        ("second model", "got a second one; make another Fabric"),
        ("second optimizer", "got a second one; give all parameters to one"),
        ("whole", "use LocalUpdateModelParallelStrategy with Lightning or Fabric"),
    ],
)
def test_what_cannot_work_is_refused(ran: Path, case: str, says: str) -> None:
    for each in facts(ran, "refusals"):
        assert says in each[case], each
