"""What one rank says at once is what the summary says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted import Planted, bare, replace

from lightning_dist.integrations.profiler.live import LiveProfile, log_summary, of_one_rank
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, Phase, Span, StepRecord
from lightning_dist.profiling.run import Run

UNEVEN = Planted(slow_steps={1: 4, 3: 9})


def logged(run: Run) -> dict[str, float]:
    """By a profile of rank 0 that is asked once, at the end."""
    heard: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: heard.append(metrics))
    module = SimpleNamespace(log=lambda *args, **kwargs: None)
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=6, lightning_module=module)
    live = LiveProfile()
    for step in run.ranks[0].steps.values():
        live.add(step)
    live.log(trainer)
    (metrics,) = heard
    return metrics


def within_the_exchange(step: StepRecord) -> StepRecord:
    """An optimizer of a second model began before the mean was there."""
    end = max(bucket.done for bucket in step.buckets)
    return replace(step, phases=[*step.phases[:-1], Phase("optimizer", end - 5_000_000, end)])


@pytest.mark.parametrize("change", [lambda step: step, within_the_exchange])
def test_what_is_exposed_is_the_same_everywhere(change: Any) -> None:
    of_rank = UNEVEN.run().ranks[0]
    steps = {number: change(step) for number, step in of_rank.steps.items()}
    run = Run({0: replace(of_rank, steps=steps)})
    told, summary = logged(run), summarize(run, warmup_steps=0)
    assert summary.exposed_fraction is not None
    assert told["comm/exposed_ms"] == pytest.approx(summary.exposed_ms)
    assert told["comm/exposed_fraction"] == pytest.approx(summary.exposed_fraction)
    assert told["comm/hidden_ms"] == pytest.approx(summary.hidden_ms)
    assert told["comm/step_ms"] == pytest.approx(summary.step_ms["mean"])


@pytest.mark.parametrize("step", [0, 4])
def test_steps_of_a_window_need_not_have_the_same_metrics(step: int) -> None:
    own = Span("exchange", OF_NO_BUCKET, 0, 6_000_000, "all_gather", "flat", 100, blocks=True)
    told = logged(bare(Planted().run(), only=[step], spans=[own]))
    assert told["comm/exposed_fsdp_ms"] == pytest.approx(1)
    assert told["comm/codec_total_ms"] == pytest.approx(10), "the replaced spans held 12 ms of 72"


def test_stock_ddp_has_no_time_of_a_codec() -> None:
    ddp = Planted(codec="ddp", encode=0, decode=0).run()
    assert "codec_total_ms" not in of_one_rank(ddp.ranks[0].steps[3])
    assert of_one_rank(Planted().run().ranks[0].steps[3])["codec_total_ms"] == pytest.approx(12)


@pytest.mark.parametrize(("steps", "rows"), [(6, 1), (0, 0)])
def test_loggers_hear_nothing_of_a_run_without_steps(steps: int, rows: int, tmp_path: Path) -> None:
    heard: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: heard.append(metrics))
    trainer: Any = SimpleNamespace(loggers=[logger], global_step=steps)
    log_summary(trainer, summarize(Planted(steps=steps).run()), tmp_path, upload="report")
    assert len(heard) == rows
