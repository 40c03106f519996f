"""Saved state of a reducer, and other groups under a live one, after a rank is silent or gone."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fed_model import SHAPES as REBOUND
from fed_model import Model, among
from feeding import (
    EVERY_CODEC,
    PER_LEVEL,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    held,
)
from layouts import FORMS, HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, Tree, flat
from saving import SETTINGS, Resumed, State, tensors, through_a_file, train, train_here
from test_lost_ranks import Told
from threads import of_all, on_threads
from torch import Tensor
from worlds import ALL_GATHER, Rank, run_threads

from lightning_dist.codecs import Int8, resolve_codec
from lightning_dist.kernels.inductor import Variant
from lightning_dist.ranks.channel import WaitLimit
from lightning_dist.ranks.facts import Spread
from lightning_dist.reducer.network import ExecutorThread
from lightning_dist.reducer.plan import flat as flat_plan
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.ddp import compile_kernels

KEEP = [c for c in EVERY_CODEC if resolve_codec(c).keeps_residual]

# A ring adds in an order that depends on the place in the bucket, which a restart changes.
IN_ORDER = [c for c in EVERY_CODEC if resolve_codec(c).exchange != "allreduce"]
CASES = [
    (flat(2), EVERY_CODEC),
    (flat(3), IN_ORDER[::3]),
    pytest.param(flat(3), IN_ORDER, marks=pytest.mark.slow),
    (flat(4), ["int8"]),
    (FORMS[0], [*KEEP, *PER_LEVEL]),
    (FORMS[1], ["int8", *PER_LEVEL]),
    # Uneven nodes are in the leader form.
    (FORMS[2], ["int8", "powersgd:rank=2", "dgc:ratio=0.1,block_size=128", *PER_LEVEL]),
    pytest.param(FORMS[2], [*KEEP, *PER_LEVEL], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "codecs"), CASES, ids=lambda v: str(v) * isinstance(v, Layout))
@on_threads("layout")
def test_a_resumed_run_equals_the_one_that_went_on(
    rank: Rank, layout: Layout, codecs: Sequence[str]
) -> None:
    """Every bit of gradients and state, and the state that it saves at its end.

    A state saved right after it was loaded is the same: a row for every rank or node, momenta and
    factors too, on rank 0 alone.
    """
    stop, steps = (3, 5) if layout.size == 2 else (2, 4)
    for codec in codecs:
        ran = Resumed(rank, stop=stop, steps=steps, codec=codec, **layout.form)
        assert ran.resumed == ran.whole, codec
        held = of_all(rank, ran.residuals)
        if rank.rank:
            assert ran.state is None, codec
            assert ran.again is None, codec
            continue
        assert ran.state is not None, codec
        assert ran.again is not None, codec
        assert ran.again.keys() == ran.state.keys(), codec
        assert ("factors" in ran.state) == codec.startswith("powersgd")
        assert ("momenta" in ran.state) == codec.startswith("dgc")
        assert tensors(ran.again) == tensors(ran.state), codec
        assert (ran.again["step"], ran.again["world_size"]) == (stop, layout.size)
        kept = {"first", "second"} if codec in (*KEEP, *PER_LEVEL) else set()
        assert set(ran.state["residuals"]) == kept, codec
        for name in kept:
            rows = ran.state["residuals"][name]
            holders = layout.size if layout.tree is None else len(layout.tree)
            assert rows.shape == (holders, torch.Size(SHAPES[name]).numel())
            assert all(row.any() for row in rows)
            if layout.tree is None:
                assert torch.equal(rows, torch.stack([of[name] for of in held])), codec


@on_threads(3)
def test_saving_and_residuals_matter(rank: Rank) -> None:
    """A run that is saved goes on as one that is not; one that starts afresh does not."""
    went_on = Resumed(rank, stop=2, steps=4, codec="int8").whole[0]
    assert went_on == train_here(rank, range(4))[0][2:]
    assert went_on[0] != train_here(rank, range(2, 4))[0][0]


SMALL_TOO = {"one": (40,), "two": (24,), "weight": (40, 48), "three": (7,), "four": (300,)}
"""Small neighbours, which a codec of blocks inside a node must not mix."""


@pytest.mark.parametrize("layout", FORMS, ids=str)
@on_threads("layout")
def test_small_neighbours_resume_bit_for_bit(rank: Rank, layout: Layout) -> None:
    """DDP joins other neighbours after its first backward, so blocks must not span them."""
    settings = {"codec": PER_LEVEL[0], **layout.form}
    ran = Resumed(rank, stop=2, steps=4, shapes=SMALL_TOO, **settings)
    assert ran.resumed == ran.whole


@pytest.mark.parametrize("codec", ["int8", "dgc:ratio=0.1,block_size=128", "powersgd:rank=2"])
def test_a_state_that_an_earlier_version_has_written_is_loaded(codec: str) -> None:
    """By the code of commit dbfda91c, on two ranks after two steps."""
    path = Path(__file__).with_name("state_of_version_1.pt")
    state = torch.load(path, weights_only=True)[codec]
    assert state["version"] == 1
    again = train(2, range(2, 2), state, codec=codec).state
    assert tensors(again) == tensors(state)
    went_on, afresh = (train(2, range(2, 3), each, codec=codec) for each in (state, None))
    assert went_on.state["step"] == 3
    assert went_on.digests != afresh.digests, "residuals are used"


def test_loading_replaces_what_was_held() -> None:
    """A reducer that has run before continues from the state alone, without one as a new one.

    (A checkpoint of plain DDP has no state.)
    """
    state = train(2, range(3)).state
    for loaded in (state, None):
        expected = train(2, range(3, 5), loaded)
        assert train(2, range(3, 5), loaded, before=range(50, 53)).digests == expected.digests


def test_the_start_step_is_counted_over_a_restart() -> None:
    """Compression that starts at step 4 starts at step 4, not 4 steps after the restart."""
    first = train(2, range(3), start_step=4)
    assert first.residuals == [{}, {}]
    assert train(2, range(3, 4), first.state, start_step=4).residuals == [{}, {}]
    later = train(2, range(3, 5), first.state, start_step=4)
    assert [set(held) for held in later.residuals] == [{"first", "second"}] * 2


@on_threads(2)
def test_a_state_of_another_version_or_model_is_refused(rank: Rank) -> None:
    """And one that only some ranks are given, as state_dict() returns it on rank 0 alone."""
    with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
        with pytest.raises(ValueError, match="must be of version 1, got 7; it was written by"):
            reducer.load_state_dict({"version": 7, "residuals": {}})
        with pytest.raises(ValueError, match="got None; give what state_dict\\(\\) returned"):
            reducer.load_state_dict({})
        with pytest.raises(ValueError, match=r"got 'last.pt'; read a file with torch.load"):
            reducer.load_state_dict("last.pt")  # type: ignore[arg-type]
        wrong = {"first": torch.zeros(2, 9)}
        reducer.load_state_dict({"version": 1, "step": 1, "residuals": wrong})
        with pytest.raises(RuntimeError, match="'first' has 9 elements, the parameter 1920"):
            backward(model, feed(rank.rank, 0))
    with compressed(rank, Fed(), **SETTINGS) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        state = reducer.state_dict()
        only = r"'one of step 1 \(\w+\)' on rank 0; 'none' on rank 1\nstate_dict\(\) returns it on"
        with pytest.raises(ValueError, match=only):
            reducer.load_state_dict(state)
        whole = of_all(rank, state)[0]
        other = {**whole, "residuals": {"head": whole["residuals"]["first"]}}
        with pytest.raises(ValueError, match=r"of this model, and has 'head', which"):
            reducer.load_state_dict(other)
        with pytest.raises(ValueError, match=r"the same on all ranks, got\n  state: 'one"):
            reducer.load_state_dict(other if rank.rank else whole)
        reducer.load_state_dict(whole)
        assert reducer.step == 1


LAYOUTS = [flat(3), *FORMS]
STRIPED = ["none", "int8", "dgc:ratio=0.1,block_size=128", "powersgd:rank=2"]
Saved = tuple[dict[str, Any], list[Spread]]
Seen = tuple[State | None, Saved]


def states(reducer: Reducer) -> Seen:
    """Gathered and spread."""
    gathered = reducer.state_dict()
    return gathered and through_a_file(gathered), copied(reducer.spread_state_dict())


def copied(spread: Saved) -> Saved:
    state, spreads = spread
    return state, [
        Spread(each.whole, tuple((start, part.clone()) for start, part in each.own))
        for each in spreads
    ]


def joined(of_ranks: list[Saved]) -> dict[str, Any]:
    """The state of rank 0 with the spreads of all ranks where they belong."""
    state, first = of_ranks[0]
    for index, spreads in enumerate(first):
        flat = spreads.whole.flatten()
        flat.zero_()
        taken = torch.zeros_like(flat, dtype=torch.bool)
        for _, of_rank in of_ranks:
            for start, part in of_rank[index].own:
                assert not taken[start : start + part.numel()].any(), "two ranks have the same"
                taken[start : start + part.numel()] = True
                flat[start : start + part.numel()] = part
        spreads.whole.copy_(flat.view_as(spreads.whole))
    return state


def flattened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), digest([value])
    if isinstance(value, dict):
        return {key: flattened(each) for key, each in value.items()}
    return [flattened(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@on_threads("layout")
def test_spreads_of_all_ranks_are_the_gathered_state(rank: Rank, layout: Layout) -> None:
    """Before a step, after two and just loaded; every rank describes the same tensors."""
    for codec in STRIPED:
        with compressed(rank, Fed(), codec, **SETTINGS, **layout.form) as (model, reducer):
            before = of_all(rank, states(reducer))
            for step in range(2):
                backward(model, feed(rank.rank, step))
            after = of_all(rank, states(reducer))
            reducer.load_state_dict(after[0][0])
            loaded = of_all(rank, states(reducer))
        if rank.rank:
            continue
        described = [[(e.whole.shape, e.whole.dtype) for e in of[1]] for _, of in after]
        assert all(of_rank == described[0] for of_rank in described), codec
        for moment, seen in enumerate((before, after, loaded)):
            gathered = seen[0][0]
            together = joined([spread for _, spread in seen])
            assert flattened(together) == flattened(gathered), (codec, moment)
            if moment and codec == "int8":
                assert any(part.abs().sum() > 0 for part in gathered["residuals"].values())


DOUBLE = torch.float64
TRIPLES: Tree = [[0, 1, 2], [3, 4, 5]]
CHANGES = [
    (flat(4), flat(2)),
    (flat(2), flat(3)),
    (flat(2), flat(1)),
    (flat(4), Layout(PAIRS)),
    (Layout(PAIRS), flat(4)),
    (Layout(PAIRS), Layout(UNEVEN)),
    (Layout(PAIRS), Layout(TRIPLES)),
    (Layout(PAIRS), flat(2)),
    (Layout(UNEVEN), Layout(PAIRS)),
    (Layout(HOSTS_OF_FOUR), flat(3)),
    (Layout(TRIPLES), Layout(HOSTS_OF_FOUR)),
]
RESIZED = ("int8", "powersgd:rank=2")


def mean_of_rows(state: State) -> Tensors:
    return {name: rows.mean(0) for name, rows in state["residuals"].items()}


def left_by(layout: Layout, codec: str, steps: int, state: State | None = None) -> State:
    """State after so many steps on this layout, from ``state`` on."""

    def body(rank: Rank) -> State | None:
        settings = {"dtype": DOUBLE, "codec": codec, **layout.form}
        return train_here(rank, range(steps), state, **settings)[2]

    found = run_threads(body, layout.size)[0]
    assert found is not None
    return through_a_file(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [*CHANGES[:6], *(pytest.param(*each, marks=pytest.mark.slow) for each in CHANGES[6:])],
    ids=str,
)
@pytest.mark.parametrize("codec", RESIZED)
def test_another_layout_conserves_the_residual(before: Layout, after: Layout, codec: str) -> None:
    """The mean over rows stays; then it comes out, or is held still, of steps without gradients."""
    first = left_by(before, codec, 3)
    owed = mean_of_rows(first)
    zeros = {n: torch.zeros_like(g) for n, g in feed(0, 0, dtype=DOUBLE).items()}

    def body(rank: Rank) -> tuple[State | None, list[Tensors], State | None]:
        settings = {**SETTINGS, **after.form}
        with compressed(rank, Fed(dtype=DOUBLE), codec, **settings) as (model, reducer):
            reducer.load_state_dict(first)
            loaded = reducer.state_dict()
            return loaded, [backward(model, zeros) for _ in range(4)], reducer.state_dict()

    loaded, came, still = run_threads(body, after.size)[0]
    assert loaded is not None
    assert still is not None
    assert loaded["world_size"] == after.size
    assert flattened(loaded.get("factors")) == flattened(first.get("factors"))
    for name, expected in owed.items():
        assert expected.any()
        found = mean_of_rows(loaded)[name]
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-16)
        held = mean_of_rows(still).get(name, torch.zeros(1))
        total = sum(gradients[name] for gradients in came).flatten() + held
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
        if codec == "int8" and after.tree is None and after.size > 1:
            torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-14)
            assert held.norm() < 1e-3 * expected.norm(), "it must have come out by now"


SOON = 8.0
"""Seconds: less than an executor's patience (10) and gloo's (20, `worlds.TIMEOUT`)."""
CODECS = ["int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2", "threshold:tau=1.5"]


def failed(futures: list[torch.futures.Future[Tensor]], match: str) -> None:
    for future in futures:
        with pytest.raises(RuntimeError, match=match):
            future.wait()


@pytest.mark.parametrize("codec", CODECS)
def test_survivors_of_a_silent_rank_take_the_next_step(codec: str) -> None:
    """With the state that they have, which the failed step has left as it was."""
    left: list[Tensors] = [{}, {}]
    two = threading.Barrier(2, timeout=60)

    def body(rank: Rank) -> list[str]:
        model = Model(rank.network(), codec)
        model.step(rank.rank, 0)
        if rank.rank == 2:
            return []  # silent from now on, with its sockets open
        model.reducer.network.limit.seconds = 0.3
        before = digest(held(model.reducer))
        failed(model.begin(feed(rank.rank, 1, REBOUND)), r"No answer.*within 0\.3 s|earlier")
        assert digest(held(model.reducer)) == before
        kept = model.reducer.residuals
        left[rank.rank] = {name: kept[name].clone() for name in kept}
        two.wait()
        start = time.monotonic()
        model.reducer.rebind(among(rank, [0, 1], "second"))
        assert time.monotonic() - start < SOON
        assert model.reducer.generation == 1
        twin = Model(among(rank, [0, 1], "twin"), codec)
        state: dict[str, Any] = {"version": 1, "step": model.reducer.step, "residuals": {}}
        state["residuals"] = {name: torch.stack([of[name] for of in left]) for name in left[0]}
        factors = {n: [f.clone() for f in both] for n, both in model.reducer.state.factors.items()}
        twin.reducer.load_state_dict({**state, "factors": factors})
        digests = []
        for step in range(1, 4):
            got, expected = model.step(rank.rank, step), twin.step(rank.rank, step)
            assert digest(got) == digest(expected)
            digests.append(digest(got))
        assert digest(held(model.reducer)) == digest(held(twin.reducer))
        for each in (model, twin):
            each.reducer.close()
        return digests

    first, second, _ = run_threads(body, 3)
    assert first == second


@pytest.mark.parametrize("state_update", ["deferred", "immediate"])
@on_threads(2)
def test_a_reducer_that_waits_for_a_silent_rank_is_closed_in_half_a_second(
    rank: Rank, state_update: Literal["immediate", "deferred"]
) -> None:
    model = Model(rank.network(), state_update=state_update)
    model.step(rank.rank, 0)
    if rank.rank == 1:
        return
    futures = model.begin(feed(rank.rank, 1, REBOUND))
    start = time.monotonic()
    with patch.object(
        ExecutorThread, "close", autospec=True, side_effect=ExecutorThread.close
    ) as close:
        model.reducer.close()
    assert [call.args[1:] for call in close.call_args_list] == [(0.5,), ()]
    assert time.monotonic() - start < SOON
    assert not model.reducer.in_step
    failed(futures, "Gave up")


class Silent(Exception):
    """A rank that stops taking part."""


@pytest.mark.parametrize(
    ("codec", "at", "to"),
    [
        ("int8", "all_reduce", 0),
        ("int8", ALL_GATHER, 0),
        ("int8", "gather", 0),
        ("powersgd:rank=2", "broadcast", 1),
    ],
)
def test_saving_state_waits_no_longer_than_a_step_for_a_silent_rank(
    codec: str, at: str, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent from the collective ``at`` on; rank ``to`` waits for it."""
    collective, silent = getattr(dist, at), dict[int, WaitLimit]()

    def unless_silent(*arguments: Any, **named: Any) -> Any:
        if limit := silent.get(threading.get_ident()):
            limit.seconds = 0.3  # from now on: this rank may have been slow to come here
            raise Silent
        return collective(*arguments, **named)

    monkeypatch.setattr(dist, at, unless_silent)

    def body(rank: Rank) -> None:
        model = Model(rank.network(), codec)
        model.step(rank.rank, 0)
        limit = of_all(rank, model.reducer.network.limit)[to]
        if rank.rank != to:
            silent[threading.get_ident()] = limit
        error, match = (RuntimeError, r"within 0\.3 s") if rank.rank == to else (Silent, None)
        with pytest.raises(error, match=match):
            model.reducer.state_dict(to=to)
        model.reducer.close()

    run_threads(body, 2)


