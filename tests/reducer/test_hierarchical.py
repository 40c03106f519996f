"""Exchanges where nodes reduce first: their means, collectives, large tensors, codecs, memory."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from fed_model import Counting
from feeding import (
    EVERY_CODEC,
    FEW,
    SHAPES,
    Fed,
    Shapes,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    mean,
    residuals,
)
from layouts import FORMS, HOSTS_OF_FOUR, MORE, PAIRS, UNEVEN, Layout, every_layout, flat, grids
from threads import of_all, on_threads
from torch import Size, Tensor
from worlds import Rank

from lightning_dist.base import exchanges
from lightning_dist.codecs import BlockCodec, Int8, resolve_codec

SMALL = {"first": (40, 48), "bias": (40,), "second": (33, 50), "one": (1,)}


def exact(rank: int, size: int) -> Tensors:
    """``sign * size * 2**j`` with the same ``j`` on all ranks: no sum or mean of it is rounded."""
    common = torch.Generator().manual_seed(5)
    own = torch.Generator().manual_seed(100 + rank)

    def one(shape: tuple[int, ...]) -> Tensor:
        powers = torch.randint(-20, 20, shape, generator=common)
        signs = torch.randint(0, 2, shape, generator=own) * 2.0 - 1
        return torch.ldexp(signs * size, powers)

    return {name: one(shape) for name, shape in SMALL.items()}


def two_steps(rank: Rank, layout: Layout) -> tuple[Tensors, Tensors]:
    """Of codec none: exact gradients, then random ones. The second step has other buckets."""
    form = {**layout.form, "ddp": {"bucket_cap_mb": 0.004}}
    with compressed(rank, Fed(SMALL), "none", **form) as (model, reducer):
        assert (reducer.network.intra is None) == (layout.tree is None)
        first = backward(model, exact(rank.rank, rank.size))
        return first, backward(model, feed(rank.rank, 0, SMALL))


def test_every_grid_is_here() -> None:
    assert [len(grids(size)) for size in range(3, 9)] == [1, 4, 5, 11, 13, 22]
    assert all(layout.ranks == list(range(8)) for layout in every_layout(8))


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        *((size, every_layout(size)) for size in range(3, 7)),
        (8, MORE[8]),
        *(pytest.param(n, every_layout(n), marks=pytest.mark.slow) for n in (7, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else str(len(value)),
)
@on_threads("size")
def test_it_is_the_flat_exchange(rank: Rank, size: int, layouts: Sequence[Layout]) -> None:
    """Exact gradients are bit-equal, random ones the mean within rounding, replicas equal."""
    given = [exact(each, size) for each in range(size)]
    exact_mean = {n: torch.stack([g[n].double() for g in given]).mean(0).float() for n in SMALL}
    given = [feed(each, 0, SMALL) for each in range(size)]
    wanted = mean([{n: g.double() for n, g in each.items()} for each in given])
    largest = {n: torch.stack([g[n].abs() for g in given]).amax(0).double() for n in SMALL}
    for layout in (flat(size), *layouts):
        first, second = two_steps(rank, layout)
        assert digest([first[n] for n in SMALL]) == digest(exact_mean), str(layout)
        if layout.tree is None:
            continue
        assert len({*of_all(rank, digest([second[n] for n in SMALL]))}) == 1, str(layout)
        for name, found in second.items():
            # Every sum and product rounds by 2**-24 of what is at most the largest value.
            bound = (size + 4) * 2.0**-24 * largest[name]
            assert ((found.double() - wanted[name]).abs() <= bound).all(), (str(layout), name)


FOUR_HOSTS = Layout([[0, 1], [2, 3], [4, 5], [6, 7]])
every_form = pytest.mark.parametrize("layout", [*FORMS, FOUR_HOSTS], ids=str)


def shapes_of(count: int) -> dict[str, tuple[int, ...]]:
    """Of sizes that no number of owners divides."""
    return {f"layer{i}": (160 + 3 * i, 100 + i) for i in range(count)}


@pytest.fixture
def whole_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "UNIT_ELEMENTS", exchanges.WHOLE_BUCKET)


def step(rank: Rank, layout: Layout, parameters: int, codec: str) -> tuple[Counter[str], Tensors]:
    """Collectives of the second step, and the mean that all have after it."""
    shapes = shapes_of(parameters)
    form = {"min_compress_numel": 1, "ddp": {"bucket_cap_mb": 100}, **layout.form}
    with compressed(rank, Fed(shapes), codec, **form) as (model, reducer):
        backward(model, feed(rank.rank, 0, shapes))
        counting = Counting()
        for channel in reducer.network.channels:
            channel.watch = counting
        found = backward(model, feed(rank.rank, 1, shapes))
    assert len({*of_all(rank, digest([found[name] for name in shapes]))}) == 1
    return Counter(group for group, _ in counting.found if group != "control"), found


@pytest.mark.usefixtures("whole_buckets")
@every_form
@pytest.mark.parametrize(
    ("codec", "parameters"),
    [
        ("none", 2),
        ("int8", 24),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", 24), ("int8", 2))),
    ],
)
@on_threads("layout")
def test_a_bucket_takes_two_collectives_a_level(
    rank: Rank, codec: str, parameters: int, layout: Layout
) -> None:
    counted, means = step(rank, layout, parameters, codec)
    assert counted["intra"] == 2
    assert all(number <= 2 for number in counted.values()), counted
    shapes, tolerance = shapes_of(parameters), 1e-5 if codec == "none" else 0.1
    expected = mean([feed(each, 1, shapes) for each in range(layout.size)])
    for name, found in means.items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=tolerance)


@on_threads(8)
def test_pieces_take_more_of_them(rank: Rank) -> None:
    """On a CPU, where one piece is encoded while another travels."""
    assert step(rank, FOUR_HOSTS, 40, "int8")[0]["intra"] > 2


LARGE = {"large": (1100, 1000), "bias": (600,), "other": (700, 800)}
"""Two owners take 512 Ki elements at a time, so the first is three fragments."""
FEW_LAYOUTS = [Layout(PAIRS), Layout(PAIRS, leader=True), Layout(UNEVEN)]
few_layouts = pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)


@few_layouts
@on_threads(4)
def test_chunks_that_follow_each_other_keep_apart(rank: Rank, layout: Layout) -> None:
    """While one crosses the next is reduced inside, in memory that every other one uses."""
    form = {**layout.form, "min_compress_numel": 1000}
    for codec, tolerance in (("none", 1e-6), ("int8", 0.1)):
        with compressed(rank, Fed(LARGE), codec, **form) as (model, reducer):
            backward(model, feed(rank.rank, 0, LARGE))
            found = backward(model, feed(rank.rank, 1, LARGE))
            assert max(len(group.units) for group in reducer.planner.planned) >= 3
        assert len({*of_all(rank, digest([found[name] for name in LARGE]))}) == 1
        for name, expected in mean([feed(r, 1, LARGE) for r in range(4)]).items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=tolerance)


@few_layouts
@pytest.mark.parametrize("codec", ["int8", "powersgd:rank=2", "threshold:tau=1.5"])
@on_threads(4)
def test_a_tensor_without_a_gradient_keeps_what_it_owes(
    rank: Rank, codec: str, layout: Layout
) -> None:
    """Unused on all ranks nothing of it is applied, on one rank its gradient there is zero."""
    form = {**layout.form, "min_compress_numel": 256, "ddp": {"find_unused_parameters": True}}
    with compressed(rank, Fed(), codec, **form) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        before = residuals(reducer)
        assert set(before) == {"first", "second"}
        unused = backward(model, {"bias": feed(rank.rank, 1)["bias"]})
        assert set(unused) == {"bias"}
        after = residuals(reducer)
        assert all(torch.equal(after[name], before[name]) for name in before)
        some = feed(rank.rank, 2)
        if rank.rank == 1:
            del some["second"]
        last = backward(model, some)
    assert set(last) == {"first", "bias", "second"}
    assert last["second"].any()
    assert len({*of_all(rank, digest([last[name] for name in sorted(last)]))}) == 1


SETTINGS = {"min_compress_numel": 256}
INSIDE = ("none", "fp16", "bf16")
SHORT = (torch.float16, torch.bfloat16)
DTYPES = [
    *((dtype, FORMS[0], EVERY_CODEC) for dtype in SHORT),
    *((dtype, FORMS[1], FEW) for dtype in SHORT),
    *((torch.float64, layout, FEW) for layout in FORMS[:2]),
    *(
        pytest.param(dtype, layout, EVERY_CODEC, marks=pytest.mark.slow)
        for layout in FORMS[:2]
        for dtype in (*SHORT, torch.float64)
        if layout.leader or dtype == torch.float64
    ),
]


@pytest.mark.parametrize(("dtype", "layout", "codecs"), DTYPES, ids=str)
@on_threads("layout")
def test_gradients_of_other_dtypes(
    rank: Rank, dtype: torch.dtype, layout: Layout, codecs: Sequence[str]
) -> None:
    """They arrive and leave in their dtype; replicas agree, the small tensor has the mean."""
    bias = sum(feed(r, 1, dtype=dtype)["bias"].double() for r in range(4)) / 4
    for codec in codecs:
        with compressed(rank, Fed(dtype=dtype), codec, **layout.form, **SETTINGS) as (model, _):
            for step in range(2):
                gradients = backward(model, feed(rank.rank, step, dtype=dtype))
        assert {g.dtype for g in gradients.values()} == {dtype}
        assert len({*of_all(rank, digest([gradients[name] for name in SHAPES]))}) == 1, codec
        error = (gradients["bias"].double() - bias).norm() / bias.norm()
        assert error < 2, codec
        if resolve_codec(codec).min_numel and not codec.startswith("dgc"):  # else compressed too
            assert error < 4 * max(torch.finfo(dtype).eps, 2e-7), codec


def largest_error(codec: BlockCodec, amax: float) -> float:
    """Of gradients of at most ``amax``."""
    return float(codec.error_bound(torch.full((1, codec.block), amax)).max())


@pytest.mark.parametrize("intra", INSIDE)
@on_threads(4)
def test_a_codec_inside_is_within_its_error_bound(rank: Rank, intra: str) -> None:
    """Rounded on the way in, between nodes and on the way out; inside nothing is kept of it."""
    given = [feed(rank, 0) for rank in range(4)]
    inside = resolve_codec(intra)
    assert isinstance(inside, BlockCodec)
    for layout in FORMS[:3]:
        form = {**layout.form, "min_compress_numel": 0}
        with compressed(rank, Fed(), {"intra": intra, "inter": "int8"}, **form) as (model, _):
            found = backward(model, given[rank.rank])
        assert len({*of_all(rank, digest([found[name] for name in SHAPES]))}) == 1, layout
        for name in SHAPES:
            amax = max(float(g[name].abs().max()) for g in given)
            weight = 1 if len(set(map(len, layout.tree))) == 1 else 2 * 3 / 4
            up = largest_error(inside, amax) * weight
            across = largest_error(Int8(), amax * weight + up)
            down = largest_error(inside, amax + up + across)
            exact = sum(g[name].double() for g in given) / 4
            error = float((found[name].double() - exact).abs().max())
            assert error <= (up + across + down) * (1 + 1e-5) + 1e-6, (str(layout), name)
            assert error > across / 10, "int8 has rounded between the nodes"


DIVIDES = {"large": (768, 1024), "small": (6, 1024)}
"""By 2, 3 and 4 owners with shares of whole 512 elements; the first is several fragments."""
TRIPLES = [[0, 1, 2], [3, 4, 5]]


def held(rank: Rank, layout: Layout, shapes: Shapes, codec: str) -> list[dict[str, int]]:
    """Elements of the residual of every parameter on every rank."""
    form = {**layout.form, "min_compress_numel": 256}
    with compressed(rank, Fed(shapes), codec, **form) as (model, reducer):
        backward(model, feed(rank.rank, 0, shapes))
        sizes = {name: reducer.residuals[name].numel() for name in reducer.residuals}
        if codec != "powersgd":
            assert reducer.memory()["residual_bytes"] == 4 * sum(sizes.values())
        return of_all(rank, sizes)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(PAIRS), [1 / 2] * 4),
        (Layout(TRIPLES), [1 / 3] * 6),
        (Layout(HOSTS_OF_FOUR), [1 / 4] * 8),
        (Layout(PAIRS, leader=True), [1, 0, 1, 0]),
        (Layout(UNEVEN), [1, 0, 0, 1]),
    ],
    ids=["pairs", "triples", "fours", "leaders of pairs", "uneven"],
)
@on_threads("layout")
def test_a_rank_keeps_its_share_or_a_leader_everything(
    rank: Rank, layout: Layout, shares: list[float]
) -> None:
    assert held(rank, layout, DIVIDES, "int8") == [
        {name: round(Size(shape).numel() * share) for name, shape in DIVIDES.items()}
        for share in shares
    ]


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "threshold:tau=1.5"])
@pytest.mark.parametrize("layout", [Layout(PAIRS), Layout(TRIPLES), Layout(UNEVEN)], ids=str)
@on_threads("layout")
def test_a_host_keeps_every_element_once(rank: Rank, layout: Layout, codec: str) -> None:
    """Whatever the sizes; matrices of powersgd are whole on one rank."""
    ranks = held(rank, layout, SHAPES, codec)
    for node in layout.tree:
        for name in ("first", "second"):
            assert sum(ranks[r][name] for r in node) == Size(SHAPES[name]).numel()


@on_threads(4)
def test_a_matrix_is_on_one_rank_of_each_host(rank: Rank) -> None:
    ranks = held(rank, Layout(PAIRS), SHAPES, "powersgd")
    for node in PAIRS:
        for name in ("first", "second"):
            assert sorted(ranks[r].get(name, 0) for r in node) == [0, Size(SHAPES[name]).numel()]
    assert ranks[:2] == ranks[2:], "the same rank on every node"
