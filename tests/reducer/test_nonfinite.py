"""Contracts 1 and 3: a value that is not finite spoils its own step, on all ranks alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    held,
    residuals,
    step_digest,
)
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from threads import of_all, on_threads
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import resolve_codec

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
    (Layout(UNEVEN), SOME, OF_HOSTS),  # uneven hosts are in the leader form
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
    settings = {"commit": "deferred", **layout.form, **LARGE}
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
