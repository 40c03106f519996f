"""The engine as a trainer uses it: its settings, its first save, a real writer."""

import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import stores  # noqa: F401, for its bucket
import torch
from checkpointers import LIMIT, opened, stopped_writer, writer_of
from snapshots import assert_equal, small_state, trained

from lightning_dist import AsyncTorchCheckpointIO
from lightning_dist.checkpoint import writers
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.disk.scan import checkpoints, newest_valid, verify
from lightning_dist.checkpoint.reading import load
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.checkpoint.writers import WriterThread
from lightning_dist.ranks.agreement import Ranks
from lightning_dist.settings.run import CheckpointSettings


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("snapshot", ["overlap", "blocking", "sync"])
def test_what_is_saved_is_loaded(tmp_path: Path, writer: str, snapshot: str) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **small_state()}
    with opened(tmp_path, writer=writer, snapshot=snapshot) as checkpointer:
        checkpointer.watch([optimizer])
        for step in (1, 2):
            checkpointer.save(state, f"{tmp_path}/{step}.ckpt", step=step)
            if snapshot == "sync":
                assert verify(f"{tmp_path}/{step}.ckpt").kind == "single"
        checkpointer.link(f"{tmp_path}/2.ckpt", f"{tmp_path}/last.ckpt")
        checkpointer.remove(f"{tmp_path}/1.ckpt")
        checkpointer.wait(LIMIT)
        assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["2.ckpt", "last.ckpt"]
        assert [type(event) for event in checkpointer.poll()] == [Committed] * 2
        assert checkpointer.poll() == []
        assert (checkpointer.metrics.saves, checkpointer.metrics.failed) == (2, 0)
        assert checkpointer.last_committed is not None
        assert checkpointer.last_committed.origin.step == 2
    assert_equal(load(f"{tmp_path}/last.ckpt"), state)


def test_saves_wait_for_a_free_slot_and_closing_twice_is_fine(tmp_path: Path) -> None:
    with opened(tmp_path, max_in_flight=2) as checkpointer:
        with stopped_writer(checkpointer):
            checkpointer.save(small_state(1), f"{tmp_path}/1.ckpt", step=1)
            assert not checkpointer.busy
            checkpointer.save(small_state(2), f"{tmp_path}/2.ckpt", step=2)
            assert checkpointer.busy
            assert checkpointer.is_pending(f"{tmp_path}/1.ckpt")
            assert not checkpointer.is_pending(f"{tmp_path}/3.ckpt")
            with pytest.raises(TimeoutError, match=r"Still writing after 0\.1 s: .*/1\.ckpt, "):
                checkpointer.wait(0.1)
            assert list(tmp_path.glob("*.ckpt")) == []
        checkpointer.save(small_state(3), f"{tmp_path}/3.ckpt", step=3)
        checkpointer.close(LIMIT)
    for step in (1, 2, 3):
        assert_equal(load(f"{tmp_path}/{step}.ckpt"), small_state(step))


def test_the_state_may_change_once_save_has_returned(tmp_path: Path) -> None:
    state = small_state()
    with opened(tmp_path) as checkpointer, stopped_writer(checkpointer):
        checkpointer.save(state, f"{tmp_path}/1.ckpt", step=1)
        state["weight"].zero_()
    assert_equal(load(f"{tmp_path}/1.ckpt"), small_state())


