"""``compressed_model_parallel`` under a Trainer and Fabric: two hosts of two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import torchrun

RANKS = Path(__file__).with_name("model_parallel_ranks.py")
LIMIT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 30), pytest.mark.ranks(4)]
FAST = ("equal_to_native", "reports", "accumulation", "refusals")
REST = (
    *("fabric", "accelerate", "profile", "fabric_resume", "accelerate_resume", "resume"),
    *("tensor_parallel", "evaluation", "sharded_over_all", "shards_fabric"),
)
LONG = (
    *("equal_to_native_bf16", "resume_one_file", "resume_tensor_parallel"),
    *("shards_resume", "shards_accelerate"),
)


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    return launch(tmp_path_factory.mktemp("model_parallel"), quick_python, FAST)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    return launch(tmp_path_factory.mktemp("model_parallel_rest"), quick_python, REST)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    return launch(tmp_path_factory.mktemp("model_parallel_long"), quick_python, LONG)


def launch(folder: Path, python: list[str], scenarios: Sequence[str]) -> Path:
    finished = torchrun(RANKS, folder, *scenarios, ranks=4, limit=LIMIT, python=python)
    finished.require_success()
    return folder


def facts(folder: Path, scenario: str) -> list[dict[str, Any]]:
    found = [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=True) for rank in range(4)]
    return [each["facts"] for each in found]


def test_it_holds(square: Path) -> None:
    for each in facts(square, "equal_to_native"):
        assert all(each.values()), each


@pytest.mark.parametrize("scenario", sorted({*REST} - {"tensor_parallel", "profile"}))
def test_it_holds_in_other_forms(rest: Path, scenario: str) -> None:
    for each in facts(rest, scenario):
        assert all(each.values()), each


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", LONG)
def test_it_holds_in_long(long: Path, scenario: str) -> None:
    for each in facts(long, scenario):
        assert all(each.values()), each


def test_mesh_samplers_and_bytes(square: Path) -> None:
    for rank, each in enumerate(facts(square, "reports")):
        assert each["sampler"] == {"num_replicas": 4, "rank": rank}
        assert each["mesh"] == {"replicate": 2, "data_parallel": 2, "tensor_parallel": 1}
        assert each["topology"] == ((0, 1), (2, 3))
        assert "int8" in each["codec"].lower()
        stats = each["stats"]
        assert stats["steps"] == 8
        assert stats["inter_bytes"] == stats["wire_bytes"] < 0.4 * stats["raw_bytes"]
        assert each["logged"]["comm/total_wire_bytes"] == stats["wire_bytes"]
        assert each["equal"]
        assert each["residuals"]
        assert each["by name"]
        assert each["grad scaler"]
        assert each["steps"] == 12, "the second fit goes on with the residuals of the first"


def test_only_the_last_micro_batch_is_exchanged(square: Path) -> None:
    for each in facts(square, "accumulation"):
        assert each == {"steps": 2, "optimizer": 2}


def test_tensor_parallel_ranks_get_the_same_data(rest: Path) -> None:
    for rank, each in enumerate(facts(rest, "tensor_parallel")):
        assert each == {"equal": True, "sampler": {"num_replicas": 2, "rank": rank // 2}}


def test_the_profiler_sees_both_dimensions(rest: Path) -> None:
    first, *others = facts(rest, "profile")
    assert [each["rank"] for each in others] == [1, 2, 3]
    assert all(each["same bits"] and each["given back"] for each in (first, *others))
    assert first["steps"] == 4, "of two micro-batches"
    assert first["buckets"] == 2
    assert first["bytes"] == first["inter bytes"] + first["intra bytes"]
    assert first["inter bytes"] > 0
    assert first["calls"] == 4 * 2 * (2 + 2 + 2), "two gathers and a reduction, of two blocks"
    assert first["intra bytes"] == first["given"] / 4, "a step"
    own, exposed = first["exposed"]
    assert 0 < own < exposed
    assert first["rest"] >= 0
    assert first["step"][0] == pytest.approx(first["step"][1])
    assert first["transfer"] > 0
    assert first["waits"] == [0, 1, 2, 3]
    assert first["errors"]
    form, counts, elements = first["observed"]
    assert (form, counts) == ("fsdp", (2, 2))
    assert elements == pytest.approx(2 * 675, rel=0.01), "of the shard of a rank, of two blocks"
    assert "shorter than" in first["not predicted"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("offload", "CPUOffloadPolicy"),
        ("reduce dtype", "reduce_dtype"),
        ("native HSDP", "call it with mesh"),
        ("16-true", "keep parameters in bfloat16 or float32"),
        ("sizes", "replicate_size * data_parallel_size"),
        ("hosts", "got 2 hosts with 3, 1 ranks"),
        ("OneBitAdam", "use torch.optim.AdamW"),
        ("second momentum", "has its own"),
        ("replicas", "sharded over all ranks"),
        ("biased", "an unbiased codec"),
        ("start", "leave start_step and commit out"),
    ],
)
def test_what_cannot_work_is_refused(square: Path, case: str, says: str) -> None:
    for each in facts(square, "refusals"):
        assert says in each[case], each
