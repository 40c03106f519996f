"""What a loop tells the trackers of its user: the metrics of a Trainer, by the same names."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import make_loader
from loop_runs import net, train

from lightning_dist import ElasticLoop
from lightning_dist.checkpoint.settings import CheckpointSettings

Log = Callable[[Mapping[str, float], int], None]
ELASTIC = {f"elastic/{name}" for name in ("restarts", "lost_time_s", "samples_recomputed")}
OF_SAVES = {f"checkpoint/{name}" for name in ("blocking_ms", "queue_ms", "optimizer_wait_ms")}
OF_COMMITS = {f"checkpoint/{name}" for name in ("write_ms", "bytes")}
ALWAYS = {f"checkpoint/{name}" for name in ("in_flight", "skipped", "failed")}
ALL = {"elastic/world_size"} | ELASTIC | OF_SAVES | OF_COMMITS | ALWAYS


class Fault(Exception):
    """What a test lets happen."""


def run(folder: Path, log: Log, *, fail_at: int = 0) -> None:
    """A training that logs after every step, and at the end."""
    made: list[ElasticLoop] = []

    def watch(loop: ElasticLoop) -> None:
        made[:] = [loop]
        log(loop.metrics(), loop.steps)
        if loop.steps == fail_at:
            raise Fault

    settings = {"checkpoint": CheckpointSettings(snapshot="sync", writer="thread")}
    try:
        train(folder, "plain", epochs=1, watch=watch, elastic=settings)
    except Fault:
        assert fail_at
    log(made[0].metrics(), made[0].steps)


def plain(folder: Path) -> tuple[Log, Callable[[], list[dict[str, float]]]]:
    """What ``wandb.log`` and others take: a dict."""
    rows: list[dict[str, float]] = []
    return lambda values, step: rows.append(dict(values)), lambda: rows


def accelerate(folder: Path) -> tuple[Log, Callable[[], list[dict[str, float]]]]:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "of the test", False

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, float]] = []

        @property
        def tracker(self) -> Any:
            return self.rows

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            assert not values

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            self.rows.append(values)

    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    return lambda values, step: accelerator.log(values, step=step), lambda: tracker.rows


def fabric(folder: Path) -> tuple[Log, Callable[[], list[dict[str, float]]]]:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    logger = CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=1)
    of = Fabric(accelerator="cpu", devices=1, loggers=[logger])

    def rows() -> list[dict[str, float]]:
        with open(folder / "csv" / "version_0" / "metrics.csv") as file:
            return [
                {name: float(value) for name, value in row.items() if name != "step" and value}
                for row in csv.DictReader(file)
            ]

    return lambda values, step: of.log_dict(dict(values), step=step), rows


@pytest.mark.parametrize("framework", [plain, accelerate, fabric], ids=lambda each: each.__name__)
def test_they_reach_the_tracker(framework: Any, tmp_path: Path) -> None:
    log, rows = framework(tmp_path)
    run(tmp_path / "run", log, fail_at=7)
    run(tmp_path / "run", log)
    found = rows()
    before = [row for row in found if row["elastic/restarts"] == 0]
    after = found[len(before) :]
    assert before[0].keys() == ALL - OF_SAVES - OF_COMMITS  # a save is due after step 2
    assert before[-1].keys() == ALL
    # 7 steps of 4 samples had been done, and 6 of them saved.
    assert {row["elastic/samples_recomputed"] for row in before} == {0}
    assert {row["elastic/samples_recomputed"] for row in after} == {4}
    assert "elastic/lost_time_s" not in after[0], "training is where it was before the fault"
    assert 0 < after[-1]["elastic/lost_time_s"] < 60
    assert after[-1].keys() == ALL
    assert after[-1]["checkpoint/bytes"] > 1000
    assert after[-1]["elastic/world_size"] == 1
    assert all(math.isfinite(value) for row in found for value in row.values())


def test_without_an_account_nothing_is_said_of_restarts() -> None:
    """As in an object store; and nothing at all before training begins."""
    model = net()
    with ElasticLoop(
        f"memory://account-{os.urandom(4).hex()}",
        loader=make_loader(),
        state={"model": model},
        checkpoint=CheckpointSettings(writer="thread"),
    ) as loop:
        assert loop.metrics() == {}
        assert loop.run_id
        for _ in loop.epochs(1):
            assert loop.metrics().keys() == ALL - ELASTIC - OF_SAVES - OF_COMMITS
            for _, x in loop.batches():
                loop.scale_loss(model(x).sum()).backward()
                loop.step_done()
    assert loop.metrics().keys() == ALL - ELASTIC