def test_states_may_grow_and_shrink(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        for step, nbytes in enumerate([10, 300_000, 10, 500_000]):
            state = {"weight": torch.full((nbytes,), step, dtype=torch.uint8)}
            checkpointer.save(state, f"{tmp_path}/{step}.ckpt", step=step)
            checkpointer.wait(LIMIT)
            assert_equal(load(f"{tmp_path}/{step}.ckpt"), state)


def test_a_writer_that_is_killed_is_reported_once_and_replaced(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        pid = writer_of(checkpointer).pid
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(small_state(1), f"{tmp_path}/1.ckpt", step=1)
        checkpointer.remove(f"{tmp_path}/0.ckpt")
        os.kill(pid, signal.SIGKILL)
        checkpointer.wait(LIMIT)
        failed = [e for e in checkpointer.poll() if isinstance(e, Failed) and e.origin is not None]
        assert [event.target for event in failed] == [f"{tmp_path}/1.ckpt"]
        assert failed[0].reason == (
            f"the checkpoint writer (process {pid}) has ended with exit status -9"
        )
        checkpointer.save(small_state(2), f"{tmp_path}/2.ckpt", step=2)
        checkpointer.wait(LIMIT)
        assert [type(event) for event in checkpointer.poll()] == [Committed]
        assert writer_of(checkpointer).pid != pid
    assert_equal(load(f"{tmp_path}/2.ckpt"), small_state(2))


def test_the_writer_finishes_when_its_trainer_is_killed(tmp_path: Path) -> None:
    """The trainer dies after the copy and before a byte is written."""
    child = os.fork()
    if child == 0:
        checkpointer = Checkpointer(CheckpointSettings())
        checkpointer.open(str(tmp_path))
        checkpointer.save(small_state(0), f"{tmp_path}/0.ckpt", step=0)
        checkpointer.wait(LIMIT)  # the writer is up, and keeps the folder
        with stopped_writer(checkpointer):
            checkpointer.save(small_state(1), f"{tmp_path}/1.ckpt", step=1)
            checkpointer._queue._thread.submit(int).result(LIMIT)  # it has been sent
            if not os.path.exists(f"{tmp_path}/1.ckpt"):
                (tmp_path / "not yet").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    lock = own(str(tmp_path), patience=LIMIT)  # the writer keeps the folder until it has finished
    assert lock is not None
    lock.release()
    assert (tmp_path / "not yet").exists()
    assert_equal(load(f"{tmp_path}/1.ckpt"), small_state(1))


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_object_stores(kind: str) -> None:
    url = f"{kind}://{uuid.uuid4().hex}"
    writer = "thread" if kind == "bucket" else "auto"  # another process has not this bucket
    with opened(url, writer=writer) as checkpointer:
        assert isinstance(checkpointer._queue.writer, WriterThread)
        checkpointer.save(small_state(), f"{url}/1.ckpt", step=1)
    assert_equal(load(f"{url}/1.ckpt"), small_state())


def test_a_process_cannot_write_to_the_memory_of_this_one() -> None:
    checkpointer = Checkpointer(CheckpointSettings(writer="process"))
    with pytest.raises(ValueError, match="which is in the memory of this process"):
        checkpointer.open("memory://x")
    checkpointer.close()


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_snapshots_keep_within_the_limit_of_memory(tmp_path: Path, max_in_flight: int) -> None:
    limit = 10_000 * max_in_flight
    settings = {"host_memory_limit": limit, "max_in_flight": max_in_flight, "writer": "thread"}
    with opened(tmp_path, **settings) as checkpointer:
        checkpointer.save(torch.zeros(9000, dtype=torch.uint8), f"{tmp_path}/1.ckpt", step=1)
        with pytest.raises(ValueError, match=f"host_memory_limit={limit} bytes is less than"):
            checkpointer.save(torch.zeros(10001, dtype=torch.uint8), f"{tmp_path}/2.ckpt", step=2)
        checkpointer.save(small_state(), f"{tmp_path}/3.ckpt", step=3)
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["1.ckpt", "3.ckpt"]


def test_good_values_pass() -> None:
    CheckpointSettings(snapshot="sync", verify="always", on_error="warn", host_memory_limit=1)
    CheckpointSettings(snapshot="overlap", max_in_flight=3, on_busy="skip", writer="process")


def test_what_is_written_beside_an_owner_is_not_cleared_away(tmp_path: Path) -> None:
    """A user saves by hand into the folder of a job that is being restarted."""
    by_hand = Checkpointer(CheckpointSettings())
    by_hand.open(str(tmp_path), alone=False)
    with stopped_writer(by_hand):
        by_hand.save(small_state(), f"{tmp_path}/mine.ckpt", step=1)
        lock = own(str(tmp_path))
    by_hand.close(LIMIT)
    assert lock is not None
    lock.release()
    (event,) = by_hand.poll()
    assert isinstance(event, Committed)
    assert event.origin.save_id.startswith("m")
    assert_equal(torch.load(tmp_path / "mine.ckpt"), small_state())


@pytest.mark.parametrize("sharded", [False, True])
def test_the_newest_is_what_was_saved_last_on_a_host_whose_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    now = time.time_ns()
    for step, behind in ((100, 0), (200, 30), (150, 90)):  # the last one went back on purpose
        with opened(tmp_path, writer="thread") as checkpointer:
            monkeypatch.setattr(time, "time_ns", lambda behind=behind: now - behind * 10**9)
            checkpointer.save(small_state(), f"{tmp_path}/{step}.ckpt", step=step, sharded=sharded)
            checkpointer.wait(LIMIT)
        newest = newest_valid(str(tmp_path))
        assert newest is not None
        assert newest.path == f"{tmp_path}/{step}.ckpt"


def test_a_clock_that_is_set_back_during_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    with opened(tmp_path, writer="thread") as checkpointer:
        for step in (1, 2, 3):
            monkeypatch.setattr(time, "time_ns", lambda step=step: now - step * 10**9)
            checkpointer.save(small_state(), f"{tmp_path}/{step}.ckpt", step=step)
            checkpointer.wait(LIMIT)
    found = [each.description for each in checkpoints(str(tmp_path)) if each.description]
    assert [each.origin.step for each in found if each.origin] == [3, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"snapshot": "lazy"},
            "snapshot must be 'auto', 'overlap', 'blocking' or 'sync', got 'lazy'",
        ),
        ({"on_busy": "drop"}, "on_busy must be 'wait' or 'skip', got 'drop'"),
        ({"writer": None}, "writer must be 'auto', 'process' or 'thread', got None"),
        ({"verify": True}, "verify must be 'resume', 'always' or 'never', got True"),
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'warn', got 'ignore'"),
        ({"lock": "no"}, "lock must be True or False, got 'no'"),
        ({"max_in_flight": 0}, "max_in_flight must be 1 or more saves, got 0"),
        ({"max_in_flight": 1.5}, "max_in_flight must be 1 or more saves, got 1.5"),
        (
            {"host_memory_limit": 0},
            "host_memory_limit must be 1 or more bytes, or None (no limit), got 0",
        ),
        ({"snapshot": "sync", "on_busy": "skip"}, "waits for every save, so on_busy='skip' cannot"),
    ],
)
def test_a_bad_value_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CheckpointSettings(**arguments)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Writers that start do nothing until something is written here."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setattr(writers, "_BOOT", f"open({str(path)!r}).read()\n{writers._BOOT}")
    yield path
    with suppress(OSError):  # nobody waits any more
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_the_first_save_returns_before_its_writer_has_started(tmp_path: Path, gate: Path) -> None:
    io = AsyncTorchCheckpointIO()
    path = tmp_path / "here" / "1.ckpt"
    saved = threading.Thread(target=io.save_checkpoint, args=(small_state(), path), daemon=True)
    saved.start()
    saved.join(LIMIT)
    waits = saved.is_alive()
    gate.write_text("go on")
    saved.join(LIMIT)
    io.teardown()
    assert not waits
    assert_equal(load(str(path)), small_state())


