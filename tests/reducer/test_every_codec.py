"""The contracts that every codec keeps in a real DDP, whatever exchange it takes."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    gradients,
    mean,
    residuals,
    step_digest,
)
from layouts import FORMS, PAIRS, UNEVEN, Layout, flat
from threads import of_all, on_threads
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank

from benchmarks.convergence.tasks import DigitsSettings, DigitsTask
from lightning_dist.codecs import CODECS, resolve_codec

COMPRESSED = {"min_compress_numel": 256}


def test_every_row_is_here() -> None:
    assert {resolve_codec(codec).name for codec in EVERY_CODEC} == set(CODECS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_threads(3)
def test_short_gradients(rank: Rank, dtype: torch.dtype) -> None:
    """They arrive and leave in their dtype, replicas agree; residuals are in float32."""
    fed = [{n: g.float() for n, g in feed(r, 2, dtype=dtype).items()} for r in range(3)]
    wanted = mean(fed)
    for codec in EVERY_CODEC:
        with compressed(rank, Fed(dtype=dtype), codec, **COMPRESSED) as (model, reducer):
            for step in range(3):
                gradients = backward(model, feed(rank.rank, step, dtype=dtype))
            assert {g.dtype for g in gradients.values()} == {dtype}
            assert all(g.isfinite().all() for g in gradients.values()), codec
            assert {r.dtype for r in residuals(reducer).values()} <= {torch.float32}, codec
            reducer.state.load({}, reducer.network)  # residuals differ between ranks
            first, *others = of_all(rank, step_digest(gradients, reducer))
        assert others == [first] * 2, codec
        if codec in ("none", "fp16", "bf16", "int8"):
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient.float(), wanted[name], rtol=0.02, atol=0.05)


ODD = {
    "few": {"one": (1, 1), "square": (9, 9)},  # the second so that there is work for powersgd
    "many": {
        "odd": (7, 3),
        "empty": (0, 5),
        "row": (1, 300),
        "column": (300, 1),
        "deep": (5, 4, 3, 3),
        "zero": (2, 0, 3),
        "scalar": (),
    },
}


@pytest.mark.parametrize("shapes", ODD)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@on_threads("size")
def test_odd_shapes(rank: Rank, shapes: str, size: int) -> None:
    """Sizes 0, 1 and odd, everything compressed; zeros, denormals and huge values among them."""
    of = ODD[shapes]
    for codec in EVERY_CODEC:
        with compressed(rank, Fed(of), codec, min_compress_numel=0) as (model, _):
            for factor in (1.0, 0.0, 1e-42, 1e30 if is_wide(codec) else 1.0, 1.0):
                given = {n: g * factor for n, g in feed(rank.rank, 0, of).items()}
                finite = [g.isfinite().all() for g in backward(model, given).values()]
                assert all(finite), (codec, factor)


def is_wide(codec: str) -> bool:
    """Whether 1e30 fits the wire, and its rank-r or rotated form fits float32."""
    return not codec.startswith("fp16")


@pytest.mark.parametrize(
    ("layout", "codecs"),
    [
        (flat(2), EVERY_CODEC),
        *((layout, [*FEW, *PER_LEVEL]) for layout in FORMS),
        *(
            pytest.param(layout, EVERY_CODEC, marks=pytest.mark.slow)
            for layout in (Layout(PAIRS), Layout(UNEVEN))
        ),
    ],
    ids=lambda value: str(value) * isinstance(value, Layout),
)
@on_threads("layout")
def test_zeros_in_are_zeros_out(rank: Rank, layout: Layout, codecs: Sequence[str]) -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for codec in codecs:
        with compressed(rank, Fed(), codec, **layout.form, **COMPRESSED) as (model, _):
            for _ in range(3):
                gradients = backward(model, zeros)
                assert not any(bool(g.any()) for g in gradients.values()), codec


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


def train(rank: Rank, codec: str, *, error_feedback: bool) -> list[str]:
    """Digests of all parameters, before training and after each of four steps."""
    module = network()
    kind = torch.optim.SGD if codec == "dgc" else torch.optim.AdamW  # dgc brings its momentum
    optimizer = kind(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank.rank)
    settings = {**COMPRESSED, "error_feedback": error_feedback, "ddp": {"bucket_cap_mb": 0.005}}
    with compressed(rank, module, codec, **settings) as (model, _):
        digests = [digest(module.parameters())]
        for _ in range(4):
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
@on_threads("size")
def test_replicas_are_bit_identical_after_every_step(
    rank: Rank, size: int, rows: Sequence[tuple[str, bool]]
) -> None:
    for codec, feedback in rows:
        first, *others = of_all(rank, train(rank, codec, error_feedback=feedback))
        assert others == [first] * (size - 1), codec
        assert len({*first}) == 5, "every step must have changed the parameters"


DDP = {"bucket_cap_mb": 0.004}  # several buckets after the first step


def several_steps(rank: Rank, model: DistributedDataParallel) -> list[str]:
    """Digests of the gradients of every step."""
    found = [backward(model, feed(rank.rank, step)) for step in range(5)]
    return [digest(dict(sorted(gradients.items()))) for gradients in found]


def plain(rank: Rank, dtype: torch.dtype = torch.float32, **ddp: Any) -> list[str]:
    return several_steps(rank, rank.ddp(Fed(dtype=dtype), **{**DDP, **ddp}))


def ours(
    rank: Rank, codec: str, dtype: torch.dtype = torch.float32, *, ddp: Any = None, **settings: Any
) -> list[str]:
    settings |= {"ddp": {**DDP, **(ddp or {})}}
    with compressed(rank, Fed(dtype=dtype), codec, **settings) as (model, _):
        return several_steps(rank, model)


@pytest.mark.parametrize(
    ("size", "dtype", "ddp"),
    [
        (2, torch.float32, {}),
        (4, torch.float32, {}),
        (3, torch.float32, {"gradient_as_bucket_view": True}),
        (3, torch.float32, {"static_graph": True}),
        *((3, of, {}) for of in (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
@on_threads("size")
def test_none_is_bit_identical_to_ddp(
    rank: Rank, size: int, dtype: torch.dtype, ddp: Mapping[str, Any]
) -> None:
    expected = plain(rank, dtype, **ddp)
    assert ours(rank, "none", dtype, ddp=ddp) == expected
    assert len({*expected}) == 5, "every step has other gradients"


@pytest.mark.parametrize(
    "ddp", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
@pytest.mark.parametrize("codec", ["fp16", "int8"])
@on_threads(2)
def test_how_ddp_keeps_gradients_changes_no_bits(
    rank: Rank, codec: str, ddp: Mapping[str, Any]
) -> None:
    assert ours(rank, codec, ddp=ddp, **COMPRESSED) == ours(rank, codec, **COMPRESSED)


@pytest.mark.parametrize(("codec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("size", [2, 4])
@on_threads("size")
def test_casts_are_what_they_say(rank: Rank, codec: str, dtype: torch.dtype, size: int) -> None:
    """(x / W) in the short type, summed by one allreduce of the bucket, as torch's hooks do."""
    shapes = {"w": (40, 48)}
    given = feed(rank.rank, 0, shapes)
    summed = (given["w"] / size).to(dtype).flatten()
    rank.group("ring").allreduce([summed]).wait()
    with compressed(rank, Fed(shapes), codec) as (model, _):
        assert torch.equal(backward(model, given)["w"].flatten(), summed.float())


