"""How workers tell their launcher how they have ended, and when it restarts no more."""

import json
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lightning_dist.elastic.launcher.agent import outcomes_of
from lightning_dist.elastic.process.outcome import FILE, SAME_FAILURES, Outcome, Progress


def failed(step: int | None = 3, *, place: str = "train.py:1", is_echo: bool = False) -> Outcome:
    return Outcome(step, "ValueError: why", place, is_echo)


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


def test_the_first_outcome_of_a_process_counts(path: Path) -> None:
    """The session's knows the step."""
    failed(7).write()
    failed(None).write()
    assert json.loads(path.read_text())["message"]["extraInfo"]["lightning_dist"]["step"] == 7


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
    assert reasons[-1] == "no progress in the set-up: ValueError: why"


@pytest.mark.parametrize("other", [failed(4), failed(place="train.py:2"), failed(None)])
def test_another_step_or_place_begins_to_count_anew(other: Outcome) -> None:
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


def test_progress_is_more_steps_than_any_start_before() -> None:
    progress = Progress()
    assert progress.advanced([Outcome(0), Outcome(None)])
    assert not progress.advanced([Outcome(0)])
    assert not progress.advanced([])
    assert progress.advanced([failed(4), Outcome(2)])
    assert not progress.advanced([Outcome(3)])
