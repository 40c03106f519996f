"""How tensors are cut into buckets, units and shares: by the tensor alone."""

from dataclasses import dataclass

import pytest
from feeding import Fed, Tensors, backward, compressed, feed, residuals, step_digest
from hypothesis import example, given
from hypothesis import strategies as st
from threads import on_threads
from worlds import Rank, run_threads

from lightning_dist.base import exchanges
from lightning_dist.base.exchanges import UNIT_ELEMENTS, unit_elements
from lightning_dist.codecs import DGC, TopK
from lightning_dist.reducer.plan.intra import Fragment, fragments
from lightning_dist.reducer.units.tiles import BlockColumns, Grid

grids = st.builds(
    Grid,
    numel=st.integers(1, 5000),
    rows=st.integers(1, 9),
    block=st.sampled_from([1, 2, 16, 64, 256]),
)
limits = st.integers(1, 400)


@given(grids, limits)
def test_an_element_is_in_one_span_with_its_row_and_block(grid: Grid, most_blocks: int) -> None:
    """Element e is in row e // row length, in the columns of its block, however spans are cut."""
    row_length = grid.blocks_per_row * grid.block
    seen = [0] * grid.numel
    for span in grid.spans(most_blocks):
        for row, start, length in span.filled():
            for element in range(start, start + length):
                seen[element] += 1
                assert element // row_length == row
                assert span.first <= element % row_length // grid.block < span.last
        if span.direct:  # viewed in place: all its rows must be filled to the last element
            lengths = [length for _, _, length in span.filled()]
            assert lengths == [span.columns * grid.block] * grid.rows
    assert seen == [1] * grid.numel


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
    assert (first, second) == (
        BlockColumns(grid, 0, 2, direct=True),
        BlockColumns(grid, 2, 4, direct=False),
    )
    assert list(first.filled()) == [(0, 0, 200), (1, 400, 200), (2, 800, 200)]
    assert list(second.filled()) == [(0, 200, 200), (1, 600, 200)]


def test_small_payloads_travel_together() -> None:
    """A message costs as much as many KB; other payloads stay in units that overlap."""
    for codec in (TopK(ratio=0.1), TopK(), DGC()):
        sparse = codec.wire_bytes(codec.block) / codec.block
        elements = unit_elements(1, sparse=sparse)
        assert elements * sparse >= (1 << 16) - codec.block
        assert elements == UNIT_ELEMENTS or elements * sparse <= 1 << 16
    assert unit_elements(1) == unit_elements(1, sparse=1.0) == UNIT_ELEMENTS
    assert unit_elements(64) == 64 << 15


ALIGN = 512  # of every cut, so that few blocks are broken


@dataclass(frozen=True)
class Case:
    name: str
    numel: int
    owners: int
    most: int  # elements of a share

    def cut(self, *, whole: bool = False) -> list[Fragment]:
        return list(
            fragments(
                self.name,
                self.numel,
                owners=self.owners,
                most=self.most,
                whole=whole,
            )
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        name=draw(st.text("abc.", max_size=4)),
        numel=draw(st.one_of(st.integers(1, 3 * ALIGN), st.integers(1, 50_000))),
        owners=draw(st.integers(1, 8)),
        most=ALIGN * draw(st.integers(1, 16)),
    )


def taken(fragment: Fragment) -> list[tuple[int, int, int]]:
    """``(start, end, rank)`` of the shares that are not empty, in the order of the elements."""
    shares = enumerate(fragment)
    return sorted((start, end, rank) for rank, (start, end) in shares if end > start)


def numel_of(fragment: Fragment) -> int:
    return sum(end - start for start, end in fragment)


@given(cases(), st.booleans())
@example(Case("w", 1, 8, ALIGN), False)
@example(Case("w", 8 * ALIGN + 1, 8, ALIGN), False)
def test_every_element_belongs_to_one_owner(case: Case, whole: bool) -> None:
    at = 0
    for fragment in case.cut(whole=whole):
        assert len(fragment) == case.owners
        assert taken(fragment)
        for start, end, _ in taken(fragment):
            assert start == at
            at = end
    assert at == case.numel


