"""Modules of every kind: unused, frozen and tied parameters, other dtypes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed, gradients, mean, residuals
from torch import Tensor, nn
from worlds import Rank, run_threads

DOUBLE = torch.float64
SETTINGS = {"min_compress_numel": 256}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.004}
Script = Mapping[int, Collection[int]]  # step -> ranks that do not use "second" in it


def fed(rank: int, step: int, script: Script) -> Tensors:
    given = feed(rank, step, dtype=DOUBLE)
    if rank in script.get(step, ()):
        del given["second"]
    return given


def run(rank: Rank, script: Script, steps: int = 5) -> tuple[list[Tensors], list[Tensors]]:
    """Gradients and residuals after every step."""
    with compressed(rank, Fed(dtype=DOUBLE), ddp=UNUSED, **SETTINGS) as (model, reducer):
        done = [
            (backward(model, fed(rank.rank, step, script)), residuals(reducer))
            for step in range(steps)
        ]
    return [g for g, _ in done], [r for _, r in done]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("who", ["nobody uses it", "one rank uses it"])
def test_parameters_unused_in_some_steps(size: int, who: str) -> None:
    """Gradients are there where DDP's are; what is owed waits; nothing is lost."""
    others = range(size) if who == "nobody uses it" else range(1, size)
    script = {1: others, 3: others}
    ranks = run_threads(lambda rank: run(rank, script), size)

    def plain(rank: Rank) -> list[set[str]]:
        model = rank.ddp(Fed(dtype=DOUBLE), **UNUSED)
        return [set(backward(model, fed(rank.rank, step, script))) for step in range(5)]

    ours = [[set(gradients) for gradients in steps] for steps, _ in ranks]
    assert ours == run_threads(plain, size)
    if who == "nobody uses it":
        assert "second" not in ours[0][1]
        for _, held in ranks:
            assert torch.equal(held[0]["second"], held[1]["second"])
            assert not torch.equal(held[1]["second"], held[2]["second"])
    assert_nothing_is_lost(script, ranks)


def assert_nothing_is_lost(
    script: Script, ranks: list[tuple[list[Tensors], list[Tensors]]]
) -> None:
    zero = torch.zeros(33, 50, dtype=DOUBLE)
    steps = range(len(ranks[0][0]))
    went_in = sum(
        fed(rank, step, script).get("second", zero) for rank in range(len(ranks)) for step in steps
    )
    came_out = sum(gradients.get("second", zero) for gradients in ranks[0][0])
    owed = mean([held[-1] for _, held in ranks])["second"].view(33, 50)
    assert isinstance(went_in, Tensor)
    torch.testing.assert_close(came_out + owed, went_in / len(ranks), rtol=0, atol=1e-12)


def test_a_parameter_that_is_never_used_under_static_graph() -> None:
    def body(rank: Rank) -> tuple[set[str], bool]:
        ddp = {"static_graph": True, "bucket_cap_mb": 0.004}
        with compressed(rank, Fed(), ddp=ddp, **SETTINGS) as (model, reducer):
            for step in range(3):
                given = feed(rank.rank, step)
                del given["second"]
                left = backward(model, given)
            return set(left), bool(residuals(reducer)["first"].any())

    assert run_threads(body, 2) == [({"first", "bias"}, True)] * 2


def test_frozen_parameters_do_not_travel() -> None:
    def body(rank: Rank) -> tuple[set[str], list[str], int]:
        module = Fed()
        module.get_parameter("second").requires_grad_(False)
        with compressed(rank, module, **SETTINGS) as (model, reducer):
            left = backward(model, feed(rank.rank, 0))
            raw = reducer.comm_stats()["raw_bytes"]
            return set(left), list(reducer.residuals), raw

    assert run_threads(body, 2) == [({"first", "bias"}, ["first"], (40 * 48 + 40) * 4)] * 2


class Tied(nn.Module):
    """One matrix under two names, as embedding and output of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(40, 48, bias=False), nn.Linear(40, 48, bias=False)
        with torch.no_grad():
            self.encoder.weight.copy_(feed(0, 99, {"w": (48, 40)})["w"])
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.encoder(x) @ self.decoder.weight).square().mean()


def test_tied_weights_have_one_residual_and_the_sum_of_both_gradients() -> None:
    def body(rank: Rank) -> tuple[list[str], Tensor, Tensor]:
        x = feed(rank.rank, 0, {"x": (8, 40)})["x"]
        alone = Tied()
        alone(x).backward()
        with compressed(rank, Tied(), min_compress_numel=0) as (model, reducer):
            model(x).backward()
            names = list(reducer.residuals)
        return names, gradients(model)["encoder.weight"], gradients(alone)["encoder.weight"]

    ranks = run_threads(body, 2)
    assert [names for names, _, _ in ranks] == [["encoder.weight"]] * 2
    expected = (ranks[0][2] + ranks[1][2]) / 2
    for _, got, _ in ranks:
        torch.testing.assert_close(got, expected, rtol=0, atol=float(expected.abs().max()) / 60)
    assert torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8"])
def test_modules_in_short_types(dtype: torch.dtype, codec: str) -> None:
    """Gradients stay in their type, replicas equal; arithmetic and residuals are in float32."""

    def body(rank: Rank) -> tuple[Tensors, set[torch.dtype], str]:
        feedback = {"error_feedback": codec != "none"}
        with compressed(rank, Fed(dtype=dtype), codec, **SETTINGS, **feedback) as (model, reducer):
            for step in range(3):
                left = backward(model, feed(rank.rank, step, dtype=dtype))
            return left, {r.dtype for r in residuals(reducer).values()}, digest(left)

    ranks = run_threads(body, 3)
    assert len({of_rank[2] for of_rank in ranks}) == 1
    assert {g.dtype for g in ranks[0][0].values()} == {dtype}
    assert ranks[0][1] == (set() if codec == "none" else {torch.float32})
    wanted = mean([{n: g.float() for n, g in feed(r, 2, dtype=dtype).items()} for r in range(3)])
    for name, gradient in ranks[0][0].items():
        torch.testing.assert_close(gradient.float(), wanted[name], rtol=0.02, atol=0.05)
