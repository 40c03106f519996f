"""Which rank of a host is responsible for which elements: every element once, shares balanced."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_dist.reducer.plan.intra import Fragment, fragments

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