@pytest.mark.parametrize("codec", ["none", "bf16", "sign"])
@on_threads(2)
def test_state_that_no_rank_has_of_its_own_is_no_collective(rank: Rank, codec: str) -> None:
    model = Model(rank.network(), codec, error_feedback=False)
    model.step(rank.rank, 0)
    if rank.rank == 0:
        state = model.reducer.state_dict()
        assert state is not None
        assert (state["step"], state["residuals"]) == (1, {})
    rank.barrier.wait()
    model.reducer.load_state_dict({"version": 1, "step": 5, "residuals": {}})
    assert model.reducer.step == 5
    model.reducer.close()


@on_threads(2)
def test_averaging_state_waits_no_longer_than_a_step_for_a_silent_rank(rank: Rank) -> None:
    model = Model(rank.network(), "int8")
    model.step(rank.rank, 0)
    if rank.rank == 0:
        model.reducer.network.limit.seconds = 0.3
        with pytest.raises(RuntimeError, match=r"within 0\.3 s"):
            model.reducer.state.average(model.reducer.network, row="rank 0")
    model.reducer.close()


def test_kernels_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for it again; compiling itself is another test's."""
    asked: list[Variant] = []

    def compiled(variant: Variant) -> dict[str, Any]:
        asked.append(variant)
        return {"decode_and_commit": variant.passes.decode_and_commit}

    monkeypatch.setattr(flat_plan, "fused_passes", compiled)

    def body(rank: Rank) -> None:
        model = Model(rank.network())
        model.reducer.planner.fuse(Int8(), {torch.float32})
        model.step(rank.rank, 0)
        if rank.rank < 2:
            model.reducer.rebind(among(rank, [0, 1], "second"))
            assert model.reducer.planner.is_fused
            model.step(rank.rank, 1)
        model.reducer.close()

    run_threads(body, 3)
    assert {(variant.rows, variant.received) for variant in asked} == {(3, 1), (1, 2)}


