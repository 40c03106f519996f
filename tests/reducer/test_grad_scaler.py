"""Contract 2 under a GradScaler: residuals are kept unscaled, so a new scale changes nothing."""

from __future__ import annotations

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed, residuals
from worlds import Rank, run_threads

DOUBLE = torch.float64
SCALES = [1024.0, 2048.0, 512.0, 512.0, 65536.0, 1.0]


def scaled_run(rank: Rank, *, told: bool = True) -> tuple[Tensors, Tensors, Tensors]:
    """Sums of unscaled inputs and outputs over steps with ever new scales, and the residual."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[0])
    inputs = {n: torch.zeros_like(g) for n, g in feed(0, 0, dtype=DOUBLE).items()}
    outputs = dict(inputs)
    settings = {"min_compress_numel": 0, "grad_scaler": scaler if told else None}
    with compressed(rank, Fed(dtype=DOUBLE), **settings) as (model, reducer):
        for step, scale in enumerate(SCALES):
            given = feed(rank.rank, step, dtype=DOUBLE)
            scaler.scale(torch.zeros(()))  # a scaler has no scale before its first use
            scaler.update(scale)
            left = backward(model, {name: value * scale for name, value in given.items()})
            inputs = {name: total + given[name] for name, total in inputs.items()}
            outputs = {name: total + left[name] / scale for name, total in outputs.items()}
        return inputs, outputs, residuals(reducer)


def lost(ranks: list[tuple[Tensors, Tensors, Tensors]]) -> float:
    return max(
        float((sum(o[n] + r[n].view_as(o[n]) - i[n] for i, o, r in ranks)).abs().max())
        for n in ranks[0][0]
    )


@pytest.mark.parametrize("size", [2, 3])
def test_mass_is_conserved_in_unscaled_units(size: int) -> None:
    assert lost(run_threads(scaled_run, size)) < 1e-11


def test_a_reducer_without_the_scale_loses_mass() -> None:
    """Otherwise the test above says nothing."""
    assert lost(run_threads(lambda rank: scaled_run(rank, told=False), 2)) > 1e-3


def test_powers_of_two_change_no_bits() -> None:
    """With and without a scaler the unscaled gradients are the same ones."""

    def body(rank: Rank, scale: float) -> list[str]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        digests = []
        with compressed(rank, Fed(), min_compress_numel=256, grad_scaler=scaler) as (model, _):
            for step in range(3):
                model.zero_grad()
                scaler.scale(model(feed(rank.rank, step))).backward()
                digests.append(digest(p.grad / scale for p in model.parameters()))
        return digests

    scaled, alone = (run_threads(lambda rank, s=s: body(rank, s), 2) for s in (4096.0, 1.0))
    assert scaled == alone


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_training_goes_on() -> None:
    """The real GradScaler: it halves its scale everywhere and parameters stay where they were."""

    def body(rank: Rank) -> tuple[list[float], list[str], bool]:
        module = Fed()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        scales, digests = [], []
        with compressed(rank, module, min_compress_numel=256, grad_scaler=scaler) as (model, _):
            for step in range(5):
                given = feed(rank.rank, step)
                if step == 2 and rank.rank == 1:
                    given["first"][0, 0] = torch.inf
                optimizer.zero_grad()
                scaler.scale(model(given)).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                digests.append(digest(module.parameters()))
        return scales, digests, all(bool(p.isfinite().all()) for p in module.parameters())

    (scales, digests, finite), other = run_threads(body, 2)
    assert other == (scales, digests, finite)
    assert scales == [256.0, 256.0, 128.0, 128.0, 128.0]
    assert digests[2] == digests[1]
    assert len(set(digests)) == 4
    assert finite
