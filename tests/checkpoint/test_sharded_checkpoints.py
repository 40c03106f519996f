"""Several ranks save one folder together; what is loaded is what one rank would have saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.filesize import decimal
from snapshots import assert_equal, folder_saves, open_together, write_folder
from torch import nn
from worlds import Rank, run_threads

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.disk.manifest import Manifest
from lightning_dist.checkpoint.disk.verify import describe, verify
from lightning_dist.checkpoint.reading import consolidate, load
from lightning_dist.checkpoint.saves import committed_line
from lightning_dist.checkpoint.settings import CheckpointSettings

Kind = Literal["process", "thread"]
LIMIT = 30.0
_SEEDED = threading.Lock()
"""The threads of a world share one random state."""


def model_of(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Alike on all ranks but for the buffers; the first and the last weight are tied."""
    with _SEEDED, torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    model[1].running_mean += rank
    return model, optimizer


def state_of(rank: int, extra: int = 0) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model, optimizer = model_of(rank)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rank": rank}
    return {"extra": [torch.zeros(9) for _ in range(extra)], **state}, optimizer


def save_on_all_ranks(
    target: Path, ranks: int, writer: Kind, extra: Callable[[int], int] = lambda rank: 0
) -> None:
    settings = CheckpointSettings(writer=writer)

    def body(rank: Rank) -> list[object]:
        state, optimizer = state_of(rank.rank, extra(rank.rank))
        checkpointer = Checkpointer(settings, group=rank.group("checkpoint"))
        open_together(checkpointer, target.parent, rank)
        checkpointer.watch([optimizer])
        checkpointer.save(state, str(target), step=1, sharded=True)
        checkpointer.close(LIMIT)
        return list(checkpointer.poll())

    for events in run_threads(body, ranks):
        assert [type(event) for event in events] == [Committed], events


@pytest.mark.parametrize(
    ("ranks", "writer"), [(1, "thread"), (2, "thread"), (2, "process"), (3, "thread")]
)
def test_all_ranks_save_one_state(tmp_path: Path, ranks: int, writer: Kind) -> None:
    target = tmp_path / "x.ckpt"
    save_on_all_ranks(target, ranks, writer)
    loaded = load(str(target))
    assert_equal(loaded, state_of(0)[0])
    weights = [loaded["model"][f"{layer}.weight"] for layer in (0, 2)]
    assert weights[0].data_ptr() == weights[1].data_ptr(), "they are tied no more"
    shards = [path.stat().st_size for path in target.glob("*.bin")]
    assert len(shards) == ranks
    described = verify(str(target))
    assert (described.kind, described.nbytes) == ("sharded", sum(shards))
    assert described.origin is not None
    assert described.origin.ranks == ranks


def test_a_folder_becomes_one_file_for_torch(tmp_path: Path) -> None:
    save_on_all_ranks(tmp_path / "x.ckpt", 2, "thread")
    nbytes = consolidate(f"{tmp_path}/x.ckpt", f"{tmp_path}/one.ckpt")
    assert nbytes == (tmp_path / "one.ckpt").stat().st_size
    assert_equal(torch.load(tmp_path / "one.ckpt", mmap=True), state_of(0)[0])
    one, many = (verify(f"{tmp_path}/{name}.ckpt") for name in ("one", "x"))
    assert (one.kind, one.origin) == ("single", many.origin)
    with pytest.raises(ValueError, match="exists; remove it first"):
        consolidate(f"{tmp_path}/x.ckpt", f"{tmp_path}/one.ckpt")
    with pytest.raises(ValueError, match="Only a folder of shards can be consolidated"):
        consolidate(f"{tmp_path}/one.ckpt", f"{tmp_path}/two.ckpt")


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_ranks_that_do_not_agree_leave_it_to_rank_0(tmp_path: Path, writer: Kind) -> None:
    """Rank 1 has one tensor more, so that all its records have other numbers."""
    target = tmp_path / "x.ckpt"
    save_on_all_ranks(target, 2, writer, extra=lambda rank: rank)
    assert_equal(load(str(target)), state_of(0)[0])
    text = (target / "manifest.json").read_text()
    assert len(Manifest.from_json(text, path=str(target)).files) == 1


class Unpicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("holds a socket")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_save_stops_all_before_they_wait(tmp_path: Path, bad: int) -> None:
    def body(rank: Rank) -> str:
        checkpointer = Checkpointer(CheckpointSettings(), group=rank.group("checkpoint"))
        open_together(checkpointer, tmp_path, rank)
        state = {"bad": Unpicklable() if rank.rank == bad else None}
        with pytest.raises(ValueError, match="cannot save") as raised:
            checkpointer.save(state, f"{tmp_path}/x.ckpt", step=1, sharded=True)
        checkpointer.close(LIMIT)
        return str(raised.value)

    wanted = f"rank {bad} cannot save its state: TypeError: holds a socket"
    assert run_threads(body, 2) == [wanted] * 2
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_rank_without_memory_tells_the_others(tmp_path: Path) -> None:
    """Only rank 0 takes the pickle, so only its limit is exceeded."""

    def body(rank: Rank) -> object:
        limit = 100 if rank.rank == 0 else None
        settings = CheckpointSettings(host_memory_limit=limit)
        checkpointer = Checkpointer(settings, group=rank.group("checkpoint"))
        open_together(checkpointer, tmp_path, rank)
        state, _ = state_of(rank.rank)
        if rank.rank == 0:
            with pytest.raises(ValueError, match="host_memory_limit=100"):
                checkpointer.save(state, f"{tmp_path}/x.ckpt", step=1, sharded=True)
        else:
            checkpointer.save(state, f"{tmp_path}/x.ckpt", step=1, sharded=True)
        checkpointer.wait(LIMIT)
        (event,) = checkpointer.poll()
        checkpointer.close(LIMIT)
        assert isinstance(event, Failed)
        return event.reason

    reasons = run_threads(body, 2)
    assert all("host_memory_limit=100" in str(reason) for reason in reasons), reasons


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_log_and_ls_say_the_same_size(tmp_path: Path, ranks: int) -> None:
    """That of the checkpoint, and not of what a rank has written of it."""
    target = f"{tmp_path}/x.ckpt"
    events = write_folder(folder_saves(target, {"weight": torch.randn(300_000)}, ranks))
    listed = decimal(describe(target).nbytes)
    for event in events:
        assert isinstance(event, Committed)
        assert f"is complete: {listed} in " in committed_line(event, blocking_ms=0.0)
    assert sum(event.nbytes for event in events) == describe(target).nbytes
