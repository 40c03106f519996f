"""Strom's threshold against the loop written out, and payloads of any length through a real DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, digest, feed, gradients, residuals
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import NoCompression, Threshold
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState

DOUBLE = torch.float64
TAU = 1.5
LARGE = ("first", "second")  # they lie on both sides of the bias, which stays uncompressed
NUMEL = {name: SHAPES[name][0] * SHAPES[name][1] for name in LARGE}
worlds = pytest.mark.parametrize("size", [2, 3])


def by_hand(size: int, steps: int, wire: torch.dtype) -> tuple[list[Tensors], list[Tensors]]:
    """``v = g + e``; where ``|v| > tau``: send v as ``wire`` holds it; keep the rest."""
    owed = [{name: torch.zeros(SHAPES[name], dtype=DOUBLE) for name in LARGE} for _ in range(size)]
    outputs = []
    for step in range(steps):
        fed = [feed(rank, step, dtype=DOUBLE) for rank in range(size)]
        out = {"bias": torch.stack([gradients["bias"] for gradients in fed]).mean(0)}
        for name in LARGE:
            out[name] = torch.zeros(SHAPES[name], dtype=DOUBLE)
            for rank in range(size):
                v = fed[rank][name] + owed[rank][name]
                sent = torch.where(v.abs() > TAU, v.to(wire).to(DOUBLE), 0.0)
                owed[rank][name] = v - sent
                out[name] += sent / size
        outputs.append(out)
    return outputs, owed


@worlds
@pytest.mark.parametrize(("values", "wire"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_it_is_the_loop(size: int, values: str, wire: torch.dtype) -> None:
    steps = 12

    def body(rank: Rank) -> tuple[list[Tensors], Tensors]:
        codec = f"threshold:unit=absolute,tau={TAU},values={values}"
        with compressed(rank, Fed(dtype=DOUBLE), codec, min_compress_numel=256) as (model, reducer):
            path = [backward(model, feed(rank.rank, s, dtype=DOUBLE)) for s in range(steps)]
            return path, residuals(reducer)

    expected, owed = by_hand(size, steps, wire)
    for (path, kept), mine in zip(run_threads(body, size), owed, strict=True):
        for found, wanted in zip(path, expected, strict=True):
            for name in LARGE:
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["bias"], wanted["bias"], rtol=1e-12, atol=1e-12)
        for name in LARGE:
            found = kept[name].view(SHAPES[name])
            torch.testing.assert_close(found, mine[name], rtol=1e-12, atol=1e-12)


def flat(amounts: Sequence[int], rank: int) -> Tensors:
    """Gradients of which the first ``amounts[rank]`` elements of both matrices are large."""
    given = {"bias": torch.zeros(SHAPES["bias"])}
    for name in LARGE:
        values = torch.full((NUMEL[name],), 0.25)
        values[: amounts[rank]] = 2.0 + rank
        given[name] = values.view(SHAPES[name])
    return given


def mean_of(amounts: Sequence[int], name: str) -> Tensor:
    total = torch.zeros(NUMEL[name])
    for rank, amount in enumerate(amounts):
        total[:amount] += (2.0 + rank) / len(amounts)
    return total.view(SHAPES[name])


ALL = 10**6
AMOUNTS: list[tuple[int, ...]] = [
    (0, 5),
    (0, 0),
    (ALL, 0),
    (1, 0),
    (ALL, ALL),
    (0, 0, 0),
    (0, 7, 2),
    (0, ALL, 0),
    (0, 0, 1, 0),
]


@pytest.mark.parametrize("amounts", AMOUNTS, ids=str)
def test_any_amount_on_any_rank(amounts: tuple[int, ...]) -> None:
    """Bytes by hand: 8 for the length, then index and value padded to the longest of all ranks."""

    def body(rank: Rank) -> tuple[Tensors, Mapping[str, Any], Tensors]:
        codec = f"threshold:unit=absolute,tau={TAU}"
        with compressed(rank, Fed(), codec, min_compress_numel=256) as (model, reducer):
            means = backward(model, flat(amounts, rank.rank))
            return means, reducer.comm_stats()["per_codec"]["threshold"], residuals(reducer)

    size = len(amounts)
    for rank, (means, stats, owed) in enumerate(run_threads(body, size)):
        for name in LARGE:
            torch.testing.assert_close(means[name], mean_of(amounts, name), rtol=1e-6, atol=0)
            small = torch.arange(NUMEL[name]) >= amounts[rank]
            assert torch.equal(owed[name], torch.where(small, 0.25, 0.0))
        longest = max(sum(min(amount, numel) for numel in NUMEL.values()) for amount in amounts)
        assert stats["wire_bytes"] == (size - 1) * (8 + longest * (4 + 2))


def test_nothing_then_something_then_nothing() -> None:
    """What a step received does not come back in a step without anything."""

    def body(rank: Rank) -> list[Tensor]:
        codec = f"threshold:unit=absolute,tau={TAU}"
        with compressed(rank, Fed(), codec, error_feedback=False, min_compress_numel=256) as (m, _):
            steps = [(0, 0), (3, 9), (0, 0), (0, 2)]
            return [backward(m, flat(amounts, rank.rank))["first"] for amounts in steps]

    for found in run_threads(body, 2):
        nothing, something, nothing_again, little = found
        assert not nothing.any()
        assert torch.equal(something, mean_of((3, 9), "first"))
        assert not nothing_again.any()
        assert torch.equal(little, mean_of((0, 2), "first"))


def test_what_is_small_arrives_later() -> None:
    """0.25 a step: it is sent once the residual has passed tau, and then all of it."""

    def body(rank: Rank) -> list[float]:
        codec = f"threshold:unit=absolute,tau={TAU}"
        with compressed(rank, Fed(), codec, min_compress_numel=256) as (model, _):
            path = [backward(model, flat((0, 0), rank.rank))["first"] for _ in range(8)]
        assert all((gradient == gradient[0, 0]).all() for gradient in path)
        return [float(gradient[0, 0]) for gradient in path]

    assert run_threads(body, 2) == [[0, 0, 0, 0, 0, 0, 1.75, 0]] * 2


def scaled(rank: Rank, scale: float) -> list[str]:
    """Digests of unscaled gradients and residuals under a GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    codec, digests = f"threshold:unit=absolute,tau={TAU}", []
    with compressed(rank, Fed(), codec, min_compress_numel=256, grad_scaler=scaler) as (model, red):
        for step in range(4):
            model.zero_grad()
            scaler.scale(model(feed(rank.rank, step))).backward()
            found = gradients(model)
            digests.append(digest({name: gradient / scale for name, gradient in found.items()}))
            digests.append(digest(residuals(red)))
    return digests


@worlds
def test_a_grad_scaler_changes_nothing(size: int) -> None:
    """``tau`` is in units of the gradient: with a scale of 1024 the same bits."""
    assert run_threads(lambda r: scaled(r, 1024.0), size) == run_threads(
        lambda r: scaled(r, 1.0), size
    )


def test_a_bucket_beyond_int32_is_refused() -> None:
    """A bucket is as large as its largest parameter, and an int32 sum wraps without a word."""

    def body(rank: Rank) -> None:
        bucket = torch.empty(2**31 + 1, device="meta")
        planner = Planner(
            rank.network(), ReducerState(), error_feedback=False, intra_codec=NoCompression()
        )
        with pytest.raises(ValueError, match="as int32, got 2147483649 elements"):
            planner.units(Threshold(), [ParameterSlice("p", 0, (2**31 + 1,))], bucket)

    run_threads(body, 2)
