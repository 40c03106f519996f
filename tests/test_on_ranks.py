"""Tests that run on the ranks of a world: they pass, fail, skip and end as others do."""

import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import SPARE, START_LIMIT
from processes import run

pytestmark = pytest.mark.slow


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("factor", [2, 3])
def test_every_rank_has_the_arguments_and_one_group(factor: int, tmp_path: Path) -> None:
    found = torch.tensor([float(factor * dist.get_rank())])
    dist.all_reduce(found)
    assert found.item() == factor
    assert dist.get_world_size() == 2
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.on_ranks(2, hash_seeds=True)
def test_neighbours_have_different_hash_seeds() -> None:
    hashes = [0, 0]
    dist.all_gather_object(hashes, hash("a name"))
    assert hashes[0] != hashes[1]


@pytest.mark.on_ranks(2, hosts=2)
def test_each_rank_is_on_a_host_of_its_own() -> None:
    assert os.environ["LIGHTNING_DIST_HOSTNAME"] == f"host{dist.get_rank()}"


@pytest.mark.on_ranks(2)
def test_nothing_of_another_test_is_left() -> None:
    assert not {"LEFT_BY_A_TEST", "LIGHTNING_DIST_HOSTNAME"} & os.environ.keys()
    assert torch.rand(1, generator=None).item() == torch.rand(1, generator=torch.manual_seed(0))
    os.environ["LEFT_BY_A_TEST"] = "1"
    torch.set_default_dtype(torch.float64)


@pytest.mark.on_ranks(2)
def test_nothing_of_another_test_is_left_here_either() -> None:
    test_nothing_of_another_test_is_left()


LEFT: list[dist.ProcessGroup] = []


@pytest.mark.on_ranks(2)
def test_groups_that_are_left() -> None:
    assert not LEFT
    LEFT.extend(dist.new_group() for _ in range(12))


@pytest.mark.on_ranks(2)
def test_groups_that_are_left_end_with_their_world() -> None:
    assert not LEFT


@pytest.mark.on_ranks(2, limit=300)
def test_limits_of_a_world_come_first(limit_of_pytest: float) -> None:
    assert limit_of_pytest > START_LIMIT + 300 + SPARE


@pytest.fixture
def limit_of_pytest(request: pytest.FixtureRequest) -> float:
    (limit,) = request.node.get_closest_marker("timeout").args
    return float(limit)


CASES = """
    import os, signal, time
    import pytest, torch.distributed as dist

    @pytest.mark.on_ranks(2)
    def test_one_rank():
        assert dist.get_rank() * 2 == 0

    @pytest.mark.on_ranks(2)
    def test_others_wait():
        if dist.get_rank() == 1:
            raise KeyError("planted")
        dist.barrier()

    @pytest.mark.on_ranks(2)
    def test_skips():
        pytest.skip("for a reason")

    @pytest.mark.on_ranks(2)
    def test_ends():
        print("about to end", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.on_ranks(2, limit=3)
    def test_hangs():
        time.sleep(1000 * dist.get_rank())

    @pytest.mark.on_ranks(2)
    def test_passes():
        dist.barrier()
"""


def test_failures_name_the_ranks_and_the_next_test_has_a_new_world(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(textwrap.dedent(CASES))
    root = Path(__file__).parents[1]
    words = ["-c", root / "pyproject.toml", "--rootdir", tmp_path, "-p", "conftest", "-n", "0"]
    words += ["-p", "no:cacheprovider", "-o", f"pythonpath={root} {root}/tests", "-rs"]
    found = run([sys.executable, "-m", "pytest", *words, tmp_path], limit=150)
    assert found.returncode == 1, found.output
    assert "4 failed, 1 passed, 1 skipped" in found.output
    assert "LEFT" not in found.output
    for says in (
        "assert (1 * 2) == 0",
        "on rank 1: Traceback",
        "KeyError: 'planted'",
        "for a reason",
        "this rank has ended",
        "about to end",
        "in test_hangs",
    ):
        assert says in found.output, (says, found.output)
