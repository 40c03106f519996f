"""Sharded models (FSDP2) whose shards cross between replicas compressed, on real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from processes import torchrun

from lightning_dist.codecs import CODECS

RANKS = Path(__file__).with_name("fsdp_ranks.py")
LIMIT = 400.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 30), pytest.mark.ranks(4)]
FACTS = (
    *("resume", "resume_of_every_codec", "accumulation", "grad_scaler", "another_mesh", "flushed"),
    *("overflow", "interrupted", "tensor_parallel", "memory", "drift"),
)
OF_CODECS = ("some_codecs", "conservation_of_every_codec")
LONG = ("every_codec", "conservation", "conservation_of_a_long_run")


def facts(folder: Path, scenario: str, shape: str) -> list[dict[str, object]]:
    paths = sorted(folder.glob(f"{scenario}.{shape}.*.pt"))
    return [torch.load(path, weights_only=True)["facts"] for path in paths]


def launch(folder: Path, python: list[str], replicas: int, shards: int, *scenarios: str) -> Path:
    arguments = (folder, str(replicas), str(shards), *scenarios)
    ranks = replicas * shards
    torchrun(RANKS, *arguments, ranks=ranks, limit=LIMIT, python=python).require_success()
    return folder


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    """Two replicas of two shards."""
    scenarios = ("equal_to_native", *OF_CODECS, *FACTS, "refusals")
    return launch(tmp_path_factory.mktemp("fsdp"), quick_python, 2, 2, *scenarios)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    """The same with what takes minutes."""
    return launch(tmp_path_factory.mktemp("fsdp"), quick_python, 2, 2, *LONG)


def test_uncompressed_it_has_the_bits_of_torch(square: Path) -> None:
    found = facts(square, "equal_to_native", "2x2")
    assert len(found) == 4
    assert [[name for name, equal in each.items() if not equal] for each in found] == [[]] * 4


@pytest.mark.exhaustive
@pytest.mark.ranks(6)
@pytest.mark.parametrize(("replicas", "shards"), [(3, 1), (2, 3)])
def test_uncompressed_it_has_the_bits_of_torch_in_other_shapes(
    tmp_path: Path, quick_python: list[str], replicas: int, shards: int
) -> None:
    scenarios = "equal_to_native", "resume", "resume_of_every_codec"
    launch(tmp_path, quick_python, replicas, shards, *scenarios)
    for scenario in scenarios:
        for each in facts(tmp_path, scenario, f"{replicas}x{shards}"):
            assert all(each.values()), each


def test_replicas_stay_equal_and_fewer_bytes_travel(square: Path) -> None:
    found = facts(square, "some_codecs", "2x2")
    for each in found:
        assert all(equal and finite for equal, finite, _ in each.values()), each
    none = found[0]["none"][2]
    assert found[0]["bf16"][2] == pytest.approx(none / 2, rel=0.01)
    assert found[0]["int8"][2] < 0.35 * none


@pytest.mark.exhaustive
def test_every_codec(long: Path) -> None:
    """Replicas stay equal, and what was applied and what is owed is the sum of the exact means."""
    for each in facts(long, "every_codec", "2x2"):
        assert set(each) == set(CODECS)
        assert all(equal and finite for equal, finite, _ in each.values()), each
    for each in facts(long, "conservation", "2x2"):
        assert all(error < 1e-5 for error in each.values()), each


def require_conserved(ranks: list[dict[str, object]], commits: set[str]) -> None:
    """Casts round to nearest; unbiased codecs miss by chance alone."""
    limits = {"fp16": 2 * 2.0**-11, "bf16": 2 * 2.0**-8, "qsgd": 5.0, "terngrad": 5.0}
    assert len(ranks) == 4
    for each in ranks:
        assert each.keys() == commits
        for found in each.values():
            assert found.keys() == set(CODECS)
            wrong = {n: lost for n, lost in found.items() if not lost < limits.get(n, 1e-10)}
            assert not wrong


def test_every_codec_conserves_mass(square: Path) -> None:
    """60 steps in float64."""
    found = facts(square, "conservation_of_every_codec", "2x2")
    require_conserved(found, {"immediate", "deferred"})


@pytest.mark.exhaustive
def test_every_codec_conserves_mass_in_a_long_run(long: Path) -> None:
    """1,000 steps in float64."""
    require_conserved(facts(long, "conservation_of_a_long_run", "2x2"), {"immediate"})


@pytest.mark.parametrize("scenario", FACTS)
def test_facts(square: Path, scenario: str) -> None:
    found = facts(square, scenario, "2x2")
    assert len(found) == 4
    for each in found:
        assert all(each.values()), each


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_compiled_kernels(tmp_path: Path, quick_python: list[str]) -> None:
    launch(tmp_path, quick_python, 2, 2, "compiled_kernels")
    found = facts(tmp_path, "compiled_kernels", "2x2")
    assert len(found) == 4
    for each in found:
        assert all(each.values()), each


@pytest.mark.exhaustive
@pytest.mark.ranks(8)
def test_compiled_blocks_and_tensor_parallel_shards(
    tmp_path: Path, quick_python: list[str]
) -> None:
    launch(tmp_path, quick_python, 2, 2, "compiled_blocks")
    launch(tmp_path, quick_python, 2, 4, "tensor_parallel")
    for scenario, shape, ranks in (("compiled_blocks", "2x2", 4), ("tensor_parallel", "2x4", 8)):
        found = facts(tmp_path, scenario, shape)
        assert len(found) == ranks
        assert all(all(each.values()) for each in found), found


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("not sharded", "call fully_shard"),
        ("one dimension", "two dimensions"),
        ("native HSDP", "call it with mesh"),
        ("offload", "CPUOffloadPolicy"),
        ("reduce dtype", "reduce_dtype"),
        ("fp16 reduction", "got reduce_dtype torch.float16 for parameters in torch.float32"),
        ("sums", "after set_force_sum_reduction_for_comms(True)"),
        ("fp16", "keep parameters in bfloat16 or float32"),
        ("FSDP1", "call fully_shard on the blocks"),
        ("placement", "leave shard_placement_fn out"),
        ("several groups", "parameters of a module in one group"),
        ("another mesh", "one dimension of mesh"),
        ("one replica", "several replicas"),
        ("unequal settings", "codec"),
    ],
)
def test_what_cannot_work_is_refused(square: Path, case: str, says: str) -> None:
    for each in facts(square, "refusals", "2x2"):
        assert says in str(each[case])