def test_where_others_wait_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels are used that were compiled ahead, for the ranks that there are usually."""
    asked: dict[Variant, dict[str, Any]] = {}

    def compiled(variant: Variant) -> dict[str, Any]:
        return asked.setdefault(variant, {"decode_and_commit": variant.passes.decode_and_commit})

    monkeypatch.setattr(flat_plan, "fused_passes", compiled)
    monkeypatch.setattr(flat_plan, "known_passes", lambda variant: asked.get(variant, {}))

    def body(rank: Rank) -> None:
        model = Model(among(rank, [rank.rank], "alone"))
        model.reducer.leave_failures_to(Told())
        parameters = [(each.dtype, each.numel()) for each in model.parameters.values()]
        object.__setattr__(model.reducer.settings, "compile_kernels", True)
        compile_kernels(model.reducer, parameters, says=False, ahead=rank.network())
        assert not model.reducer.planner.is_fused
        for step, members in enumerate(([0, 1, 2], [0, 1], [0, 1, 2])):
            if rank.rank in members:
                model.reducer.rebind(among(rank, members, f"step {step}"))
                assert model.reducer.planner.is_fused == (len(members) == 3)
                model.step(rank.rank, step)
        model.reducer.close()

    run_threads(body, 3)
    assert {(variant.rows, variant.received) for variant in asked} == {(3, 1)}
