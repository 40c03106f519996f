"""A copy or a writer that is stuck holds a training up for so long; copies that a test holds."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointers import LIMIT, HeldCopies, held_copies, opened, opened_together, stopped_writer
from processes import environment_of
from snapshots import assert_equal, small_state, trained
from torch import nn
from worlds import Rank, run_threads

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.jobs import Committed, Failed
from lightning_dist.checkpoint.saves import Saves
from lightning_dist.checkpoint.snapshot.snapshot import Fence, LaterCopy
from lightning_dist.ranks.agreement import Ranks
from lightning_dist.settings.run import CheckpointSettings


class Foreign(torch.optim.SGD):
    """Of no known package: it may change parameters before it calls its closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(100)
        return super().step(closure)


def parameter_and_optimizer() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    return parameter, torch.optim.SGD([parameter], lr=0.5)


def test_a_step_waits_for_another_thread_and_the_time_is_counted() -> None:
    parameter, optimizer = parameter_and_optimizer()
    fence, entered = Fence(), threading.Event()
    fence.watch([optimizer])
    fence.close()
    thread = threading.Thread(target=lambda: (entered.wait(LIMIT), fence.open()))
    thread.start()
    optimizer.step(lambda: entered.set())
    thread.join(LIMIT)
    assert parameter.tolist() == [0.5] * 4
    assert fence.waited > 0


def test_a_step_that_the_scaler_skips_does_not_wait() -> None:
    parameter, optimizer = parameter_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fence = Fence()
    fence.watch([optimizer])
    scaler.scale((parameter * torch.inf).sum()).backward()
    fence.close()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0] * 4
    assert fence.waited == 0


def test_only_watched_optimizers_wait() -> None:
    (one, watched), (other, forgotten) = (parameter_and_optimizer() for _ in range(2))
    fence = Fence()
    fence.watch([forgotten])
    fence.watch([watched])
    fence.close()
    forgotten.step()
    fence.unwatch()
    watched.step()
    assert one.tolist() == other.tolist() == [0.5] * 4
    assert fence.waited == 0


Watch = Callable[..., Checkpointer]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A checkpointer that watches these optimizers."""
    checkpointer = Checkpointer(CheckpointSettings(writer="thread"))
    checkpointer.open(str(tmp_path))

    def watch(*optimizers: torch.optim.Optimizer) -> Checkpointer:
        checkpointer.watch(optimizers)
        return checkpointer

    yield watch
    checkpointer.close()


def let_go_when_begun(held: HeldCopies) -> None:
    threading.Thread(target=lambda: (held.begun.wait(LIMIT), held.go.set())).start()


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}


def frozen(state: Any) -> Any:
    """The same values in memory of their own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return type(state)((key, frozen(value)) for key, value in state.items())
    return [frozen(value) for value in state] if isinstance(state, list) else state


def backward(model: nn.Module) -> torch.Tensor:
    loss = (model(torch.full((4, 13), 0.5)) ** 2).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (Foreign, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("closure", [None, lambda: 0.0], ids=["step", "closure"])
def test_a_step_right_behind_the_copy_is_not_in_it(
    kind: Any,
    arguments: dict[str, Any],
    closure: Callable[[], Any] | None,
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = trained(kind, **arguments)
    checkpointer = watch(optimizer)
    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, optimizer))
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/a.ckpt", step=1)
        backward(model)  # changes the buffers of the batch norm, and gradients
        let_go_when_begun(held)
        optimizer.step(closure)
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "a.ckpt"), before)
    assert not torch.equal(model[0].weight, before["model"]["0.weight"])
    assert [type(event) for event in checkpointer.poll()] == [Committed]


