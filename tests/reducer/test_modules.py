"""Modules of every kind, and values that are not finite: contracts 1 and 3 of DDP hooks."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fed_model import Model
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    SHAPES,
    FakeBucket,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    gradients,
    held,
    mean,
    residuals,
    step_digest,
)
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from saving import through_a_file
from threads import of_all, on_threads
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, is_known_to_gloo, run_threads

from lightning_dist import OneBitAdam
from lightning_dist.codecs import resolve_codec
from lightning_dist.reducer.plan.slices import strides_in_bucket
from lightning_dist.sync.base import Environment, remember, sync_of
from lightning_dist.sync.ddp import GradientSync

DOUBLE = torch.float64
SETTINGS = {"min_compress_numel": 256}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.004}
Script = Mapping[int, Collection[int]]  # step -> ranks that do not use "second" in it


def fed(rank: int, step: int, script: Script) -> Tensors:
    given = feed(rank, step, dtype=DOUBLE)
    if rank in script.get(step, ()):
        del given["second"]
    return given


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("who", ["nobody uses it", "one rank uses it"])
@on_threads("size")
def test_parameters_unused_in_some_steps(rank: Rank, size: int, who: str) -> None:
    """Gradients are there where DDP's are; what is owed waits; nothing is lost."""
    others = range(size) if who == "nobody uses it" else range(1, size)
    script, zero = {1: others, 3: others}, torch.zeros(33, 50, dtype=DOUBLE)
    given = [fed(rank.rank, step, script) for step in range(5)]
    plain = rank.ddp(Fed(dtype=DOUBLE), **UNUSED)
    expected = [set(backward(plain, each)) for each in given]
    found, owed = [], []
    with compressed(rank, Fed(dtype=DOUBLE), ddp=UNUSED, **SETTINGS) as (model, reducer):
        for each in given:
            found.append(backward(model, each))
            owed.append(residuals(reducer)["second"])
    assert [set(each) for each in found] == expected
    if who == "nobody uses it":
        assert "second" not in expected[1]
        assert torch.equal(owed[0], owed[1])
        assert not torch.equal(owed[1], owed[2])
    went_in = sum(of_all(rank, sum(each.get("second", zero) for each in given))) / size
    came_out = sum(each.get("second", zero) for each in found)
    still = sum(of_all(rank, owed[-1])).view(33, 50) / size
    torch.testing.assert_close(came_out + still, went_in, rtol=0, atol=1e-12)


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


@on_threads(2)
def test_tied_weights_have_one_residual_and_the_sum_of_both_gradients(rank: Rank) -> None:
    x, alone = feed(rank.rank, 0, {"x": (8, 40)})["x"], Tied()
    alone(x).backward()
    with compressed(rank, Tied(), min_compress_numel=0) as (model, reducer):
        model(x).backward()
        assert list(reducer.residuals) == ["encoder.weight"]
    expected = mean(of_all(rank, gradients(alone)))["encoder.weight"]
    got = gradients(model)["encoder.weight"]
    torch.testing.assert_close(got, expected, rtol=0, atol=float(expected.abs().max()) / 60)
    assert len({*of_all(rank, digest([got]))}) == 1


STRIDED = {"matrix": (40, 48), "filters": (12, 6, 5, 4)}
EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
ORDERS = {"matrix": (1, 0), "filters": (0, 2, 3, 1)}  # of dimensions in memory: channels_last


def reordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values, with dimension ``order[0]`` outermost in memory."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Of(nn.Module):
    """``d loss / d p = given[name of p]``, for parameters that begin as ``values``."""

    def __init__(self, values: Tensors) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, given: Tensors) -> Tensor:
        own = dict(self.named_parameters())
        return torch.stack([(real(own[n]) * real(value)).sum() for n, value in given.items()]).sum()


def laid(*, other: bool, dtype: torch.dtype = DOUBLE) -> Of:
    """``other``: in another order than row by row."""
    values = feed(99, 0, STRIDED, dtype)
    return Of({n: reordered(value, ORDERS[n]) if other else value for n, value in values.items()})


@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize("form", ["powersgd:rank=2", "powersgd:rank=2,two_phase=true"])
@on_threads(3)
def test_powersgd_does_the_same_in_every_order(
    rank: Rank, form: str, tree: Any, dtype: torch.dtype
) -> None:
    def train(other: bool) -> list[Tensors]:
        with compressed(rank, laid(other=other, dtype=dtype), form, tree=tree) as (model, _):
            return [backward(model, feed(rank.rank, s, STRIDED, dtype)) for s in range(4)]

    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == DOUBLE else {"rtol": 0.05, "atol": 0.02}
    for other, row in zip(train(other=True), train(other=False), strict=True):
        for name in STRIDED:
            torch.testing.assert_close(other[name], row[name], **close)


