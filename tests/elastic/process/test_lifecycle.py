"""A signal to a whole process group, the codes with which ranks end, and what restarts cost."""

import json
import pickle
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from processes import run
from torch.utils.data import DataLoader, Dataset

from lightning_dist.elastic.data.sampling import EndsAtSecondSignal, keep_workers
from lightning_dist.elastic.process.lifecycle import (
    EXIT_LEAVE,
    EXIT_RESTART,
    EXIT_UNSAVED,
    PREEMPTED,
    PreemptionListener,
    ProcessLifecycle,
)
from lightning_dist.settings.run import RunSettings

SCRIPT = textwrap.dedent("""
    import os, signal, subprocess, sys
    from torch.utils.data import DataLoader
    from lightning_dist.elastic.data.sampling import keep_workers

    def to_the_group():
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], start_new_session=True)

    def until_told():  # a worker does not come to its worker_init_fn before
        while signal.SIGTERM not in signal.sigpending():
            os.sched_yield()

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    context = sys.argv[1]
    workers = 2 if context == "fork" else 1  # others import torch
    loader = DataLoader(range(40), num_workers=workers, multiprocessing_context=context)
    keep_workers(loader, [signal.SIGTERM])
    if context == "fork":
        seen = []
        for number, batch in enumerate(loader):
            seen.append(int(batch))
            if number == 5:
                to_the_group()
        assert told and seen == list(range(40))
        os.register_at_fork(after_in_child=until_told)
    batches = iter(loader)
    to_the_group()
    assert [int(batch) for batch in batches] == list(range(40))
    if context == "fork":
        left_behind = iter(loader)  # Python tells its workers at the end, and waits for them
    print("all seen")
""")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_outlive_the_first_signal(
    context: str, tmp_path: Path, quick_python: list[str]
) -> None:
    script = tmp_path / "script.py"  # spawned workers import it
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(SCRIPT, '    ')}")
    done = run([*quick_python, script, context], limit=60).require_success()
    assert "all seen" in done.output


