"""Other groups under a live reducer, after a rank is silent, is gone, or hosts are others."""

import threading
import time
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fed_model import SHAPES, Model, among
from feeding import Tensors, digest, feed, held
from test_lost_ranks import Told
from threads import on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import Int8
from lightning_dist.integrations.torch.ddp import compile_kernels
from lightning_dist.kernels.inductor import Variant
from lightning_dist.reducer.executor import Worker
from lightning_dist.reducer.plan import planner

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
        failed(model.begin(feed(rank.rank, 1, SHAPES)), r"No answer.*within 0\.3 s|earlier")
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


@pytest.mark.parametrize("commit", ["deferred", "immediate"])
@on_threads(2)
def test_a_reducer_that_waits_for_a_silent_rank_is_closed_in_half_a_second(
    rank: Rank, commit: Literal["immediate", "deferred"]
) -> None:
    model = Model(rank.network(), commit=commit)
    model.step(rank.rank, 0)
    if rank.rank == 1:
        return
    futures = model.begin(feed(rank.rank, 1, SHAPES))
    start = time.monotonic()
    with patch.object(Worker, "close", autospec=True, side_effect=Worker.close) as close:
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
        ("int8", "all_gather_single", 0),
        ("int8", "gather", 0),
        ("powersgd:rank=2", "broadcast", 1),
    ],
)
def test_saving_state_waits_no_longer_than_a_step_for_a_silent_rank(
    codec: str, at: str, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent from the collective ``at`` on; rank ``to`` waits for it."""
    collective, silent = getattr(dist, at), set[int]()

    def unless_silent(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() in silent:
            raise Silent
        return collective(*arguments, **named)

    monkeypatch.setattr(dist, at, unless_silent)

    def body(rank: Rank) -> None:
        model = Model(rank.network(), codec)
        model.step(rank.rank, 0)
        model.reducer.network.limit.seconds = 0.3
        if rank.rank != to:
            silent.add(threading.get_ident())
        error, match = (RuntimeError, r"within 0\.3 s") if rank.rank == to else (Silent, None)
        with pytest.raises(error, match=match):
            model.reducer.state_dict(to=to)
        model.reducer.close()

    run_threads(body, 2)


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

    monkeypatch.setattr(planner, "fused_passes", compiled)

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

    monkeypatch.setattr(planner, "fused_passes", compiled)
    monkeypatch.setattr(planner, "known_passes", lambda variant: asked.get(variant, {}))

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