@given(cases())
def test_shares_are_balanced_and_at_most_so_large(case: Case) -> None:
    """A share is a whole number of 512 elements, the last one what remains."""
    cut = case.cut()
    for fragment in cut:
        sizes = [end - start for start, end, _ in taken(fragment)]
        assert max(sizes) <= case.most
        assert all(size == sizes[0] for size in sizes[:-1])
        assert sizes[-1] <= sizes[0]
        assert all(start % ALIGN == 0 for start, _, _ in taken(fragment))
        assert sizes[0] < -(-sum(sizes) // case.owners) + ALIGN
    assert all(numel_of(fragment) == case.owners * case.most for fragment in cut[:-1])


@given(cases())
def test_a_matrix_stays_whole(case: Case) -> None:
    (fragment,) = case.cut(whole=True)
    ((start, end, rank),) = taken(fragment)
    assert (start, end) == (0, case.numel)
    assert rank < case.owners


@given(cases())
def test_a_name_has_one_owner(case: Case) -> None:
    """Small parameters, cut or whole, are on the rank that their name says."""
    small = Case(case.name, min(case.numel, ALIGN), case.owners, case.most)
    assert taken(small.cut()[0])[0][2] == taken(small.cut(whole=True)[0])[0][2]


def test_small_parameters_take_turns() -> None:
    owners = [taken(Case(f"layer{i}.bias", 64, 4, ALIGN).cut()[0])[0][2] for i in range(200)]
    counts = [owners.count(rank) for rank in range(4)]
    assert min(counts) > 25, counts


SHAPES = {
    "a": (40, 48),
    "bias": (40,),
    "b": (33, 50),
    "c": (3, 700),
    "d": (16, 16),
    "scale": (7,),
}


def run(rank: Rank, *, cap_mb: float, codec: str = "int8") -> tuple[list[str], int, Tensors]:
    """Digests of gradients and state after every step, how many units travel, and what is owed."""
    settings = {"min_compress_numel": 200, "ddp": {"bucket_cap_mb": cap_mb}}
    digests = []
    with compressed(rank, Fed(SHAPES), codec, **settings) as (model, reducer):
        for step in range(5):
            gradients = backward(model, feed(rank.rank, step, SHAPES))
            digests.append(step_digest(gradients, reducer))
        facts = model._get_ddp_logging_data()
        assert facts["has_rebuilt_buckets"], "DDP did not rebuild its buckets"
        assert (len(facts["rebuilt_bucket_sizes"].split(",")) > 2) == (cap_mb < 1)
        units = sum(len(group.units) for group in reducer.planner.planned)
        return digests, units, residuals(reducer)


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_state_and_bits_survive_rebuilt_buckets(rank: Rank, size: int) -> None:
    """The residual of each parameter goes on, whichever buckets it travels in."""
    small, _, owed = run(rank, cap_mb=0.004)
    large, _, _ = run(rank, cap_mb=25)
    assert small == large
    assert set(owed) == {"a", "b", "c", "d"}
    assert all(r.any() for r in owed.values())


@pytest.mark.parametrize("codec", ["int8", "qsgd"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_units_do_not_change_bits(size: int, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two blocks of 256 travel together, where usually a megabyte does."""
    whole = run_threads(lambda rank: run(rank, cap_mb=0.004, codec=codec), size)
    monkeypatch.setattr(exchanges, "UNIT_ELEMENTS", 512)
    monkeypatch.setattr(exchanges, "_LEAST_ROW_ELEMENTS", 1)
    cut = run_threads(lambda rank: run(rank, cap_mb=0.004, codec=codec), size)
    for (found, many, _), (expected, few, _) in zip(cut, whole, strict=True):
        assert found == expected
        assert many > 2 * few
