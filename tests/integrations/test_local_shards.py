"""Local steps between hosts that hold a model in shards (FSDP2), on two hosts of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import torchrun

RANKS = Path(__file__).with_name("local_shard_ranks.py")
LIMIT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 30), pytest.mark.ranks(4)]
FACTS = ("equal_to_hsdp", "anchors_are_equal", "resumed", "not_finite", "evaluated", "counted")
REST = ("another_mesh", "metrics", "memory")


def facts(folder: Path, scenario: str) -> list[dict[str, object]]:
    found = [torch.load(folder / f"{scenario}.{r}.pt", weights_only=True) for r in range(4)]
    return [each["facts"] for each in found]


def launch(folder: Path, python: list[str], *scenarios: str) -> Path:
    done = torchrun(RANKS, folder, *scenarios, ranks=4, limit=LIMIT, python=python)
    (folder / "output.txt").write_text(done.require_success().output)
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    return launch(tmp_path_factory.mktemp("shards"), quick_python, *FACTS, "refusals")


@pytest.mark.parametrize("scenario", FACTS)
def test_facts(ran: Path, scenario: str) -> None:
    for each in facts(ran, scenario):
        assert each
        assert all(each.values()), each


def test_one_line_has_what_is_in_force(ran: Path) -> None:
    (line, *_) = [
        line
        for line in (ran / "output.txt").read_text().splitlines()
        if "local updates: streaming" in line
    ]
    assert line == (
        "[lightning_dist] local updates: streaming, an outer step every 16 steps in 8 fragments "
        "with overlap_steps=1; codec Int4(block_size=128, hadamard=False), 2 workers x 2 ranks, "
        "each exchanges its shard, 1 host x 4 ranks, world size 4"
    )


def test_other_meshes_metrics_and_memory(tmp_path: Path, quick_python: list[str]) -> None:
    launch(tmp_path, quick_python, *REST)
    for scenario in REST:
        for each in facts(tmp_path, scenario):
            assert each
            assert all(each.values()), (scenario, each)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("one worker", "sharded over all 4 ranks"),
        ("across hosts", "must be sharded inside a host"),
        ("native HSDP", "call it with mesh"),
        ("half", "are not: nothing would average their gradients inside a worker"),
        ("offload", "CPUOffloadPolicy"),
        ("tensor parallel", "leave parallelize_module out"),
        ("rank groups", "got rank_groups; leave it out"),
        ("codec inside", "got a codec inside a host"),
        ("ddp steps", "leave ddp_steps out"),
        ("unequal settings", "sync_every"),
        ("saved as one", "call lightning_dist.local_updates in a loop of your own"),
        ("factored state", "must have the shape of its parameter"),
    ],
)
def test_what_cannot_work_is_refused(ran: Path, case: str, says: str) -> None:
    for each in facts(ran, "refusals"):
        assert says in str(each[case])
