"""How a tensor is cut: every element in exactly one place, and by the tensor alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.codecs import DGC, TopK
from lightning_dist.reducer.units.sizes import UNIT_ELEMENTS, unit_elements
from lightning_dist.reducer.units.tiles import Grid, Span

grids = st.builds(
    Grid,
    numel=st.integers(1, 5000),
    rows=st.integers(1, 9),
    block=st.sampled_from([1, 2, 16, 64, 256]),
)
limits = st.integers(1, 400)


@given(grids, limits)
def test_spans_cover_every_element_exactly_once(grid: Grid, most_blocks: int) -> None:
    seen = [0] * grid.numel
    for span in grid.spans(most_blocks):
        for _, start, length in span.filled():
            for element in range(start, start + length):
                seen[element] += 1
    assert seen == [1] * grid.numel


@given(grids, limits)
def test_an_element_stays_with_its_row_and_block(grid: Grid, most_blocks: int) -> None:
    """Element e is in row e // row length, in the columns of its block, however spans are cut."""
    row_length = grid.blocks_per_row * grid.block
    for span in grid.spans(most_blocks):
        for row, start, length in span.filled():
            assert start // row_length == (start + length - 1) // row_length == row
            assert span.first == start % row_length // grid.block
            assert (start + length - 1) % row_length // grid.block < span.last


@given(grids, limits)
def test_direct_spans_never_leave_the_tensor(grid: Grid, most_blocks: int) -> None:
    """They are viewed in place: all their rows must be filled to the last element."""
    for span in grid.spans(most_blocks):
        if span.direct:
            lengths = [length for _, _, length in span.filled()]
            assert lengths == [span.columns * grid.block] * grid.rows


@given(grids, limits)
def test_columns_follow_each_other_and_keep_the_limit(grid: Grid, most_blocks: int) -> None:
    spans = list(grid.spans(most_blocks))
    assert [span.first for span in spans] == [0, *(span.last for span in spans)][:-1]
    assert spans[-1].last == grid.blocks_per_row
    for span in spans:
        assert span.columns >= 1
        assert span.columns * grid.rows <= max(most_blocks, grid.rows)


@given(grids)
def test_what_can_be_viewed_in_place_is(grid: Grid) -> None:
    """Only the columns in which the last rows have a gap are staged."""
    staged = sum(span.columns for span in grid.spans(1 << 30) if not span.direct)
    unfilled = grid.rows * grid.blocks_per_row - grid.numel // grid.block
    assert staged == min(unfilled, grid.blocks_per_row)


def test_an_example_by_hand() -> None:
    """1000 elements in blocks of 100 over 3 ranks: rows of 4, 4 and 2 blocks."""
    grid = Grid(numel=1000, rows=3, block=100)
    assert grid.blocks_per_row == 4
    assert grid.full_columns == 2
    first, second = grid.spans(most_blocks=6)
    assert (first, second) == (Span(grid, 0, 2, direct=True), Span(grid, 2, 4, direct=False))
    assert list(first.filled()) == [(0, 0, 200), (1, 400, 200), (2, 800, 200)]
    assert list(second.filled()) == [(0, 200, 200), (1, 600, 200)]


def test_more_ranks_than_blocks() -> None:
    """Rows beyond the last block are empty and nothing is direct."""
    (span,) = Grid(numel=300, rows=4, block=256).spans(100)
    assert not span.direct
    assert list(span.filled()) == [(0, 0, 256), (1, 256, 44)]


def test_small_payloads_travel_together() -> None:
    """A message costs as much as many KB; other payloads stay in units that overlap."""
    for codec in (TopK(ratio=0.1), TopK(), DGC()):
        sparse = codec.wire_bytes(codec.block) / codec.block
        elements = unit_elements(1, sparse=sparse)
        assert elements * sparse >= (1 << 16) - codec.block
        assert elements == UNIT_ELEMENTS or elements * sparse <= 1 << 16
    assert unit_elements(1) == unit_elements(1, sparse=1.0) == UNIT_ELEMENTS
    assert unit_elements(64) == 64 << 15
