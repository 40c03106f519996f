"""A signal to a whole process group, and the code with which its ranks end."""

from __future__ import annotations

import pickle
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from processes import run
from torch.utils.data import DataLoader, Dataset

from lightning_dist.elastic.data.workers import EndsAtSecondSignal, keep_workers
from lightning_dist.elastic.process.lifecycle import (
    EXIT_LEAVE,
    EXIT_RESTART,
    EXIT_UNSAVED,
    ProcessLifecycle,
)
from lightning_dist.elastic.process.preemption import PREEMPTED, PreemptionListener
from lightning_dist.elastic.settings import RunSettings

SCRIPT = textwrap.dedent("""
    import os, signal, subprocess, sys
    from torch.utils.data import DataLoader
    from lightning_dist.elastic.data.workers import keep_workers

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    context = sys.argv[2] if len(sys.argv) > 2 else "fork"
    workers = 2 if context == "fork" else 1  # others import torch
    loader = DataLoader(range(40), num_workers=workers, multiprocessing_context=context)
    if sys.argv[1] == "kept":
        keep_workers(loader, [signal.SIGTERM])
    seen = []
    for number, batch in enumerate(loader):
        seen.append(int(batch))
        if number == 5:
            group = f"-{os.getpgid(0)}"
            subprocess.run(["kill", "-TERM", "--", group], start_new_session=True)
    assert told and seen == list(range(40))
    if context == "fork":
        workers = iter(loader)  # left behind: Python ends them at the end
        next(workers)
    print("all seen")
""")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_outlive_the_first_signal(
    context: str, tmp_path: Path, quick_python: list[str]
) -> None:
    script = tmp_path / "script.py"  # spawned workers import it
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(SCRIPT, '    ')}")
    done = run([*quick_python, script, "kept", context], limit=60).require_success()
    assert "all seen" in done.output


def test_without_it_they_take_the_training_down(quick_python: list[str]) -> None:
    done = run([*quick_python, "-c", SCRIPT, "as they are"], limit=60)
    assert done.returncode == 1
    assert "all seen" not in done.output


def test_they_collect_no_garbage_of_their_parent(quick_python: list[str]) -> None:
    """A process group of an earlier training, in a circle of references, would crash them."""
    code = textwrap.dedent("""
        import gc, os
        from signal import SIGTERM
        from torch.utils.data import DataLoader
        from lightning_dist.elastic.data.workers import keep_workers

        class Circle:
            def __init__(self):
                self.own = self
            def __del__(self):
                os.write(1, b"parent" if os.getpid() == parent else b"worker")

        def collect(batch):
            gc.collect()
            return batch

        gc.disable()
        parent = os.getpid()
        loader = DataLoader(range(4), num_workers=2, collate_fn=collect)
        keep_workers(loader, [SIGTERM])
        Circle()
        assert len(list(loader)) == 4
        gc.collect()
    """)
    assert run([*quick_python, "-c", code], limit=60).require_success().output == "parent"


def first(worker: int) -> None:
    raise RuntimeError(f"worker {worker} begins")


def test_what_the_user_wants_of_a_worker_still_happens() -> None:
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=first)
    keep_workers(loader, [signal.SIGTERM])
    keep_workers(loader, [signal.SIGTERM])  # a second fit
    assert isinstance(loader.worker_init_fn, EndsAtSecondSignal)
    assert loader.worker_init_fn.usual is first
    again = pickle.loads(pickle.dumps(loader.worker_init_fn))  # for workers that are not forks
    assert again.usual is first


def test_the_users_own_begin_is_called(capfd: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=first)
    keep_workers(loader, [signal.SIGTERM])
    with pytest.raises(RuntimeError, match="worker 0 begins"):
        list(loader)


def test_a_loader_without_workers_stays_as_it_is() -> None:
    loader = DataLoader(range(4))
    keep_workers(loader, [signal.SIGTERM])
    keep_workers([1, 2], [signal.SIGTERM])
    assert loader.worker_init_fn is None


class Started(Dataset):
    """The exit code of a program that a worker has started and ended, by how it was."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        getattr(program, "kill" if index else "terminate")()
        program.communicate(timeout=60)  # its input ends, which ends it too
        return program.returncode


def test_programs_of_a_worker_end_as_documented() -> None:
    loader = DataLoader(Started(), batch_size=None, num_workers=1)
    assert list(loader) == [-signal.SIGTERM, -signal.SIGKILL]
    keep_workers(loader, [signal.SIGTERM])
    assert list(loader) == [0, -signal.SIGKILL]


class Account:
    """Takes note of the end."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, bool]] = []

    def end(self, reason: str, *, is_echo: bool = False) -> None:
        self.ends.append((reason, is_echo))


def codes_of(
    patch: pytest.MonkeyPatch,
    reasons: list[str],
    *,
    nodes: tuple[int, ...] = (0, 0, 1, 1),
    is_saved: bool = True,
) -> list[int]:
    """Exit codes of all ranks under torchrun, which are on ``nodes``."""
    codes = []
    patch.setenv("TORCHELASTIC_RUN_ID", "job")
    told = [*zip(nodes, reasons, strict=True)]
    for node, reason in told:
        patch.setenv("GROUP_RANK", str(node))
        account = Account()
        life = ProcessLifecycle(RunSettings("folder"), account)
        life._notices = PreemptionListener([])
        life._notices.reason = reason
        codes.append(life.stop(told, is_saved=is_saved))
        assert account.ends == [(reason or "peer preempted", not reason)]
    return codes


def test_preempted_ranks_exit_with_0_and_others_ask_for_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = codes_of(monkeypatch, ["", "SIGTERM", "", ""])
    assert codes == [EXIT_RESTART, 0, EXIT_RESTART, EXIT_RESTART]


def test_no_rank_of_a_machine_that_goes_asks_for_a_restart_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank of each machine asks the cloud, and its notice is for all of them."""
    codes = codes_of(monkeypatch, ["", "", PREEMPTED, ""])
    assert codes == [EXIT_RESTART, EXIT_RESTART, 0, EXIT_LEAVE]


@pytest.mark.parametrize(
    ("nodes", "goes"), [((1, 1, 2, 2), 1), ((1, 1, 2, 2), 2), ((0, 2, 2), 2), ((1, 2, 0, 0), 0)]
)
def test_the_machine_that_goes_is_known_where_nodes_have_left_or_joined(
    nodes: tuple[int, ...], goes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the rank that the launcher has given to a process is not that among the members."""
    first = nodes.index(goes)
    reasons = [PREEMPTED if rank == first else "" for rank in range(len(nodes))]
    here = [0 if rank == first else EXIT_LEAVE for rank in range(len(nodes))]
    codes = codes_of(monkeypatch, reasons, nodes=nodes)
    wanted = zip(nodes, here, strict=True)
    assert codes == [code if node == goes else EXIT_RESTART for node, code in wanted]


def test_without_a_checkpoint_nobody_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(monkeypatch, ["", "SIGTERM"], nodes=(0, 0), is_saved=False)
    assert codes == [EXIT_UNSAVED] * 2


def test_a_machine_that_goes_is_left_without_a_checkpoint_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = codes_of(monkeypatch, ["", "", PREEMPTED, ""], is_saved=False)
    assert codes == [EXIT_UNSAVED, EXIT_UNSAVED, EXIT_LEAVE, EXIT_LEAVE]


def test_where_nobody_restarts_ranks_all_end_well() -> None:
    life = ProcessLifecycle(RunSettings("folder"), Account())
    assert life.stop([(0, ""), (0, "SIGTERM")], is_saved=True) == 0
