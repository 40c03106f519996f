"""Contract 1: replicas stay bit-identical after every step, whatever the settings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from feeding import compressed, digest
from torch import nn
from worlds import Rank, run_threads

from lightning_dist.codecs import CODECS, Int8


def allowed(name: str, error_feedback: bool) -> bool:
    """Unbiased codecs take no error feedback, and dgc is nothing without."""
    codec = CODECS[name]()
    return codec.contraction if error_feedback else not codec.momentum_correction


ROWS = [(n, f) for n in CODECS for f in (False, True) if n != "none" and allowed(n, f)]


def network() -> nn.Sequential:
    """A network of linear layers with weights equal in every run."""
    net = nn.Sequential(
        nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 1)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


def train(rank: Rank, steps: int, codec: str | Int8, **settings: object) -> list[str]:
    """Digests of all parameters, before training and after every step."""
    module = network()
    kind = torch.optim.SGD if codec == "dgc" else torch.optim.AdamW  # dgc brings its momentum
    optimizer = kind(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank.rank)
    with compressed(rank, module, codec, ddp={"bucket_cap_mb": 0.005}, **settings) as (model, _):
        digests = [digest(module.parameters())]
        for _ in range(steps):
            x = torch.randn(8, 30, generator=generator)
            optimizer.zero_grad()
            (model(x).squeeze(1) - x.sum(1) * rank.rank).square().mean().backward()
            optimizer.step()
            digests.append(digest(module.parameters()))
    return digests


EVERY = [("none", False), *ROWS]


@pytest.mark.parametrize(
    ("size", "rows"),
    [(2, EVERY), (3, EVERY), (4, EVERY[::5]), pytest.param(4, EVERY, marks=pytest.mark.slow)],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
def test_replicas_are_bit_identical_after_every_step(
    size: int, rows: Sequence[tuple[str, bool]]
) -> None:
    def body(rank: Rank) -> list[list[str]]:
        return [train(rank, 4, c, error_feedback=f, min_compress_numel=256) for c, f in rows]

    for row, first, *others in zip(rows, *run_threads(body, size), strict=True):
        assert others == [first] * (size - 1), row
        assert len(set(first)) == 5, "every step must have changed the parameters"


@pytest.mark.parametrize("settings", [{"min_compress_numel": 0}, {"start_step": 2}], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_policies_keep_replicas_identical(settings: dict[str, int], size: int) -> None:
    """All tensors compressed, and compression that starts in the middle."""
    ranks = run_threads(lambda rank: train(rank, 4, Int8(block_size=32), **settings), size)
    assert ranks == [ranks[0]] * size
