"""Tensors of which every rank has a part, in one checkpoint, without any communication."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshots import assert_equal, filled, origin, write_folder
from torch import Tensor

from lightning_dist.checkpoint.disk.archive import crc32
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder import Receipt, merge
from lightning_dist.checkpoint.disk.jobs import Failed, SaveFolder
from lightning_dist.checkpoint.disk.manifest import Part, zeros
from lightning_dist.checkpoint.disk.verify import verify
from lightning_dist.checkpoint.reading import consolidate, load
from lightning_dist.checkpoint.snapshot.pickling import pickled
from lightning_dist.checkpoint.snapshot.plan import Striped, plan

Cuts = list[tuple[int, int, int]]  # (start, length, rank)


@st.composite
def cuts(draw: Any, numel: int = 60, ranks: int = 3) -> Cuts:
    """Parts of a tensor that do not overlap, each on some rank."""
    edges = sorted(draw(st.lists(st.integers(0, numel), max_size=8, unique=True)))
    pairs = list(pairwise(edges))
    kept = [pair for pair in pairs if draw(st.booleans())]
    return [(start, end - start, draw(st.integers(0, ranks - 1))) for start, end in kept]


def saves(target: str, values: Tensor, parts: Cuts, ranks: int = 3) -> list[Any]:
    made = []
    for rank in range(ranks):
        whole = torch.full_like(values, torch.nan)
        own = [(start, values.flatten()[start : start + n]) for start, n, r in parts if r == rank]
        striped = {whole.untyped_storage().data_ptr(): Striped(whole, tuple(reversed(own)))}
        content = pickled({"before": torch.ones(3), "whole": whole, "after": torch.ones(2)})
        divided = plan(content, owned={}, overlap=False, striped=striped, rank=rank, ranks=ranks)
        save = SaveFolder(
            origin(ranks=ranks), target, divided.pieces, rank, divided.records,
            tuple(divided.striped.items()), peer_timeout=20,
        )  # fmt: skip
        made.append((save, filled(divided)))
    return made


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=cuts())
def test_parts_are_where_they_belong_and_the_rest_is_zero(parts: Cuts, tmp_path: Path) -> None:
    target = f"{tmp_path}/x.ckpt"
    values = torch.randn(3, 20, dtype=torch.float64)
    events = write_folder(saves(target, values, parts))
    assert not any(isinstance(event, Failed) for event in events), events
    expected = torch.zeros(60, dtype=torch.float64)
    for start, numel, _ in parts:
        expected[start : start + numel] = values.flatten()[start : start + numel]
    verify(target)
    state = {"before": torch.ones(3), "whole": expected.view(3, 20), "after": torch.ones(2)}
    assert_equal(load(target), state)
    single = tmp_path / "single.ckpt"
    single.unlink(missing_ok=True)
    consolidate(target, str(single))
    assert_equal(torch.load(single), state)
    verify(str(single))


@pytest.mark.parametrize("numel", [0, 1, (1 << 20) + 7, 3 << 20])
def test_zeros_have_their_checksum(numel: int) -> None:
    assert zeros(numel) == Part("", 0, numel, crc32([bytes(numel)]))


def merged(
    *placed: tuple[int, int], striped: int | None = None, complete: int | None = None
) -> tuple[Part, ...]:
    """``(start, bytes)`` of the parts of one record."""
    gaps, whole = (
        () if nbytes is None else (("data/0", nbytes),) for nbytes in (striped, complete)
    )
    save = SaveFolder(origin(), "x", (), 0, ("data/0",), gaps, whole)
    parts = tuple(("data/0", start, Part("f", start, n, 0)) for start, n in placed)
    return merge(save, [Receipt(parts=parts)]).records["data/0"]


def test_parts_come_in_any_order() -> None:
    assert merged((4, 4), (0, 4)) == (Part("f", 0, 4, 0), Part("f", 4, 4, 0))


def test_gaps_are_filled_where_they_may_be() -> None:
    assert merged((2, 2), striped=9) == (zeros(2), Part("f", 2, 2, 0), zeros(5))


@pytest.mark.parametrize("placed", [[(0, 4), (2, 4)], [(0, 4), (0, 4)], [(0, 4), (5, 1)], [(1, 3)]])
def test_what_was_not_written_once_is_an_error(placed: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointError, match=r"bytes \d to \d of data/0 were not written once"):
        merged(*placed)


@pytest.mark.parametrize("placed", [[(0, 4)], [(0, 4), (5, 4)], [(0, 4), (4, 6)], []])
def test_what_must_be_complete_has_no_gap_and_an_end(placed: list[tuple[int, int]]) -> None:
    assert merged((4, 5), (0, 4), complete=9) == (Part("f", 0, 4, 0), Part("f", 4, 5, 0))
    with pytest.raises(CheckpointError, match=r"bytes \d+ to \d+ of data/0 were not written once"):
        merged(*placed, complete=9)


def test_parts_that_an_optimizer_owns_are_copied_later() -> None:
    """Of a sharded parameter, as of a whole one; a residual is copied at the trigger."""
    shard, residual = torch.ones(4), torch.ones(4)
    wholes = [torch.empty(8), torch.empty(8)]
    striped = {
        whole.untyped_storage().data_ptr(): Striped(whole, ((4, part),), complete=part is shard)
        for whole, part in zip(wholes, (shard, residual), strict=True)
    }
    owned = {shard.untyped_storage().data_ptr(): shard}
    divided = plan(pickled(wholes), owned=owned, overlap=True, striped=striped, rank=1, ranks=2)
    assert [run.piece.record for run in divided.later] == ["data/0"]
    assert [run.piece.record for run in divided.now] == ["data/1"]
    assert (divided.complete, divided.striped) == ({"data/0": 32}, {"data/1": 32})
