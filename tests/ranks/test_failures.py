"""Errors of collectives are known by where they are raised, and not by their text."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run

from lightning_dist.ranks.channel import WaitLimit
from lightning_dist.ranks.failures import CollectiveError, is_of_collective

TEXTS = (
    "Connection reset by peer: my database",
    "[gloo] Connection closed by peer",
    "NCCL error",
    "ProcessGroup",
    "DataLoader worker (pid 1) is killed by signal: Terminated.",
)


class Own(RuntimeError):
    """Of somebody else."""


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("text", TEXTS)
def test_no_text_makes_an_error_that_of_a_collective(text: str) -> None:
    assert not is_of_collective(RuntimeError(text))
    assert not is_of_collective(raised(RuntimeError(text)))


@pytest.mark.parametrize(
    ("kind", "is_it"), [(RuntimeError, True), (MemoryError, False), (Own, False)]
)
def test_the_place_makes_an_error_without_a_class_that_of_a_collective(
    kind: type[Exception], is_it: bool
) -> None:
    """One of a derived class, such as torch's OutOfMemoryError, says something else."""
    place = {"__name__": "torch.distributed.distributed_c10d", "error": kind("text")}
    with pytest.raises(kind) as caught:
        exec("raise error", place)
    assert is_of_collective(caught.value) == is_it


@pytest.mark.parametrize("kind", [CollectiveError, dist.DistBackendError, dist.DistNetworkError])
def test_classes_do(kind: type[RuntimeError]) -> None:
    assert is_of_collective(kind("text"))


def test_waits_of_this_package_raise_the_class() -> None:
    limit = WaitLimit()
    limit.give_up()
    with pytest.raises(CollectiveError, match="Gave up waiting for a sum"):
        limit.wait(dist.Work(), what="a sum")  # type: ignore[call-arg]


PEERS = """
import os, sys
import torch, torch.distributed as dist
from lightning_dist.ranks.failures import is_of_collective

rank = int(os.fork() == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    os._exit(0)
try:
    dist.all_reduce(torch.zeros(1))
except RuntimeError as error:
    print(type(error).__name__, is_of_collective(error))
os.wait()
"""


def test_a_collective_of_torch_whose_peer_is_gone(tmp_path: Path) -> None:
    """Raised in torch's function, whoever calls it, without a class of its own."""
    done = run([sys.executable, "-c", PEERS, str(tmp_path / "store")], limit=60.0)
    assert done.output.splitlines()[-1] == "RuntimeError True"
