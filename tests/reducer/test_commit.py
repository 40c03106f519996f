"""When residuals are written: while encoding, or once the step has landed."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Literal

import pytest
import torch
from fed_model import Model
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    residuals,
    step_digest,
)
from layouts import HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from test_skipped_steps import THREE
from threads import of_all, on_threads
from worlds import Rank

from lightning_dist.codecs import resolve_codec
from lightning_dist.reducer.plan.slices import slices_of

LARGE = {"min_compress_numel": 256}
SEVERAL_BUCKETS = {"ddp": {"bucket_cap_mb": 0.004}}
INT8 = resolve_codec("int8:block_size=64")


def digests(rank: Rank, codec: str, commit: str, **settings: Any) -> list[str]:
    """Gradients and state of four steps."""
    with compressed(rank, Fed(), codec, commit=commit, **LARGE, **settings) as (model, reducer):
        assert reducer.immediate is (commit == "immediate")
        return [step_digest(backward(model, feed(rank.rank, s)), reducer) for s in range(4)]


@pytest.mark.parametrize(
    ("layout", "codecs"),
    [
        (flat(2), EVERY_CODEC[::4]),
        pytest.param(flat(2), EVERY_CODEC, marks=pytest.mark.slow),
        (flat(3), EVERY_CODEC),
        (Layout(PAIRS), [*FEW, *PER_LEVEL]),
        (Layout(UNEVEN), FEW),
        (Layout(HOSTS_OF_FOUR), ["int8"]),
    ],
    ids=lambda value: str(value) * isinstance(value, Layout),
)
@on_threads("layout")
def test_finite_steps_are_the_same_bits(rank: Rank, layout: Layout, codecs: list[str]) -> None:
    """So that every law of the deferred commit holds for the immediate one, and the reverse."""
    form = {**layout.form, **SEVERAL_BUCKETS}
    for codec in codecs:
        ways = [digests(rank, codec, commit, **form) for commit in ("immediate", "deferred")]
        assert ways[0] == ways[1], codec


def spoilt(rank: int, step: int) -> Tensors:
    """Gradients with one inf, in one block of one rank."""
    given = feed(rank, step)
    if rank == 1:
        given["first"].view(-1)[70] = torch.inf
    return given


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_what_is_not_finite_keeps_its_residual_and_nothing_else_is_lost(
    rank: Rank, size: int
) -> None:
    """The rank with the inf keeps the residual of that block; all ranks see it.

    A step that is then skipped costs what it has sent, no more: afterwards the residual of every
    other element is what the codec has lost of it.
    """
    with compressed(rank, Fed(), INT8, **LARGE) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        before = residuals(reducer)
        bad = backward(model, spoilt(rank.rank, 1))
        after = residuals(reducer)
        good = backward(model, feed(rank.rank, 2))
    assert all(g.isfinite().all() for g in (*good.values(), *after.values()))
    finite = {name: bool(g.isfinite().all()) for name, g in bad.items()}
    assert finite == {"first": False, "bias": True, "second": True}
    assert int((~bad["first"].isfinite()).sum()) == INT8.block
    kept = after["first"] == before["first"]
    block = torch.arange(len(kept)) // INT8.block == 70 // INT8.block
    if rank.rank == 1:
        assert kept[block].all()
    assert kept[~block].float().mean() < 0.1
    largest = max(float(given.abs().max()) for given in feed(rank.rank, 1).values())
    assert after["first"].abs().max() < largest / 20  # rounding errors, not gradients
    assert len({*of_all(rank, digest(good))}) == 1


Commit = Literal["immediate", "deferred"]


@pytest.mark.parametrize("commit", ["immediate", "deferred"])
@on_threads(2)
def test_a_backward_that_is_cut_short_is_not_counted(rank: Rank, commit: Commit) -> None:
    model, counts = Model(rank.network(), commit=commit, shapes=THREE), []
    with closing(model.reducer):
        for step, buckets in enumerate((3, 2, 3)):
            futures = model.begin(feed(rank.rank, step, THREE), buckets)
            if buckets == 3:
                torch.futures.wait_all(futures)
                counts.append(dict(model.reducer.comm_stats()["last_step"]))
    assert counts[0] == counts[1]


@on_threads(2)
def test_a_backward_that_is_cut_short_leaves_replicas_equal(rank: Rank) -> None:
    """It costs what it has sent: residuals stay rounding errors."""
    model = Model(rank.network(), commit="immediate", shapes=THREE)
    with closing(model.reducer):
        for step in range(4):
            futures = model.begin(feed(rank.rank, step, THREE), 2 if step == 1 else 3)
            if step != 1:
                torch.futures.wait_all(futures)
                assert len({*of_all(rank, digest(model.flats))}) == 1
        assert all(each.abs().max() < 0.2 for each in residuals(model.reducer).values())


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_keys_and_their_order_may_be_any(rank: Rank, size: int) -> None:
    """Tensors that follow each other never share memory, whatever they are called."""

    def train(commit: Commit) -> list[str]:
        model, got = Model(rank.network(), commit=commit, shapes=THREE), []
        parameters = dict(zip((0, 2, 4), model.parameters.items(), strict=True))
        with closing(model.reducer):
            for step, keys in enumerate([(0, 2, 4), (0, 2, 4), (2, 0, 4), (4, 2, 0)]):
                given = feed(rank.rank, step, THREE)
                handles = []
                for key in keys:
                    name, parameter = parameters[key]
                    flat = model.flats[name].copy_(given[name].flatten())
                    slices = slices_of([name], [parameter])
                    handles.append(model.reducer.start(flat, slices, key=key))
                model.reducer.finish()
                torch.futures.wait_all([handle.done for handle in handles])
                got.append(digest(model.flats))
        return got

    assert train("immediate") == train("deferred")


def payload_bytes(rank: Rank, commit: str) -> float:
    """Bytes per element of payloads, in a model of 8 buckets of one parameter each."""
    shapes = {f"{i}": (64, 1024) for i in range(8)}
    ddp = {"bucket_cap_mb": 0.25}
    with compressed(rank, Fed(shapes), commit=commit, ddp=ddp, **LARGE) as (model, reducer):
        for step in range(3):
            backward(model, feed(rank.rank, step, shapes))
        memory = reducer.memory()
        elements = sum(p.numel() for p in model.parameters())
        assert memory["residual_bytes"] == 4 * elements
        return memory["buffer_bytes"] / elements


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_tensors_take_turns_with_the_memory_of_payloads(rank: Rank, size: int) -> None:
    assert payload_bytes(rank, "immediate") < (0.8 if size > 2 else 0.6)
    # W payloads where they are gathered, else three of one.
    assert payload_bytes(rank, "deferred") > 2


@pytest.mark.parametrize(
    ("settings", "immediate"),
    [
        ({}, True),
        ({"commit": "deferred"}, False),
        ({"ddp": {"find_unused_parameters": True}}, False),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, False),
        ({"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}, True),
        ({"grad_scaler": torch.amp.GradScaler("cpu"), "commit": "immediate"}, True),
    ],
)
@on_threads(2)
def test_which_one_is_in_force(rank: Rank, settings: dict[str, Any], immediate: bool) -> None:
    with compressed(rank, Fed(), **LARGE, **settings) as (_, reducer):
        assert reducer.immediate is immediate
        assert reducer.comm_config()["commit"] == ("immediate" if immediate else "deferred")


@on_threads(2)
def test_unused_parameters_need_the_deferred_one(rank: Rank) -> None:
    ddp = {"find_unused_parameters": True}
    refused = pytest.raises(ValueError, match=r"commit='immediate'.*find_unused.*'auto'")
    with refused, compressed(rank, Fed(), commit="immediate", ddp=ddp):
        pass