@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "dgc:ratio=0.1,block_size=128"])
@on_threads(2)
def test_a_checkpoint_of_another_order_is_refused(rank: Rank, codec: str) -> None:
    """What is owed would reach other elements."""
    for first in (False, True):
        with compressed(rank, laid(other=first), codec, **EVERYTHING) as (model, reducer):
            backward(model, feed(rank.rank, 0, STRIDED, DOUBLE))
            wrote = through_a_file(of_all(rank, reducer.state_dict())[0])
        for other in (first, not first):
            with compressed(rank, laid(other=other), codec, **EVERYTHING) as (_, reducer):
                refused = pytest.raises(ValueError, match="must be that of the run whose state")
                with nullcontext() if other == first else refused:
                    reducer.load_state_dict(wrote)


def test_a_new_memory_format_between_two_fits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """What is owed lies as the parameter did, and would reach other elements."""

    def body(rank: Rank) -> None:
        with compressed(rank, laid(other=False), **EVERYTHING) as (model, old):
            backward(model, feed(rank.rank, 0, STRIDED, DOUBLE))
            before = sync_of(model, GradientSync)
        new = rank.ddp(laid(other=True))
        new.module.matrix.data = new.module.matrix.data.contiguous()  # type: ignore[union-attr]
        remember(new.module, before)  # it stands for the one before
        with closing(GradientSync.attach(new, old.settings, Environment(before=before))) as sync:
            assert sync.reducer.residuals["matrix"].any()
            assert not sync.reducer.residuals["filters"].any()

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


