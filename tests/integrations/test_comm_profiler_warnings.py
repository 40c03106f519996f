"""CommProfiler in one process, and in a job that loses a rank."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comm_profiles import require_report_without_a_rank
from planted import Planted
from processes import torchrun
from torch import nn

from lightning_dist import CommProfiler
from lightning_dist.integrations.profiler.comm_profiler import _reason
from lightning_dist.integrations.profiler.run import ProfileRun
from lightning_dist.profiling.capture.files import RankFile


class Closing:
    """What is left of a run when it closes."""

    is_closed = False
    reports = False
    metadata = SimpleNamespace(rank=1)

    def close(self, reason: str, *, together: bool) -> Sequence[str]:
        return ("lines do not reach rank 0: Connection closed by peer",)


def test_a_rank_tells_what_it_could_not_send() -> None:
    """What is lost of its lines: rank 0 sees only that none came."""
    profiler = CommProfiler()
    profiler._run = Closing()
    told = "CommProfiler, rank 1: lines do not reach rank 0: Connection closed by peer"
    with pytest.warns(UserWarning, match=told):
        profiler._close("finished", together=True)


@pytest.mark.parametrize(
    ("has_finished", "asks", "reason"),
    [(False, True, "the training did not end by itself"), (True, False, "predict=False")],
)
def test_why_nothing_is_predicted_is_known_without_looking(
    has_finished: bool, asks: bool, reason: str, tmp_path: Path
) -> None:
    of_rank = Planted(world_size=1).run().ranks[0]  # looked at, it would say "one rank exchanges"
    file = RankFile(tmp_path, rank=0)
    file.write([of_rank.metadata, *of_rank.steps.values()])
    file.close()
    run = ProfileRun.__new__(ProfileRun)
    run.folder, run._has_finished, run._predicts = tmp_path, has_finished, asks
    summary, _ = run.report(html=False, trace=False)
    assert (
        summary.unavailable["predictions"]
        == f"{reason}; `lightning-dist profile whatif DIR` measures"
    )
    assert summary.predictions is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_overhead": "1%"}, "above 0 and at most 1; got '1%'"),
        ({"max_overhead": True}, "got True"),
        ({"error_every_n_steps": 2.5}, "0 for never; got 2.5"),
        ({"torch_profiler": 12}, r"a range of steps, .* got 12"),
        ({"torch_profiler": [3, 4]}, r"got \[3, 4\]"),
        ({"torch_profiler": signal.SIGTERM}, "SIGTERM"),
        ({"torch_profiler": range(5, 3)}, r"has a step, .* got range\(5, 3\)"),
        ({"torch_profiler": range(-3, 3)}, "none below 0"),
        ({"dirpath": 3}, "path of a folder, or None; got 3"),
        ({"dirpath": ""}, "path of a folder, or None; got ''"),
        ({"measure_links": "no"}, "measure_links must be True or False; got 'no'"),
        ({"csv": "x.csv"}, "csv must be True or False; got 'x.csv'"),
        ({"model": 5}, "DistributedDataParallel to profile; got 5"),
    ],
)
def test_settings_that_cannot_take_effect_raise(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommProfiler(**setting)


def test_a_model_is_for_loops_only() -> None:
    with pytest.raises(ValueError, match="leave the model out"):
        CommProfiler(nn.Linear(1, 1)).on_train_start(SimpleNamespace(), SimpleNamespace())


def test_an_error_is_reported_without_its_source_locations() -> None:
    error = RuntimeError("lightning_dist: [/__w/gloo/transport/tcp/pair.cc:553] " + "closed " * 60)
    told = _reason(error)
    assert told.startswith("RuntimeError: lightning_dist: closed closed")
    assert told.endswith(" closed ...")
    assert len(told) <= 220


@pytest.mark.slow
def test_a_lost_rank_costs_no_report(tmp_path: Path, quick_python: list[str]) -> None:
    script = Path(__file__).with_name("profiled_lost.py")
    done = torchrun(script, tmp_path, ranks=2, limit=110, python=quick_python).require_success()
    require_report_without_a_rank(tmp_path, done.output)
