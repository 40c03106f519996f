"""Modules of every kind: unused, frozen and tied parameters, other dtypes and strides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    FakeBucket,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    gradients,
    mean,
    residuals,
)
from saving import through_a_file
from threads import on_threads
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist import OneBitAdam
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.integrations.torch.ddp import attach
from lightning_dist.reducer.plan.slices import strides_in_bucket
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings

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


@on_threads(2)
def test_a_parameter_that_is_never_used_under_static_graph(rank: Rank) -> None:
    ddp = {"static_graph": True, "bucket_cap_mb": 0.004}
    with compressed(rank, Fed(), ddp=ddp, **SETTINGS) as (model, reducer):
        for step in range(3):
            given = feed(rank.rank, step)
            del given["second"]
            left = backward(model, given)
        assert (set(left), bool(residuals(reducer)["first"].any())) == ({"first", "bias"}, True)


@on_threads(2)
def test_frozen_parameters_do_not_travel(rank: Rank) -> None:
    module = Fed()
    module.get_parameter("second").requires_grad_(False)
    with compressed(rank, module, **SETTINGS) as (model, reducer):
        left = backward(model, feed(rank.rank, 0))
        raw = reducer.comm_stats()["raw_bytes"]
        assert (set(left), list(reducer.residuals), raw) == (
            {"first", "bias"},
            ["first"],
            (40 * 48 + 40) * 4,
        )


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


STRIDED = {"matrix": (40, 48), "filters": (12, 6, 5, 4)}
EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
ORDERS = {"matrix": (1, 0), "filters": (0, 2, 3, 1)}  # of dimensions in memory: channels_last


def reordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with dimension ``order[0]`` outermost in memory."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


class Laid(nn.Module):
    """``d loss / d p = given[name of p]``; ``other``: in another order than row by row."""

    def __init__(self, *, other: bool, dtype: torch.dtype = DOUBLE) -> None:
        super().__init__()
        for name, value in feed(99, 0, STRIDED, dtype).items():
            laid = reordered(value, ORDERS[name]) if other else value
            self.register_parameter(name, nn.Parameter(laid))

    def forward(self, given: Tensors) -> Tensor:
        own = dict(self.named_parameters())
        return torch.stack([(own[name] * value).sum() for name, value in given.items()]).sum()


@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize("form", ["powersgd:rank=2", "powersgd:rank=2,two_phase=true"])
def test_powersgd_does_the_same_in_every_order(form: str, tree: Any, dtype: torch.dtype) -> None:
    def body(rank: Rank, other: bool) -> list[Tensors]:
        with compressed(rank, Laid(other=other, dtype=dtype), form, tree=tree) as (model, _):
            return [backward(model, feed(rank.rank, s, STRIDED, dtype)) for s in range(4)]

    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == DOUBLE else {"rtol": 0.05, "atol": 0.02}
    rows, others = (run_threads(lambda rank, o=o: body(rank, o), 3) for o in (False, True))
    for row, other in zip(rows[0], others[0], strict=True):
        for name in STRIDED:
            torch.testing.assert_close(other[name], row[name], **close)


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "dgc:ratio=0.1,block_size=128"])
def test_a_checkpoint_of_another_order_is_refused(codec: str) -> None:
    """What is owed would reach other elements."""

    def body(rank: Rank, other: bool, state: Any) -> Any:
        with compressed(rank, Laid(other=other), codec, **EVERYTHING) as (model, reducer):
            if state is None:
                backward(model, feed(rank.rank, 0, STRIDED, DOUBLE))
                return reducer.state_dict()
            reducer.load_state_dict(state)
        return None

    for first in (False, True):
        wrote = through_a_file(run_threads(lambda r, o=first: body(r, o, None), 2)[0])
        run_threads(lambda r, o=first, s=wrote: body(r, o, s), 2)
        with pytest.raises(ValueError, match="must be that of the run whose state"):
            run_threads(lambda r, o=not first, s=wrote: body(r, o, s), 2)


def test_a_new_memory_format_between_two_fits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """What is owed lies as the parameter did, and would reach other elements."""

    def body(rank: Rank) -> None:
        with compressed(rank, Laid(other=False), **EVERYTHING) as (model, old):
            backward(model, feed(rank.rank, 0, STRIDED, DOUBLE))
        new = rank.ddp(Laid(other=True))
        new.module.matrix.data = new.module.matrix.data.contiguous()  # type: ignore[union-attr]
        reducer = attach(new, old.settings, continue_from=old)
        try:
            assert reducer.residuals["matrix"].any()
            assert not reducer.residuals["filters"].any()
        finally:
            reducer.close()

    run_threads(body, 2)
    assert caplog.text.count("The memory format of filters has changed since the last fit") == 1


def test_strides_are_those_of_the_bucket() -> None:
    """DDP copies gradients of parameters with gaps or overlaps row by row."""
    matrix = torch.zeros(6, 4)
    assert strides_in_bucket(matrix) is None
    assert strides_in_bucket(matrix.t()) == (1, 4)
    assert strides_in_bucket(torch.zeros(6, 8)[:, ::2]) is None
    assert strides_in_bucket(torch.zeros(9).as_strided((3, 3), (2, 2))) is None
    assert strides_in_bucket(torch.zeros(6, 4, dtype=torch.complex64).t()) == (2, 8, 1)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert strides_in_bucket(image) == (60, 1, 15, 3)


WITH_COMPLEX = {"complex": (24, 32), "real": (40, 48), "transposed": (18, 20), "vector": (7,)}


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def feed_complex(rank: int, step: int, dtype: torch.dtype = torch.complex64) -> Tensors:
    """Gradients; all but ``real`` are complex."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in WITH_COMPLEX.items()}
    return found | {"real": found["real"].real.contiguous()}


