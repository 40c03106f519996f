"""torch's profiler over some steps, and when it lets go of them."""

from __future__ import annotations

from pathlib import Path

from lightning_dist.profiling.capture.torch_tools import Zoom


def test_a_trace_that_cannot_be_written_is_told_and_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    told: list[str] = []
    folder = tmp_path / "taken" / "run-0"
    zoom = Zoom(folder, rank=2, wanted=range(1), on_problem=told.append)
    zoom.begin_step(0)
    zoom.begin_step(1)
    zoom.close()
    assert told == [f"{folder / 'zoom-rank2-step0.json.gz'} was not written: Not a directory"]


def test_the_step_in_which_the_trace_is_written_is_disturbed_too(tmp_path: Path) -> None:
    changes: list[bool] = []
    zoom = Zoom(tmp_path, rank=0, wanted=range(1, 3), on_change=changes.append)
    seen = []
    for step in range(6):
        zoom.begin_step(step)
        seen.append(list(changes))
    assert seen == [[], [True], [True], [True], [True, False], [True, False]]
    assert (tmp_path / "zoom-rank0-step1.json.gz").is_file()