@pytest.mark.parametrize("positional", [True, False])
def test_a_step_with_a_closure_lets_the_passes_run_first(
    positional: bool, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    checkpointer = watch(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(model)
        held.go.set()
        return loss

    for step in range(2):  # the second has a state to copy
        with held_copies(monkeypatch) as held:
            before = frozen(state_of(model, optimizer))
            checkpointer.save(state_of(model, optimizer), f"{tmp_path}/{step}.ckpt", step=step)
            optimizer.step(closure) if positional else optimizer.step(closure=closure)
        checkpointer.wait(LIMIT)
        assert_equal(torch.load(tmp_path / f"{step}.ckpt"), before)
    checkpointer.close()
    assert [type(event) for event in checkpointer.poll()] == [Committed] * 2


def test_two_optimizers_of_one_state(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained()
    backward(model)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    checkpointer = watch(*optimizers)
    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, *optimizers))
        checkpointer.save(state_of(model, *optimizers), f"{tmp_path}/a.ckpt", step=1)
        let_go_when_begun(held)
        for optimizer in reversed(optimizers):
            optimizer.step()
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "a.ckpt"), before)


TEARS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.add_(1),
    "through data": lambda p: p.data.add_(1),
    "through data, not at its start": lambda p: p.data[3:].add_(1),
    "one element": lambda p: p[3, 5].fill_(7),
}


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("tear", TEARS)
def test_a_write_outside_a_step_drops_that_save_and_ends_overlapping(
    tear: str, after: bool, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    checkpointer = watch(optimizer)
    with held_copies(monkeypatch, after=after) as held:
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/torn.ckpt", step=1)
        assert held.begun.wait(LIMIT)
        with torch.no_grad():
            TEARS[tear](model[0].weight)
    checkpointer.wait(LIMIT)
    (event,) = checkpointer.poll()
    assert isinstance(event, Failed)
    assert event.reason.startswith("Parameter of shape (7, 13) was changed outside an optimizer")
    assert "snapshot='blocking'" in event.reason
    assert not (tmp_path / "torn.ckpt").exists()

    with held_copies(monkeypatch) as held:
        before = frozen(state_of(model, optimizer))
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/next.ckpt", step=2)
        with torch.no_grad():
            TEARS[tear](model[0].weight)
        backward(model)
        optimizer.step()
        assert not held.begun.is_set(), "the next save was not copied at once"
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "next.ckpt"), before)


def test_an_error_of_the_copy_fails_the_save_and_opens_the_fence(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    checkpointer = watch(optimizer)

    def fail(_: object) -> str:
        raise RuntimeError("no such memory")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_dist.checkpoint.snapshot.snapshot.LaterCopy.run", fail)
        checkpointer.save(state_of(model, optimizer), f"{tmp_path}/a.ckpt", step=1)
        backward(model)
        optimizer.step()
        checkpointer.wait(LIMIT)
    (event,) = checkpointer.poll()
    assert isinstance(event, Failed)
    assert event.reason == "the snapshot failed: RuntimeError('no such memory')"
    checkpointer.save(state_of(model, optimizer), f"{tmp_path}/b.ckpt", step=2)
    checkpointer.close()
    assert_equal(torch.load(tmp_path / "b.ckpt"), state_of(model, optimizer))


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
        assert not checkpointer._queue._free  # it may still be copied to
    assert isinstance(error, CheckpointError)
    assert "still being copied after 0.2 s" in str(error)
    assert f"{tmp_path}/1.ckpt" in str(error)


COPIES = """
import sys
from lightning_dist.checkpoint.snapshot.snapshot import LaterCopy
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.settings.run import CheckpointSettings
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
        monkeypatch.setattr(checkpointer._queue, "_patience", 0.2)
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
        monkeypatch.setattr(checkpointer._queue, "_patience", 0.2)
        error = ends(checkpointer.wait_for_turn)
    assert isinstance(error, CheckpointError)
    assert "still being written after 0.7 s" in str(error)


def save_part(checkpointer: Checkpointer, group: Any, target: str) -> None:
    checkpointer.save(small_state(2), target, step=2, sharded=True)


def save_files(checkpointer: Checkpointer, group: Any, target: str) -> None:
    checkpointer.save_files([], target, step=2)


def take_turn(checkpointer: Checkpointer, group: Any, target: str) -> None:
    saves = Saves(checkpointer, ranks=Ranks(group), warn=print)
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
                checkpointer._queue._patience = 0.2
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
