"""Contract 2: with error feedback no gradient is lost, only sent later.

sum of outputs + mean residual == sum of mean inputs, and the residual stays bounded. Where nodes
reduce first, a node keeps what its part of the mean has lost.
"""

from itertools import product
from typing import Any

import pytest
import torch
from feeding import (
    EVERY_CODEC,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    feed,
    gradients,
    mean,
    residuals,
)
from layouts import FORMS, PAIRS, Layout, flat
from saving import DOUBLE, State, Totals, lost, plus, totals
from threads import of_all, on_threads
from worlds import Rank

from lightning_dist.codecs import (
    FP16,
    Codec,
    Int8,
    NoCompression,
    by_name,
    by_size,
    resolve_codec,
    warmup,
)

EVERYTHING = {"min_compress_numel": 0, "error_feedback": True}
LARGE = {"min_compress_numel": 256}
WEIGHT = {"weight": (25, 30)}
# Others keep no residual by default, or (dgc) sum momenta and not gradients.
WITH_RESIDUAL = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual and "dgc" not in c]


@pytest.mark.parametrize(
    "layout", [flat(2), flat(3), Layout(PAIRS), Layout(PAIRS, leader=True)], ids=str
)
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=str)
@on_threads("layout")
def test_many_steps_conserve_mass_and_bound_the_residual(
    rank: Rank, steps: int, layout: Layout
) -> None:
    """Ranks that disagree by a constant, the case in which ``e = p - mean`` grows for ever."""
    settings = {**EVERYTHING, "shapes": WEIGHT, "bias": 1.0, "layout": layout}
    ranks = of_all(rank, totals(rank, Int8(), steps, **settings))
    assert lost(ranks) < 1e-10
    holders = [each for each in ranks if each.norms[-1]]
    assert len(holders) == (2 if layout.leader else layout.size)
    for each in holders:
        assert each.norms[-1] < 3 * each.norms[steps // 10 - 1]


@pytest.mark.parametrize(
    "layout", [pytest.param(flat(2), marks=pytest.mark.exhaustive), flat(3), *FORMS], ids=str
)
@on_threads("layout")
def test_every_codec_conserves_mass(rank: Rank, layout: Layout) -> None:
    """And the residual levels off."""
    for codec in WITH_RESIDUAL:
        steps = 32 if layout.tree is None else 6
        ranks = of_all(rank, totals(rank, codec, steps, layout=layout, **LARGE))
        assert {name for name, of in ranks[0].owed.items() if of.any()} == {"first", "second"}
        # What the payload's own dtype (float32 scales, factors, ring sums) rounds is not a loss.
        assert lost(ranks) < 1e-9 * layout.size, codec
        if layout.tree is None:
            norms = ranks[rank.rank].norms
            assert 0 < norms[-1] < 1.5 * max(norms[:16]), codec


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_every_cut_conserves_mass(rank: Rank, size: int) -> None:
    """Whole and broken rows and blocks, more ranks than blocks, 1-D and 0-D parameters."""
    for block in (16, 256, 4096):
        shapes = {**SHAPES, "scalar": (), "one": (1,), "block": (block,)}
        own = totals(rank, Int8(block), 5, shapes=shapes, **EVERYTHING)
        assert own.norms[-1] > 0
        assert lost(of_all(rank, own)) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
@on_threads("size")
def test_linear_codecs_lose_only_what_the_network_rounds(rank: Rank, size: int) -> None:
    """The residual holds what the cast lost; sums inside the ring are rounded on their way."""
    cast = of_all(rank, totals(rank, FP16(), 12, **EVERYTHING))
    plain = of_all(rank, totals(rank, NoCompression(), 12))
    assert 0 < lost(cast) < 2 * 2.0**-11
    assert lost(plain) < 1e-12
    assert not any(plain[rank.rank].norms)


SWITCH, STEPS = 3, 6
TOPK, DGC = "topk:ratio=0.1,block_size=128", "dgc:ratio=0.1,block_size=128"
LARGE_STEPS: dict[str, Any] = {"min_compress_numel": 256}

SCHEDULES: dict[str, tuple[Codec, set[str]]] = {  # and what still has a residual at the end
    "int8, none": (warmup({0: "int8", SWITCH: "none"}), set()),
    "topk, none": (warmup({0: TOPK, SWITCH: "none"}), set()),
    "powersgd, none": (warmup({0: "powersgd:rank=2", SWITCH: "none"}), set()),
    "threshold, none": (warmup({0: "threshold:tau=1.5", SWITCH: "none"}), set()),
    "by_name": (
        warmup({0: "int8", SWITCH: by_name("int8", {"second": "none"})}),
        {"first"},
    ),
    "by_size": (
        warmup({0: by_size("int8", min_numel=1), SWITCH: by_size("int8", min_numel=1800)}),
        {"first"},
    ),
    "schedule in a rule": (
        by_name("int8", {"first": warmup({0: TOPK, SWITCH: "none"})}),
        {"second"},
    ),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *product(SCHEDULES, [flat(2), flat(3)]),
        *product(["int8, none", "by_name"], FORMS),
    ],
    ids=str,
)
@on_threads("layout")
def test_a_switch_conserves_the_sum_and_frees_the_residual(
    rank: Rank, name: str, layout: Layout
) -> None:
    codec, left = SCHEDULES[name]
    ranks = of_all(rank, totals(rank, codec, STEPS, layout=layout, **LARGE_STEPS))
    own, state = ranks[rank.rank], ranks[0].state
    assert own.digests == ranks[0].digests, "replicas"
    assert lost(ranks) < 1e-10
    assert own.names == left
    if layout.tree is None:
        assert (own.memory > 0) == bool(left)
    assert state is not None
    assert set(state["residuals"]) == left
    assert "factors" not in state