@on_threads(3)
def test_before_the_start_step_it_is_ddp(rank: Rank) -> None:
    """From the start step on it is the compressed run that begins there."""
    expected, late = plain(rank), ours(rank, "int8", start_step=3, **COMPRESSED)
    assert late[:3] == expected[:3]
    assert all(a != b for a, b in zip(late[3:], expected[3:], strict=True))


@pytest.mark.parametrize("codec", ["none", "int8"])
@on_threads(2)
def test_accumulated_gradients_are_sent_once(rank: Rank, codec: str) -> None:
    """Inside no_sync the hook is not called; the sync step sends the sum, as DDP does."""

    def accumulate(model: DistributedDataParallel) -> Tensors:
        for step in range(9):
            syncs = step % 3 == 2
            with nullcontext() if syncs else model.no_sync():
                model(feed(rank.rank, step)).backward()
            if syncs:
                last = gradients(model)
                model.zero_grad()
        return last

    expected = accumulate(rank.ddp(Fed(), **DDP))
    with compressed(rank, Fed(), codec, ddp=DDP, **COMPRESSED) as (model, reducer):
        got = accumulate(model)
        assert reducer.comm_stats()["steps"] == 3
    tolerance = 0.0 if codec == "none" else 0.1
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=tolerance)


DIGITS = DigitsSettings(steps=120)
LEAST = 75.0  # percent of the test images; chance is 10, without compression it is 94


@cache
def task_of(rank: int) -> DigitsTask:
    return DigitsTask(DIGITS, rank=rank, world_size=2)


@pytest.mark.parametrize("codec", CODECS)
@on_threads(2)
def test_a_default_learns(rank: Rank, codec: str) -> None:
    task = task_of(rank.rank)
    module = task.model()  # DDP gives all ranks the parameters of the first
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        bound = 64**-0.5 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)
    momentum = 0.0 if codec == "dgc" else 0.9  # dgc brings its own
    with compressed(rank, module, codec) as (model, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=DIGITS.lr, momentum=momentum)
        batches = task.batches(seed=0)
        for _ in range(DIGITS.steps):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
        rank.barrier.wait()  # the optimizers of all ranks step in one process
        assert task.evaluate(model)["test_accuracy"] > LEAST


@pytest.mark.parametrize("of_the_model", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)])
@on_threads(2)
def test_only_optimizers_of_the_model_with_momentum_are_refused(
    rank: Rank, kind: Any, of_the_model: bool
) -> None:
    """Also one of several groups, and Adam, whose first moment is a momentum."""
    other = torch.nn.Parameter(torch.ones(3))
    with compressed(rank, Fed(), "dgc", **COMPRESSED) as (model, _):
        backward(model, feed(rank.rank, 0))
        optimizer = kind([{"params": [*model.parameters()] if of_the_model else [other]}])
        rank.barrier.wait()
        refused = pytest.raises(ValueError, match=r"momentum, and (Adam|SGD) has its own")
        with refused if of_the_model else nullcontext():
            optimizer.step()
        rank.barrier.wait()
    optimizer.step()  # nothing is compressed any more
