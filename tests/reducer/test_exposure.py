"""Compression that costs more than it saves is said once, on rank 0, and only then."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from worlds import Rank, run_threads

from lightning_dist import compress_ddp
from lightning_dist.measurement import exposure

STEPS = 30


def train(rank: Rank) -> None:
    torch.manual_seed(0)
    model = rank.ddp(nn.Linear(64, 64))
    handle = compress_ddp(model, "int8", groups=rank.groups(), min_compress_numel=0)
    inputs = torch.ones(2, 64)
    for _ in range(STEPS):
        model(inputs).sum().backward()
    handle.close()


@pytest.mark.parametrize(
    ("bytes_per_second", "said"), [(1e12, 1), (1e3, 0)], ids=["fast link", "slow link"]
)
def test_it_is_said_once_where_the_link_is_fast(
    bytes_per_second: float,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(exposure, "measure_link", lambda network: bytes_per_second)
    with caplog.at_level(logging.WARNING):
        run_threads(train, 2)
    assert caplog.text.count("Compression costs more than it saves") == said
    assert caplog.text.count("or ranks wait for one that is late") == said
    assert caplog.text.count("CommProfiler()") == said
