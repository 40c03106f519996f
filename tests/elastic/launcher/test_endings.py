"""Jobs under the launcher that fail in the same way again and again: real processes."""

import sys
from pathlib import Path

import pytest
from needs import needs
from processes import run

from lightning_dist.base.features import RECOVERY

SCRIPT = Path(__file__).with_name("ending.py")
LAUNCHER = [sys.executable, "-m", "lightning_dist.elastic.launcher", "--monitor-interval=0.05"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.ranks(2)]


def launched(
    folder: Path, python: list[str], *words: str, restarts: int = 100
) -> tuple[int, str, list[int]]:
    """Exit code and output of a job of two ranks, and the ranks that were started."""
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    # Without the script's Python workers are no forks, and start sooner here.
    worker = [*python, str(SCRIPT), str(folder), *words]
    done = run([*LAUNCHER, *options, *worker], limit=200.0)
    starts = [int(line) for line in (folder / "starts").read_text().split()]
    return done.returncode, done.output, starts


@pytest.mark.parametrize("recovery", ["restart", pytest.param("in_process", marks=needs(RECOVERY))])
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("bug", "ValueError: a bug of the user's"),
        ("database", "RuntimeError: Connection reset by peer: my database"),
    ],
)
def test_a_bug_ends_a_job_after_three_failures(
    how: str, error: str, recovery: str, tmp_path: Path, quick_python: list[str]
) -> None:
    """At the same step, with its traceback, whatever its text is; restarts are left."""
    python = ["--no-python", *quick_python]
    code, output, starts = launched(tmp_path, python, how, "7", recovery)
    assert code == 1
    assert f"launch: not restarted: no progress since step 7: {error}" in output
    assert len(starts) <= 6
    assert output.count(f"]: {error}\n") >= 3, output


def test_ranks_whose_collective_failed_do_not_count(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """The failure of the other rank does, also where it is found later."""
    python = ["--no-python", *quick_python]
    code, output, starts = launched(tmp_path, python, "one", "7", "restart")
    assert code == 1
    assert sorted(starts) == [0, 0, 0, 1, 1, 1]
    assert "no progress since step 7: ValueError: a bug of the user's" in output


def test_a_bug_in_the_set_up_ends_a_job(tmp_path: Path) -> None:
    """Of a script that has imported what restarts."""
    code, output, starts = launched(tmp_path, [], "set-up", "0", "restart")
    assert code == 1
    assert 3 <= len(starts) <= 6
    assert "no progress outside of a training: ValueError: a setting of the user's" in output


def test_planned_stops_without_progress_are_failures(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """The first two are none: they begin further than those before, and do steps."""
    python = ["--no-python", *quick_python]
    code, output, starts = launched(tmp_path, python, "planned", "3", "restart", restarts=2)
    assert code == 75
    assert starts.count(0) == 2 + 1 + 2, output  # from the second one on they resume at step 2
