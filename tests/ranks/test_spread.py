"""Tensors whose elements lie on different ranks, put together on one of them."""

import pytest
import torch
from threads import on_threads
from torch import Tensor
from worlds import Rank

from lightning_dist.ranks import facts as spread
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.facts import Spread, gather

CPU = torch.device("cpu")
DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64)


def of_all() -> list[Tensor]:
    """Tensors of every dtype, one without dimensions, and one without elements."""
    made = [torch.arange(1, 22).remainder(5).to(dtype).view(3, 7) for dtype in DTYPES]
    return [*made, torch.tensor(2.5), torch.empty(0, 4), torch.arange(300.0)]


def part_of(whole: Tensor, rank: int) -> Spread:
    """Two runs on each of three ranks, not in order; the last rank has nothing, as some element."""
    flat, third = whole.reshape(-1), whole.numel() // 3
    low, high = rank * third, whole.numel() if rank == 2 else (rank + 1) * third
    middle = (low + high) // 2
    runs = ((middle, flat[middle:high]), (low, flat[low:middle])) if rank < 3 else ()
    return Spread(torch.full_like(whole, 3), tuple((at, run.clone()) for at, run in runs))


@pytest.mark.parametrize("to", [0, 2])
@pytest.mark.parametrize("batch", [1, 100, spread._BATCH])
@on_threads(4)
def test_one_rank_gets_what_all_have(
    rank: Rank, batch: int, to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "_BATCH", batch)
    spreads = [part_of(whole, rank.rank) for whole in of_all()]
    gather(spreads, Channel(rank.group("state")), device=CPU, to=to)
    for each, whole in zip(spreads, of_all(), strict=True):
        expected = whole if rank.rank == to else torch.full_like(whole, 3)
        assert torch.equal(each.whole, expected)


@on_threads(2)
def test_what_no_rank_has_is_zero(rank: Rank) -> None:
    own = ((rank.rank * 4, torch.full((2,), 1.0 + rank.rank)),)
    each = Spread(torch.full((2, 4), float("nan")), own)
    gather([each], Channel(rank.group("state")), device=CPU)
    if rank.rank == 0:
        assert each.whole.tolist() == [[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]]


@on_threads(2)
def test_nothing_is_gathered_of_nothing(rank: Rank) -> None:
    gather([], Channel(rank.group("state")), device=CPU)