@pytest.mark.parametrize("layout", [flat(4), FORMS[0]], ids=str)
@on_threads("layout")
def test_a_step_that_is_not_finite_at_the_switch_sends_it_in_the_next(
    rank: Rank, layout: Layout
) -> None:
    def given(rank: int, step: int) -> Tensors:
        fed = feed(rank, step, dtype=DOUBLE)
        if step in (SWITCH, SWITCH + 1) and rank == 1:
            fed["second"][0, 0] = torch.inf
        return fed

    settings = {**LARGE_STEPS, "layout": layout, "given": given, "state_update": "deferred"}
    ranks = of_all(rank, totals(rank, SCHEDULES["int8, none"][0], STEPS, **settings))
    assert lost(ranks) < 1e-10
    assert not ranks[rank.rank].names


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("last", ["none", "bf16", "fp16", "qsgd:block_size=64"])
@on_threads(2)
def test_residuals_arrive_in_one_step(rank: Rank, last: str, scale: float | None) -> None:
    """With gradients of zero from the switch on."""
    codec = warmup({0: TOPK, 1: last})
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    settings = {"min_compress_numel": 256, "grad_scaler": scaler}
    with compressed(rank, Fed(), codec, **settings) as (model, reducer):

        def step(fed: Tensors) -> Tensors:
            model.zero_grad()
            loss = model(fed)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return {name: got / (scale or 1.0) for name, got in gradients(model).items()}

        step(feed(rank.rank, 0))
        owed = mean(of_all(rank, residuals(reducer)))
        sent, after = step(zeros), step(zeros)
    assert set(owed) == {"first", "second"}
    for name, value in owed.items():
        error = 0.0 if last == "none" else 2**-8 if "16" in last else 1 / 7
        gap = sent[name].flatten() - value
        assert gap.abs().max() <= value.abs().max() * (error + 1e-6) * 2
        assert not after[name].any()


