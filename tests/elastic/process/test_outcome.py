"""How workers tell their launcher how they have ended, and when it restarts no more."""

import json
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightning_dist.elastic.launcher.agent import outcomes_of
from lightning_dist.elastic.process.outcome import (
    FILE,
    SAME_FAILURES,
    Outcome,
    Progress,
    forget_outcome,
)


def failed(step: int | None = 3, *, place: str = "train.py:1", is_echo: bool = False) -> Outcome:
    return Outcome(step, "ValueError: why", place, is_echo=is_echo)


def error_of(kind: type[Exception] = ValueError, text: str = "why") -> Exception:
    try:
        raise kind(text)
    except kind as error:
        return error


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def test_torchs_agent_reads_what_a_worker_leaves(path: Path) -> None:
    """Class, text and place of the exception, and the traceback, which torchrun prints."""
    error = error_of()
    Outcome.of(error, step=7).write(error)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    (outcome,) = outcomes_of([failure])
    assert (outcome.step, outcome.error, outcome.is_echo) == (7, "ValueError: why", False)
    assert outcome.place.startswith(f"{__file__}:")
    callstack = failure.message["extraInfo"]["py_callstack"]  # type: ignore[index]
    assert "raise kind(text)" in callstack
    assert list(path.parent.iterdir()) == [path]


def test_the_last_outcome_of_a_training_counts(path: Path) -> None:
    """What a script raises after it, such as the same exception, adds nothing."""
    failed(6).write()
    failed(7).write()
    failed(None).write(replaces=False)
    assert json.loads(path.read_text())["message"]["extraInfo"]["lightning_dist"]["step"] == 7
    forget_outcome()
    assert not path.exists()
    forget_outcome()


def test_an_outcome_of_another_version_is_none() -> None:
    message = {"message": "", "extraInfo": {"lightning_dist": {"steps": 3}}}
    assert Outcome.read(message) is None


def test_files_of_others_and_no_file_are_no_outcome(path: Path) -> None:
    """That of a script's own `@record`; that of a process that was killed."""
    killed = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file=str(path))
    message = {"message": "text", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
    path.write_text(json.dumps({"message": message}))
    recorded = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert outcomes_of([killed, recorded]) == []


@pytest.mark.parametrize("value", ["", os.devnull, "/no/such/folder/error.json"])
def test_without_an_agent_nothing_is_written(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, value)
    failed().write()


def test_the_same_failure_three_times_ends_a_job() -> None:
    progress = Progress()
    for _ in range(SAME_FAILURES - 1):
        assert progress.stuck([failed()]) == ""
    assert progress.stuck([failed()]) == "no progress since step 3: ValueError: why"


def test_a_failure_in_the_set_up_is_one() -> None:
    progress = Progress()
    reasons = [progress.stuck([failed(None)]) for _ in range(SAME_FAILURES)]
    assert reasons[-1] == "no progress outside of a training: ValueError: why"


OTHERS = [failed(2), failed(place="train.py:2"), failed(None), Outcome(3, "OSError", "train.py:1")]


@pytest.mark.parametrize("other", OTHERS)
def test_another_step_class_or_place_begins_to_count_anew(other: Outcome) -> None:
    progress = Progress()
    for outcome in (failed(), failed(), other, failed(), failed()):
        assert progress.stuck([outcome]) == ""
    assert progress.stuck([failed()]) != ""


def test_echoes_planned_stops_and_kills_do_not_count() -> None:
    progress = Progress()
    for _ in range(5):
        assert progress.stuck([failed(is_echo=True), Outcome(3)]) == ""
        assert progress.stuck([]) == ""


def test_the_first_failure_that_is_no_echo_counts() -> None:
    progress = Progress()
    for place in ("a", "b", "c"):
        of_start = [failed(is_echo=True), failed(place="x"), failed(place=place)]
        reason = progress.stuck(of_start)
    assert reason


def test_more_steps_than_ever_begin_to_count_anew() -> None:
    """A fault of the set-up that comes back after days is another one."""
    progress = Progress()
    for outcome in (failed(None), Outcome(1000), failed(None), Outcome(5000), failed(None)):
        assert progress.stuck([outcome]) == ""
    assert progress.stuck([failed(None)]) == ""
    assert progress.stuck([failed(None)]) != ""


def test_progress_is_a_step_after_a_checkpoint_that_is_newer() -> None:
    """Whatever starts before have done that is not in one."""
    progress = Progress()
    assert not progress.advanced([])
    assert not progress.advanced([Outcome(0), Outcome(None), Outcome(100, begun=100)])
    assert progress.advanced([Outcome(101, begun=100), Outcome(None)])
    assert not progress.advanced([Outcome(150, begun=100)])
    assert progress.advanced([Outcome(140, begun=120)])
