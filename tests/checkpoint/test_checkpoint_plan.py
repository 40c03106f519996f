"""Which rank writes which bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshots import filled, owned_tensors, small_state, trained

from lightning_dist.checkpoint.snapshot.pickling import pickled
from lightning_dist.checkpoint.snapshot.plan import PICKLE, Plan, owned_by, plan, shape_of

sizes = st.lists(st.integers(0, 200), max_size=8)
worlds = st.integers(1, 8)


def divided(shared: list[int], own: list[int], ranks: int) -> tuple[list[Plan], dict[str, bytes]]:
    """The plans of all ranks for a state of shared and own tensors, and all its records."""
    ours = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in shared]
    rest = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in own]
    content = pickled([t for pair in zip(ours, rest, strict=False) for t in pair] + ours + rest)
    owned = owned_tensors(*(t for t in ours if t.numel()))
    plans = [plan(content, owned=owned, overlap=True, rank=r, ranks=ranks) for r in range(ranks)]
    records = {f"data/{key}": bytes(s.tolist()) for key, s in enumerate(content.storages)}
    return plans, {PICKLE: content.data, **records}


@given(sizes, sizes, worlds)
def test_every_byte_is_written_once(shared: list[int], own: list[int], ranks: int) -> None:
    plans, records = divided(shared, own, ranks)
    found: dict[str, bytes] = dict.fromkeys(plans[0].records, b"")
    for of_rank in plans:
        snapshot = filled(of_rank)
        for piece in of_rank.pieces:
            found[piece.record] += snapshot[piece.offset : piece.offset + piece.nbytes]
    assert {name: found[name] for name in records} == records
    assert found.keys() - records.keys() == {"byteorder", "version"}


@given(sizes, sizes, worlds)
def test_shared_bytes_are_divided_evenly(shared: list[int], own: list[int], ranks: int) -> None:
    plans, _ = divided(shared, own, ranks)
    shares = [sum(run.piece.nbytes for run in of_rank.later) for of_rank in plans]
    assert sum(shares) == sum(shared)
    assert max(shares) - min(shares) <= 1


@given(sizes, sizes, worlds)
def test_rank_0_alone_has_the_rest(shared: list[int], own: list[int], ranks: int) -> None:
    first, *others = divided(shared, own, ranks)[0]
    assert sum(run.piece.nbytes for run in first.now) == sum(own)
    assert {piece.record for piece, _ in first.constants} == {PICKLE, "byteorder", "version"}
    assert all((of_rank.now, of_rank.constants) == ((), ()) for of_rank in others)


@given(sizes, sizes, worlds)
def test_pieces_lie_apart_in_the_order_of_the_archive(
    shared: list[int], own: list[int], ranks: int
) -> None:
    for of_rank in divided(shared, own, ranks)[0]:
        order = [of_rank.records.index(piece.record) for piece in of_rank.pieces]
        assert order == sorted(order)
        ends = 0
        for piece in sorted(of_rank.pieces, key=lambda piece: piece.offset):
            assert piece.offset >= ends
            assert piece.offset % 64 == 0
            ends = piece.offset + piece.nbytes
        assert ends <= of_rank.nbytes


def test_without_overlap_all_is_copied_at_the_trigger() -> None:
    state = small_state()
    owned = owned_tensors(state["weight"])
    later = plan(pickled(state), owned=owned, overlap=True)
    at_once = plan(pickled(state), owned=owned, overlap=False)
    assert [run.piece.record for run in later.later] == ["data/0"]
    assert at_once.later == ()
    assert {r.piece for r in (*later.now, *later.later)} == {r.piece for r in at_once.now}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_own_parameters_and_their_state(kind: Any) -> None:
    arguments = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer = trained(kind, **arguments)
    expected = [*model.parameters()]
    for state in optimizer.state.values():
        expected += [value for value in state.values() if torch.is_tensor(value)]
    assert set(owned_by([optimizer])) == set(owned_tensors(*expected))
    assert not set(owned_by([optimizer])) & set(owned_tensors(*model.buffers()))
    assert owned_by([]) == {}


def test_empty_parameters_are_owned_by_nobody() -> None:
    empty = torch.nn.Parameter(torch.empty(0))
    assert owned_by([torch.optim.SGD([empty], lr=0.1)]) == {}


def test_the_shape_tells_apart_what_would_be_divided_differently() -> None:
    one, other = torch.zeros(3), torch.zeros(4)
    owned = owned_tensors(one, other)
    shape = shape_of(pickled([one, other]), owned)
    assert shape == shape_of(pickled({"a": one, "b": [other]}), owned)
    assert shape != shape_of(pickled([other, one]), owned)
    assert shape != shape_of(pickled([one]), owned)
    # The same bytes under another number: a tensor that only this rank has came first.
    assert shape != shape_of(pickled([torch.zeros(9), one, other]), owned)