@pytest.mark.parametrize("layout", [flat(2), *FORMS[:2]], ids=str)
@pytest.mark.parametrize("name", ["int8, none", "powersgd, none"])
@on_threads("layout")
def test_a_run_resumed_before_the_switch_sends_it(rank: Rank, name: str, layout: Layout) -> None:
    """Bit for bit as the run without interruption; and again after the switch."""

    def train(steps: range, load: State | None = None) -> tuple[Totals, State]:
        codec, _ = SCHEDULES[name]
        found = totals(rank, codec, steps, load=load, layout=layout, **LARGE_STEPS)
        state = of_all(rank, found.state)[0]
        assert state is not None
        return found, state

    (whole, end), (before, state) = train(range(STEPS)), train(range(SWITCH))
    after, other_end = train(range(SWITCH, STEPS), state)
    if layout.tree is None:  # inside a node, DDP's first bucket layout adds in another order
        assert after.digests == whole.digests[SWITCH:]
    assert end["residuals"] == other_end["residuals"] == {}
    for name, total in plus(before.outputs, after.outputs).items():
        assert (total - whole.outputs[name]).abs().max() < 1e-9


@on_threads(2)
def test_a_codec_without_a_residual_sends_what_a_checkpoint_owes(rank: Rank) -> None:
    """Also if its first step is not finite."""
    state = of_all(rank, totals(rank, "int8", 2, **LARGE_STEPS).state)[0]

    def given(rank: int, step: int) -> Tensors:
        value = torch.inf if step == 2 else 0.0
        return {name: torch.full(shape, value, dtype=DOUBLE) for name, shape in SHAPES.items()}

    loaded = totals(rank, "none", range(2, 4), given=given, load=state, **LARGE_STEPS)
    assert state is not None
    for name, rows in state["residuals"].items():
        assert torch.allclose(loaded.outputs[name].flatten(), rows.mean(0), atol=1e-12)
    assert not loaded.names


@on_threads(2)
def test_the_residual_of_an_unused_parameter_is_kept_until_it_is_used(rank: Rank) -> None:
    arguments = {"ddp": {"find_unused_parameters": True}, "min_compress_numel": 256}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with compressed(rank, Fed(), warmup({0: TOPK, 1: "none"}), **arguments) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        owed = mean(of_all(rank, residuals(reducer)))["second"]
        backward(model, {name: zeros[name] for name in ("first", "bias")})
        assert set(reducer.residuals) == {"second"}
        got = backward(model, zeros)["second"]
        assert not set(reducer.residuals)
    assert torch.allclose(got.flatten(), owed, atol=1e-6)


@on_threads(2)
def test_momentum_ends_with_the_codec_that_brings_it(rank: Rank) -> None:
    found = totals(rank, warmup({0: DGC, SWITCH: "none"}), STEPS, **LARGE_STEPS)
    assert not found.names
    assert found.memory == 0
    assert "momenta" not in (found.state or {})


@on_threads(2)
def test_momentum_that_goes_on_does_not_multiply_the_residual(rank: Rank) -> None:
    """Beside ``dgc`` uncompressed tensors have momentum too; a residual of dgc is a sum of momenta.

    With gradients of zero all that comes out is the residual and the tail of the momentum.
    """
    codec = warmup({0: by_size(DGC, min_numel=1), 2: by_size(DGC, min_numel=10_000)})
    zeros = {n: torch.zeros(shape, dtype=DOUBLE) for n, shape in SHAPES.items()}
    with compressed(rank, Fed(dtype=DOUBLE), codec) as (model, reducer):
        for step in range(2):
            backward(model, feed(rank.rank, step, dtype=DOUBLE))
        u, v = reducer.state.momenta["first"], reducer.residuals["first"]
        expected = sum(of_all(rank, v + u * 0.9 / (1 - 0.9))) / 2
        total = sum(backward(model, zeros)["first"] for _ in range(300))
    assert (total.flatten() - expected).abs().max() < 1e-9