def feed_complex(rank: int, step: int, dtype: torch.dtype = torch.complex64) -> Tensors:
    """Gradients; all but ``real`` are complex."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in WITH_COMPLEX.items()}
    return found | {"real": found["real"].real.contiguous()}


def mixed(dtype: torch.dtype = torch.complex64) -> Of:
    if not is_known_to_gloo(dtype):
        pytest.skip("gloo of this torch, and so DDP over it, takes no complex numbers")
    values = feed_complex(99, 0, dtype)
    return Of({**values, "transposed": values["transposed"].t().contiguous().t()})


def digests(rank: Rank, model: nn.Module) -> list[str]:
    found = [backward(model, feed_complex(rank.rank, step)) for step in range(4)]
    return [digest(real(g) for _, g in sorted(gradients.items())) for gradients in found]


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_none_is_bit_identical_to_ddp(rank: Rank, size: int) -> None:
    ddp = {"bucket_cap_mb": 0.004}
    with compressed(rank, mixed(), "none", ddp=ddp) as (model, _):
        assert digests(rank, model) == digests(rank, rank.ddp(mixed(), **ddp))


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2"])
@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@on_threads(3)
def test_mass_is_conserved(rank: Rank, codec: str, tree: list[list[int]] | None) -> None:
    """And replicas agree."""
    dtype = torch.complex128
    lost = {name: torch.zeros_like(real(g)) for name, g in feed_complex(0, 0, dtype).items()}
    with compressed(rank, mixed(dtype), codec, tree=tree, **EVERYTHING) as (model, reducer):
        for step in range(20):
            given = feed_complex(rank.rank, step, dtype)
            left = {name: real(of) for name, of in sorted(backward(model, given).items())}
            assert len({*of_all(rank, digest(left))}) == 1
            lost = {n: total + real(given[n]) - left[n] for n, total in lost.items()}
        state = of_all(rank, reducer.state_dict())[0]
    for name, of in mean(of_all(rank, lost)).items():
        if name not in state["residuals"]:  # powersgd leaves vectors alone
            assert float(of.abs().max()) < 1e-12
            continue
        # What is kept lies as the parameter does in memory.
        of = of.transpose(0, 1).contiguous() if name == "transposed" else of
        owed = state["residuals"][name].mean(0)
        assert float((owed - of.flatten()).abs().max()) < 1e-11, name


def test_one_bit_adam_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"real parameters.*complex64.*AdamW"):
        OneBitAdam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], freeze_step=1)


@on_threads(2)
def test_parameters_that_do_not_fill_their_bucket_fail_the_step(rank: Rank) -> None:
    """However a bucket came to be laid out: an element without a parameter would not be reduced."""
    model = Model(rank.network(), shapes={"short": (64,)})
    with closing(model.reducer):
        bucket = FakeBucket(torch.zeros(65), [model.parameters["short"]])
        with pytest.raises(RuntimeError, match=r"65 elements.*64"):
            model.buckets.reduce(bucket).wait()


SPOILT_STEPS = 4
Bad = Mapping[int, tuple[int, str, float]]  # step -> rank, parameter, value
WITH_FEEDBACK = [c for c in EVERY_CODEC if not c.startswith(("none", "terngrad"))]
ALL, SOME = [*EVERY_CODEC, *PER_LEVEL], [*FEW, *PER_LEVEL]
LARGE = {"min_compress_numel": 256}  # "bias" is not compressed
OF_FLAT: Bad = {1: (1, "second", torch.inf), 2: (1, "bias", torch.nan)}
EACH_ALONE: list[Bad] = [
    {2: (1, name, value)} for name in ("first", "bias") for value in (torch.inf, torch.nan)
]

# Rank 1 never leads, rank 2 leads in pairs and not of three.
OF_HOSTS: Bad = {1: (1, "second", torch.inf), 2: (2, "bias", torch.nan)}
CASES = [
    (flat(2), WITH_FEEDBACK[::4], OF_FLAT),
    pytest.param(flat(2), WITH_FEEDBACK, OF_FLAT, marks=pytest.mark.slow),
    (flat(3), WITH_FEEDBACK[2::4], OF_FLAT),
    pytest.param(flat(3), WITH_FEEDBACK, OF_FLAT, marks=pytest.mark.slow),
    *((flat(3), ["int8"], bad) for bad in EACH_ALONE),
    *(pytest.param(flat(2), ["int8"], bad, marks=pytest.mark.slow) for bad in EACH_ALONE),
    (Layout(PAIRS), PER_LEVEL, OF_HOSTS),
    pytest.param(Layout(PAIRS), ALL, OF_HOSTS, marks=pytest.mark.slow),
    (Layout(PAIRS, leader=True), SOME, OF_HOSTS),
    (Layout(UNEVEN), SOME, OF_HOSTS),  # uneven nodes are in the leader form
    pytest.param(Layout(UNEVEN), ALL, OF_HOSTS, marks=pytest.mark.slow),
    pytest.param(Layout(HOSTS_OF_FOUR), SOME, OF_HOSTS, marks=pytest.mark.slow),
]


@dataclass
class Ran:
    """Training of one rank, with a bad value in some steps or without those steps."""

    finite: list[dict[str, bool]] = field(default_factory=list)  # gradients of the bad steps
    lost: list[set[str]] = field(default_factory=list)  # without any number in the bad steps
    trace: bool = False  # whether those steps changed any state
    gradients: list[str] = field(default_factory=list)  # digests of all other steps
    all: list[str] = field(default_factory=list)  # of gradients and state


def run(rank: Rank, layout: Layout, codec: str, bad: Bad, *, with_them: bool) -> Ran:
    ran = Ran()
    settings = {"state_update": "deferred", **layout.form, **LARGE}
    if layout.tree is None:
        settings["error_feedback"] = True
    with compressed(rank, Fed(), codec, **settings) as (model, reducer):
        for step in range(SPOILT_STEPS):
            given = feed(rank.rank, step)
            if step not in bad:
                found = backward(model, given)
                assert all(g.isfinite().all() for g in found.values())
                ran.gradients.append(digest([found[name] for name in SHAPES]))
                ran.all.append(step_digest(found, reducer))
            elif with_them:
                where, name, value = bad[step]
                if rank.rank == where:
                    given[name].view(-1)[-3] = value
                before = [digest([tensor]) for tensor in held(reducer)]
                found = backward(model, given)
                ran.finite.append({n: bool(g.isfinite().all()) for n, g in found.items()})
                ran.lost.append({n for n, g in found.items() if g.isnan().all()})
                ran.trace |= [digest([tensor]) for tensor in held(reducer)] != before
    return ran


def counts_steps(codec: str) -> bool:
    """Whether the step number, which the bad step has raised, changes what is sent."""
    names = ("powersgd", "randomk", "qsgd", "terngrad", "dgc:ratio=0.1,block_size=128,warm")
    return codec.startswith(names)


def spoilt_together(codec: str, layout: Layout) -> set[str]:
    """Parameters with state; ``bias`` is not compressed, and has momentum beside dgc."""
    of = resolve_codec(codec.split(" > ")[-1])
    kept = of.memory(True if layout.tree is None else "auto").kinds
    if not (kept or of.keeps_factors):
        return set()
    return {"first", "second"} | ({"bias"} if of.momentum_correction else set())


@pytest.mark.parametrize(
    ("layout", "codecs", "bad"), CASES, ids=lambda value: str(value) * isinstance(value, Layout)
)
@on_threads("layout")
def test_a_bad_value_spoils_its_step_on_all_ranks_and_leaves_no_trace(
    rank: Rank, layout: Layout, codecs: Sequence[str], bad: Bad
) -> None:
    """State stays bit for bit; what follows equals a run in which the steps never were.

    (A second run, where the number of steps counts.) The ranks have equal gradients, other ones in
    every step.
    """
    for codec in codecs:
        spoilt = run(rank, layout, codec, bad, with_them=True)
        other = run(rank, layout, codec, bad, with_them=counts_steps(codec))
        whole = spoilt_together(codec, layout)
        expected = [{n: n not in {*whole, name} for n in SHAPES} for _, name, _ in bad.values()]
        assert spoilt.finite == expected, codec
        assert all(whole <= lost for lost in spoilt.lost), codec
        assert not spoilt.trace, codec
        assert spoilt.all == other.all, codec
        assert len(set(spoilt.gradients)) == SPOILT_STEPS - len(bad), codec
        assert len({*of_all(rank, str(spoilt.gradients))}) == 1, codec


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_without_error_feedback_all_ranks_see_it_too(rank: Rank, size: int) -> None:
    """A GradScaler on any rank must skip the step on all of them."""

    def spoilt(rank: int) -> Tensors:
        given = feed(rank, 2)
        if rank == 1:
            given["first"].view(-1)[-3] = torch.inf
        return given

    for codec in EVERY_CODEC:
        if "dgc" in codec:  # nothing without
            continue
        with compressed(rank, Fed(), codec, error_feedback=False, **LARGE) as (model, reducer):
            backward(model, feed(rank.rank, 0))
            bad = backward(model, spoilt(rank.rank))
            good = backward(model, feed(rank.rank, 3))
            assert not residuals(reducer), codec
            finite = [bool(g["first"].isfinite().all()) for g in (bad, good)]
            assert finite == [False, True], codec


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_a_sum_that_overflows_does_not_poison_the_residual(rank: Rank, size: int) -> None:
    """Every rank is finite, their float32 sum is not: that step may be lost, later ones not."""
    with compressed(rank, Fed(), error_feedback=True, **LARGE) as (model, reducer):
        huge = {**feed(rank.rank, 0), "first": torch.full((40, 48), 3e38)}
        backward(model, huge)
        after = backward(model, feed(rank.rank, 1))
        assert all(r.isfinite().all() for r in residuals(reducer).values())
    assert [bool(g.isfinite().all()) for g in after.values()] == [True] * 3


ONE_BUCKET = {"weight": (24, 16)}  # one bucket: with several the hook aborts on gloo


@on_threads(2)
def test_torchs_powersgd_hook_stays_nan_for_ever(rank: Rank) -> None:
    """If this fails torch has mended it: then the claim in our documents must go."""
    group = rank.group("ddp")
    model = DistributedDataParallel(Fed(ONE_BUCKET), process_group=group)
    state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    for step in range(8):
        given = feed(rank.rank, step, ONE_BUCKET)
        if rank.rank == 1 and step == 4:
            given["weight"][3, 5] = torch.inf
        assert backward(model, given)["weight"].isfinite().all() == (step < 4)


@pytest.mark.parametrize("codec", ["int8", "threshold:tau=1.5,unit=absolute", "dgc:momentum=0.5"])
@on_threads(2)
def test_powers_of_two_change_no_bits(rank: Rank, codec: str) -> None:
    """Of unscaled gradients and state; ``tau`` is in units of the gradient."""

    def train(scales: list[float]) -> list[str]:
        scaler = torch.amp.GradScaler("cpu")
        digests = []
        with compressed(rank, Fed(), codec, grad_scaler=scaler, **LARGE) as (model, reducer):
            for step, scale in enumerate(scales):
                scaler.scale(torch.zeros(()))  # a scaler has no scale before its first use
                scaler.update(scale)
                model.zero_grad()
                scaler.scale(model(feed(rank.rank, step))).backward()
                unscaled = {name: g / scale for name, g in gradients(model).items()}
                digests.append(step_digest(unscaled, reducer))
        return digests

    assert train([4096.0, 1024.0, 8.0, 8.0, 0.5]) == train([1.0] * 5)


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