class Mixed(nn.Module):
    """``d loss / d p = feed_complex[name of p]``."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        for name, value in feed_complex(99, 0, dtype).items():
            value = value.t().contiguous().t() if name == "transposed" else value
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, given: Tensors) -> Tensor:
        own = dict(self.named_parameters())
        return torch.stack([(real(own[n]) * real(value)).sum() for n, value in given.items()]).sum()


def digests(rank: Rank, model: nn.Module) -> list[str]:
    found = [backward(model, feed_complex(rank.rank, step)) for step in range(4)]
    return [digest(real(g) for _, g in sorted(gradients.items())) for gradients in found]


@pytest.mark.parametrize("size", [2, 3])
def test_none_is_bit_identical_to_ddp(size: int) -> None:
    ddp = {"bucket_cap_mb": 0.004}

    def ours(rank: Rank) -> list[str]:
        with compressed(rank, Mixed(), "none", ddp=ddp) as (model, _):
            return digests(rank, model)

    plain = run_threads(lambda rank: digests(rank, rank.ddp(Mixed(), **ddp)), size)
    assert run_threads(ours, size) == plain


def test_replicas_are_bit_identical() -> None:
    def body(rank: Rank) -> list[list[str]]:
        found = []
        for codec in EVERY_CODEC:
            with compressed(rank, Mixed(), codec, min_compress_numel=0) as (model, _):
                found.append(digests(rank, model))
        return found

    for codec, first, *others in zip(EVERY_CODEC, *run_threads(body, 3), strict=True):
        assert others == [first] * 2, codec
        assert len(set(first)) == 4, codec


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2"])
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
def test_mass_is_conserved(codec: str, tree: list[list[int]] | None) -> None:
    steps, dtype = 20, torch.complex128

    def body(rank: Rank) -> tuple[Tensors, Tensors]:
        """What went in less what came out, and what is owed for it."""
        lost = {name: torch.zeros_like(real(g)) for name, g in feed_complex(0, 0, dtype).items()}
        with compressed(rank, Mixed(dtype), codec, tree=tree, **EVERYTHING) as (model, reducer):
            for step in range(steps):
                given = feed_complex(rank.rank, step, dtype)
                left = backward(model, given)
                lost = {n: total + real(given[n]) - real(left[n]) for n, total in lost.items()}
            state = reducer.state_dict()
        return lost, {} if state is None else state["residuals"]

    ranks = run_threads(body, 3)
    owed = ranks[0][1]
    for name, lost in mean([lost for lost, _ in ranks]).items():
        if name not in owed:  # powersgd leaves vectors alone
            assert float(lost.abs().max()) < 1e-12
            continue
        # What is kept lies as the parameter does in memory.
        lost = lost.transpose(0, 1).contiguous() if name == "transposed" else lost
        assert float((owed[name].mean(0) - lost.flatten()).abs().max()) < 1e-11, name


def test_one_bit_adam_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"real parameters.*complex64.*AdamW"):
        OneBitAdam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], freeze_step=1)


@on_threads(2)
def test_parameters_that_do_not_fill_their_bucket_fail_the_step(rank: Rank) -> None:
    """However a bucket came to be laid out: an element without a parameter would not be reduced."""
    parameter = torch.zeros(64)
    settings = Settings.check("int8", min_compress_numel=0)
    reducer = Reducer({parameter: "short"}, settings=settings, network=rank.network())
    try:
        future = DDPBuckets(reducer).reduce(FakeBucket(torch.zeros(65), [parameter]))
        with pytest.raises(RuntimeError, match=r"65 elements.*64"):
            future.wait()
        assert "failed" == "failed"
    finally:
        reducer.close()
