"""How tensors are cut into buckets, units and shares: by the tensor alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, feed, residuals, step_digest
from hypothesis import example, given
from hypothesis import strategies as st
from threads import on_threads
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import DGC, Int8, TopK
from lightning_dist.reducer.plan.intra import Fragment, fragments
from lightning_dist.reducer.units import sizes
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


@dataclass
class Result:
    digests: list[str]  # of gradients and residuals after every step
    buckets: tuple[int, int]  # before and after DDP rebuilt them
    residual: Tensors


def run(rank: Rank, *, cap_mb: float, steps: int = 5, codec: str = "int8") -> Result:
    settings = {"min_compress_numel": 200, "error_feedback": True, "ddp": {"bucket_cap_mb": cap_mb}}
    digests = []
    with compressed(rank, Fed(SHAPES), codec, **settings) as (model, reducer):
        for step in range(steps):
            gradients = backward(model, feed(rank.rank, step, SHAPES))
            digests.append(step_digest(gradients, reducer))
        return Result(digests, buckets(model), residuals(reducer))


def buckets(model: DistributedDataParallel) -> tuple[int, int]:
    """How many buckets DDP started with and went on with."""
    facts = model._get_ddp_logging_data()
    assert facts["has_rebuilt_buckets"], "DDP did not rebuild its buckets"
    first, later = facts["bucket_sizes"], facts["rebuilt_bucket_sizes"]
    return len(first.split(",")), len(later.split(","))


@pytest.mark.parametrize("size", [2, 3])
def test_state_and_bits_survive_rebuilt_buckets(size: int) -> None:
    """The residual of each parameter goes on, whichever buckets it travels in."""
    small = run_threads(lambda rank: run(rank, cap_mb=0.004), size)
    assert small[0].buckets[1] > 2
    large = run_threads(lambda rank: run(rank, cap_mb=25), size)
    assert large[0].buckets == (1, 1)
    assert [result.digests for result in small] == [result.digests for result in large]
    assert set(small[0].residual) == {"a", "b", "c", "d"}
    assert all(r.any() for r in small[0].residual.values())


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two blocks of 256 travel together, where usually a megabyte does."""
    monkeypatch.setattr(sizes, "UNIT_ELEMENTS", 512)
    monkeypatch.setattr(sizes, "_LEAST_ROW_ELEMENTS", 1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_do_not_change_bits(size: int, request: pytest.FixtureRequest) -> None:
    whole = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=3), size)
    request.getfixturevalue("tiny_chunks")
    cut = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=3), size)
    assert [result.digests for result in cut] == [result.digests for result in whole]


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize(("size", "codec"), [(2, "int8"), (3, "int8"), (4, "int8"), (3, "fp16")])
def test_many_buckets_and_chunks_do_not_deadlock(size: int, codec: str) -> None:
    """All collectives come in one order on every rank, however the threads are scheduled."""
    ranks = run_threads(lambda rank: run(rank, cap_mb=0.004, steps=7, codec=codec), size)
    assert ranks[0].buckets[1] > 2
    assert all(len(result.digests) == 7 for result in ranks)


@pytest.mark.usefixtures("tiny_chunks")
def test_a_chunk_is_not_larger_than_asked() -> None:
    """Otherwise the tests above say nothing."""

    def body(rank: Rank) -> list[int]:
        module = Fed(SHAPES)
        with compressed(rank, module, Int8(block_size=64), min_compress_numel=0) as (
            model,
            reducer,
        ):
            backward(model, feed(rank.rank, 0, SHAPES))
            groups = reducer._plans.groups()
            return [
                sum(tile.grad.shape[1] for tile in unit.tiles) * 64
                for group in groups
                for unit in group.units
            ]

    sizes = run_threads(body, 2)[0]
    assert len(sizes) >= 7
    assert max(sizes) <= 512


@on_threads(2)
def test_empty_parameters_are_left_alone(rank: Rank) -> None:
    """A parameter without elements has no payload and no residual."""
    shapes = {"w": (20, 20), "empty": (0, 5)}
    with compressed(rank, Fed(shapes), min_compress_numel=0) as (model, reducer):
        gradients = backward(model, feed(rank.rank, 0, shapes))
        assert (list(reducer.residuals), gradients["empty"].shape) == (["w"], torch.Size([0, 5]))