def test_a_trainer_that_is_killed_before_its_writer_has_started_loses_nothing(
    tmp_path: Path, gate: Path
) -> None:
    folder = tmp_path / "here"
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))
        io = AsyncTorchCheckpointIO()
        io.save_checkpoint(small_state(), folder / "1.ckpt")
        io._saves.checkpointer._queue._thread.submit(int).result(LIMIT)  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with pytest.raises(ValueError, match="its writer still holds"):
        own(str(folder), patience=0.1)
    gate.write_text("go on")
    lock = own(str(folder), patience=LIMIT)
    assert lock is not None
    lock.release()
    assert_equal(load(f"{folder}/1.ckpt"), small_state())
    assert os.listdir(folder) == ["1.ckpt"]


def test_after_a_move_checkpoints_record_the_ranks_that_are_left(tmp_path: Path) -> None:
    saves = Saves(
        Checkpointer(CheckpointSettings(writer="thread"), ranks=3), ranks=Ranks(None), warn=print
    )
    saves.move(Ranks(None))
    saves.open(str(tmp_path), together=False)
    saves.checkpointer.save(small_state(), f"{tmp_path}/1.ckpt", step=1)
    saves.close(LIMIT)
    assert saves.last_committed is not None
    assert saves.last_committed.origin.ranks == 1


def test_a_rank_that_does_not_write_has_no_writer() -> None:
    checkpointer = Checkpointer(CheckpointSettings(on_busy="wait"))
    saves = Saves(checkpointer, ranks=Ranks(None), writes=False, warn=print)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    saves.watch([optimizer])
    assert saves.await_turn() is None
    assert checkpointer._queue.writer is None
    assert not optimizer._optimizer_step_pre_hooks
    saves.close(LIMIT)
