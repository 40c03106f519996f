"""Real gradients over real sockets, with times that are known steps later, as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import Rank, run_threads

from lightning_dist import compress_ddp
from lightning_dist.integrations.torch.ddp import reducer_of
from lightning_dist.measurement.device_clock import Timestamp
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.ddp_hook import Watching, watch_allreduce
from lightning_dist.profiling.capture.events import RankRecord
from lightning_dist.profiling.capture.session import Governor, Session, SessionSettings
from lightning_dist.profiling.run import read_run

STEPS, ASKED = 10, 3


@dataclass(frozen=True, eq=False)
class At:
    nanoseconds: int


class LateClock:
    """Past when they are asked for the third time."""

    def __init__(self) -> None:
        self._asked = 0

    def now(self) -> Timestamp:
        return At(time.monotonic_ns())

    def are_past(self, timestamps: Iterable[Timestamp]) -> bool:
        assert all(isinstance(each, At) for each in timestamps)
        self._asked += 1
        return self._asked % ASKED == 0

    def read(self, timestamps: Sequence[Timestamp], *, since: Timestamp) -> Sequence[int]:
        return [each.nanoseconds for each in timestamps]

    def compare(self) -> None:
        pass


@pytest.mark.parametrize("codec", ["int8", None])
def test_every_step_is_written_down_whole(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps are this short that on a busy machine recording takes longer: it would look at fewer.
    monkeypatch.setattr(Governor, "spent", lambda governor, nanoseconds, *, of: None)

    def train(rank: Rank) -> list[str]:
        module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        model = rank.ddp(module, bucket_cap_mb=0.02)
        if codec is not None:
            compress_ddp(model, codec, groups=rank.groups(), min_compress_numel=0)
        about = RankRecord(rank.rank, 2, "host", {"flat": [0, 1]}, clock=0, unix=0.0)
        problems: list[str] = []
        settings = SessionSettings(max_overhead=1.0, error_every_n_steps=4)
        session = Session(
            tmp_path, about, settings=settings, device_clock=LateClock(), on_problem=problems.append
        )
        if (reducer := reducer_of(model.module)) is not None:
            reducer.observe(session.recorder)
        else:
            watch_allreduce(model, session.recorder, crosses=False)
        watching = Watching(model, session.timer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        watching.stop()
        session.end("finished")
        session.close()
        if reducer is not None:
            reducer.close()
        return problems

    assert run_threads(train, 2) == [[], []]
    run = read_run(tmp_path)
    for rank in run.ranks.values():
        assert list(rank.steps) == list(range(STEPS))
        assert all(each.buckets and each.spans for each in rank.steps.values())
        assert [each.step for each in rank.errors] == ([2, 6] if codec else [])
    summary = summarize(run)
    assert sum(summary.breakdown_ms.values()) == pytest.approx(summary.step_ms["mean"], rel=0.02)
    assert None not in (summary.exposed_ms, summary.breakdown_ms["exposed_transfer"])
