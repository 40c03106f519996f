"""A copy or a writer that is stuck holds a training up for so long, and no longer."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpointers import LIMIT, opened, opened_together, stopped_writer
from processes import environment_of
from snapshots import small_state, trained
from worlds import Rank, run_threads

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Failed
from lightning_dist.checkpoint.ranks import Ranks
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.snapshot.copying import LaterCopy


def ends(action: Callable[[], object]) -> Exception | None:
    """What ``action`` raises; it fails the test where it does not return."""
    raised: list[Exception | None] = []

    def run() -> None:
        try:
            action()
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert raised, f"it did not return within {LIMIT:.0f} s"
    return raised[0]


@contextmanager
def stuck_copy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Checkpointer, Callable[[], object]]]:
    """A save whose copy does not end, and the optimizer's next step."""
    model, optimizer = trained()
    checkpointer, goes_on = Checkpointer(CheckpointSettings()), threading.Event()
    monkeypatch.setattr(LaterCopy, "run", lambda self: goes_on.wait(2 * LIMIT) and "")
    checkpointer.open(str(folder))
    checkpointer.watch([optimizer])
    checkpointer.save(model.state_dict(), f"{folder}/1.ckpt", step=1)
    try:
        yield checkpointer, optimizer.step
    finally:
        goes_on.set()


def test_closing_waits_for_a_copy_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stuck_copy(tmp_path, monkeypatch) as (checkpointer, _):
        error = ends(lambda: checkpointer.close(0.2))
        assert not checkpointer._delivery._free  # it may still be copied to
    assert isinstance(error, CheckpointError)
    assert "still being copied after 0.2 s" in str(error)
    assert f"{tmp_path}/1.ckpt" in str(error)


COPIES = """
import sys
from lightning_dist.checkpoint.snapshot.copying import LaterCopy
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.settings import CheckpointSettings
from snapshots import trained

folder, writer, closes = sys.argv[1:]
model, optimizer = trained()
checkpointer = Checkpointer(CheckpointSettings(writer=writer))
checkpointer.open(folder)
checkpointer.watch([optimizer])
copy = LaterCopy.run
LaterCopy.run = lambda self: sys.stdin.readline() and copy(self)
checkpointer.save(model.state_dict(), f"{folder}/1.ckpt", step=1)
print("ends", flush=True)
try:
    if closes == "closes":
        checkpointer.close(0.2)
except CheckpointError as error:
    print(error, flush=True)
"""


@contextmanager
def copying(
    python: list[str], folder: Path, writer: str, closes: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process at its end, whose copy goes on with a line of its input."""
    command = [*python, "-c", COPIES, str(folder), writer, closes]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = environment_of({"TAKEN_APART": "1"})
    with subprocess.Popen(command, env=environment, **pipes) as process:
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        yield process
        timer.cancel()


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_process_ends_although_a_copy_is_stuck(
    tmp_path: Path, writer: str, quick_python: list[str]
) -> None:
    with copying(quick_python, tmp_path / "here", writer, "closes") as process:
        assert process.wait() == 0
        assert process.stdout is not None
        said = process.stdout.read().decode()
    assert "1.ckpt is still being copied after 0.2 s, and was dropped" in said


def test_a_copy_that_goes_on_is_waited_for_at_the_end_of_a_process(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """Of a script that closes nothing."""
    with copying(quick_python, tmp_path, "auto", "") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ends\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.stdin.write(b"go on\n")
        process.stdin.close()
        assert process.wait() == 0
    with opened(tmp_path):  # its writer has ended
        assert (tmp_path / "1.ckpt").exists()


def test_a_step_waits_for_a_copy_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stuck_copy(tmp_path, monkeypatch) as (checkpointer, step):
        monkeypatch.setattr(checkpointer._snapshots.fence, "_patience", 0.2)
        error = ends(step)
        assert isinstance(error, CheckpointError)
        assert "copy of a checkpoint did not complete within 0.2 s" in str(error)
        ends(lambda: checkpointer.close(0.2))


def test_a_save_waits_for_a_stuck_writer_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as checkpointer, stopped_writer(checkpointer):
        checkpointer.save(small_state(1), f"{tmp_path}/1.ckpt", step=1)
        monkeypatch.setattr(checkpointer._delivery, "_patience", 0.2)
        error = ends(lambda: checkpointer.save(small_state(2), f"{tmp_path}/2.ckpt", step=2))
    assert isinstance(error, CheckpointError)
    assert f"{tmp_path}/1.ckpt is still being written after" in str(error)
    assert (tmp_path / "1.ckpt").exists()


def test_the_wait_allows_for_the_bytes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AsyncStateCheckpointer saves them; an upload of 2 MB/s is slow, not stuck."""
    (tmp_path / "optimizer.bin").write_bytes(bytes(1_000_000))
    with opened(tmp_path / "here") as checkpointer, stopped_writer(checkpointer):
        files = [("optimizer.bin", f"{tmp_path}/optimizer.bin")]
        checkpointer.save_files(files, f"{tmp_path}/here/1", step=1)
        monkeypatch.setattr(checkpointer._delivery, "_patience", 0.2)
        error = ends(checkpointer.wait_for_turn)
    assert isinstance(error, CheckpointError)
    assert "still being written after 0.7 s" in str(error)


def save_part(checkpointer: Checkpointer, group: Any, target: str) -> None:
    checkpointer.save(small_state(2), target, step=2, sharded=True)


def save_files(checkpointer: Checkpointer, group: Any, target: str) -> None:
    checkpointer.save_files([], target, step=2)


def take_turn(checkpointer: Checkpointer, group: Any, target: str) -> None:
    saves = Saves(checkpointer, CheckpointSettings(), ranks=Ranks(group), warn=print)
    saves.agree({}, error=saves.await_turn())


@pytest.mark.parametrize("action", [save_part, save_files, take_turn])
def test_a_stuck_writer_of_one_rank_is_an_error_on_all_ranks(
    tmp_path: Path, action: Callable[[Checkpointer, Any, str], None]
) -> None:
    """And nobody waits in a collective for the rank that gave up."""

    def body(rank: Rank) -> Exception | None:
        error: Exception | None = None
        with ExitStack() as stack:
            checkpointer = stack.enter_context(opened_together(tmp_path / "together", rank))
            if rank.rank == 1:
                stack.enter_context(stopped_writer(checkpointer))
                checkpointer.save(small_state(1), f"{tmp_path}/together/mine.ckpt", step=1)
                checkpointer._delivery._patience = 0.2
            try:
                action(checkpointer, rank.group("checkpoint"), f"{tmp_path}/together/2")
            except Exception as raised:
                error = raised
        return error

    for error in run_threads(body, 2):
        assert isinstance(error, CheckpointError)
        assert "mine.ckpt is still being written after 0.2 s" in str(error)


def test_a_writer_that_crashes_says_why(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        with stopped_writer(checkpointer) as writer:
            writer._put("nothing that it knows")
            checkpointer.save(small_state(1), f"{tmp_path}/1.ckpt", step=1)
        checkpointer.wait(LIMIT)
        (event,) = [each for each in checkpointer.poll() if isinstance(each, Failed)]
    assert event.reason.startswith(
        f"the checkpoint writer (process {writer.pid}) has ended with exit status 1: AttributeError"
    )