def test_they_collect_no_garbage_of_their_parent(quick_python: list[str]) -> None:
    """A process group of an earlier training, in a circle of references, would crash them."""
    code = textwrap.dedent("""
        import gc, os
        from signal import SIGTERM
        from torch.utils.data import DataLoader
        from lightning_dist.elastic.data.sampling import keep_workers

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


def test_what_the_user_wants_of_a_worker_still_happens(capfd: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=first)
    keep_workers(loader, [signal.SIGTERM])
    keep_workers(loader, [signal.SIGTERM])  # a second fit
    assert isinstance(loader.worker_init_fn, EndsAtSecondSignal)
    assert loader.worker_init_fn.usual is first
    again = pickle.loads(pickle.dumps(loader.worker_init_fn))  # for workers that are not forks
    assert again.usual is first
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


AGAIN, LEAVE, UNSAVED = EXIT_RESTART, EXIT_LEAVE, EXIT_UNSAVED


@pytest.mark.parametrize(
    ("nodes", "reasons", "is_saved", "codes"),
    [
        # Ranks that were told end with 0, others ask for a restart.
        ((0, 0, 1, 1), ["", "SIGTERM", "", ""], True, [AGAIN, 0, AGAIN, AGAIN]),
        # One rank of each machine asks the cloud, and its notice is for all of them.
        ((0, 0, 1, 1), ["", "", PREEMPTED, ""], True, [AGAIN, AGAIN, 0, LEAVE]),
        # Nodes have left or joined: the launcher's rank is not that among the members.
        ((1, 1, 2, 2), [PREEMPTED, "", "", ""], True, [0, LEAVE, AGAIN, AGAIN]),
        ((1, 1, 2, 2), ["", "", PREEMPTED, ""], True, [AGAIN, AGAIN, 0, LEAVE]),
        ((0, 2, 2), ["", PREEMPTED, ""], True, [AGAIN, 0, LEAVE]),
        ((1, 2, 0, 0), ["", "", PREEMPTED, ""], True, [AGAIN, AGAIN, 0, LEAVE]),
        # Without a checkpoint nobody ends well, and a machine that goes is left too.
        ((0, 0), ["", "SIGTERM"], False, [UNSAVED, UNSAVED]),
        ((0, 0, 1, 1), ["", "", PREEMPTED, ""], False, [UNSAVED, UNSAVED, LEAVE, LEAVE]),
    ],
)
def test_exit_codes_under_torchrun(
    nodes: tuple[int, ...],
    reasons: list[str],
    is_saved: bool,
    codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    told = [*zip(nodes, reasons, strict=True)]
    for (node, reason), code in zip(told, codes, strict=True):
        monkeypatch.setenv("GROUP_RANK", str(node))
        account = Account()
        life = ProcessLifecycle(RunSettings("folder"), account)
        life._notices = PreemptionListener([])
        life._notices.reason = reason
        assert life.stop(told, is_saved=is_saved) == code
        assert account.ends == [(reason or "peer preempted", not reason)]


def test_where_nobody_restarts_ranks_all_end_well() -> None:
    life = ProcessLifecycle(RunSettings("folder"), Account())
    assert life.stop([(0, ""), (0, "SIGTERM")], is_saved=True) == 0


OURS, STOCK = "lightning_dist.elastic.launcher", "torch.distributed.run"
JOB = """
import json, os, sys
folder, codes = sys.argv[1], json.loads(sys.argv[2])
starts = len(os.listdir(folder))
if os.environ["RANK"] == "0":
    open(os.path.join(folder, f"start-{starts}"), "w").close()
    if codes[starts] == 75:
        from lightning_dist.elastic.process.outcome import Outcome
        steps = int(sys.argv[3])
        Outcome(steps * (starts + 1), begun=steps * starts).write()
    sys.exit(codes[starts])
"""


@pytest.mark.parametrize(
    ("module", "codes", "max_restarts", "starts", "said", "steps"),
    [
        # Between planned stops, failures cost as many restarts as ``max_restarts`` says.
        pytest.param(OURS, [75, 1, 75, 75, 1, 0], 1, 5, "(exitcode: 1)", 1, id="failures"),
        pytest.param(OURS, [75, 0], 0, 2, "", 1, id="a planned stop"),
        pytest.param(OURS, [75, 75, 0], 1, 3, "", 1, id="planned stops"),
        pytest.param(OURS, [74, 0], 0, 1, "(exitcode: 74)", 1, id="74"),
        pytest.param(OURS, [76, 0], 0, 1, "(exitcode: 76)", 1, id="76"),
        pytest.param(OURS, [75, 75, 75, 0], 1, 2, "(exitcode: 75)", 0, id="no progress"),
        # An agent whose machine is lost does not come back: a failure to all others.
        pytest.param(OURS, [77, 0], 3, 1, "SignalException", 1, id="machine lost"),
        # What the documents say of it: a planned stop costs a restart.
        pytest.param(STOCK, [75, 75, 0], 1, 2, "(exitcode: 75)", 1, id="torchrun"),
    ],
)
def test_a_job_ends_when_it_has_no_restarts_left(
    module: str,
    codes: list[int],
    max_restarts: int,
    starts: int,
    said: str,
    steps: int,
    tmp_path: Path,
    quick_python: list[str],
) -> None:
    """A job of one rank that ends with one of the codes at every start, or well with the last."""
    script, folder = tmp_path / "script.py", tmp_path / "starts"
    script.write_text(JOB)
    folder.mkdir()
    launcher = [*quick_python, "-m", module, "--standalone", f"--max-restarts={max_restarts}"]
    command = [*launcher, "--monitor-interval=0.05", script, folder, json.dumps(codes), str(steps)]
    done = run(command, limit=110)
    last = codes[starts - 1] if module == OURS and "exitcode" in said else 1
    assert done.returncode == (last if said else 0), done.output
    assert said in done.output
    assert len(list(folder.iterdir())) == starts
