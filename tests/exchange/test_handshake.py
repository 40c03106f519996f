"""A mismatch between ranks is an error on every rank that names the fact and the ranks."""

from __future__ import annotations

import pytest
import torch
from threads import on_threads
from worlds import Rank, run_threads

from lightning_dist.codecs import FP16, Int8
from lightning_dist.exchange.handshake import Facts, all_facts, require_equal
from lightning_dist.settings import Settings

CPU = torch.device("cpu")
INT8 = Settings.check(Int8()).fingerprint()


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_every_rank_learns_all_facts_in_rank_order(rank: Rank, size: int) -> None:
    """Also when the texts differ in length, in type and in script."""

    def facts_of(rank: int) -> Facts:
        return {"rank": rank, "text": "é" * 10 * rank, "none": None, "list": [rank, 0.5]}

    assert all_facts(facts_of(rank.rank), group=rank.group("data"), device=CPU) == [
        facts_of(rank) for rank in range(size)
    ]


def test_equal_facts_pass() -> None:
    require_equal([INT8, dict(INT8), dict(INT8)])


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (
            Settings.check(FP16()).fingerprint(),
            "codec: 'Int8(block_size=256)' on ranks 0, 2; 'FP16()' on rank 1",
        ),
        (
            Settings.check(Int8(128)).fingerprint(),
            "codec: 'Int8(block_size=256)' on ranks 0, 2; 'Int8(block_size=128)' on rank 1",
        ),
        ({**INT8, "lightning_dist": "9.9"}, "; '9.9' on rank 1"),
        ({**INT8, "start_step": 7}, "start_step: 0 on ranks 0, 2; 7 on rank 1"),
    ],
    ids=["codec", "block", "version", "start"],
)
def test_a_difference_is_named_on_every_rank(others: Facts, line: str) -> None:
    def body(rank: Rank) -> str:
        mine = others if rank.rank == 1 else INT8
        facts = all_facts(mine, group=rank.group("data"), device=CPU)
        with pytest.raises(ValueError, match="All ranks must compress in the same way") as error:
            require_equal(facts)
        return str(error.value)

    messages = run_threads(body, 3)
    assert messages == [messages[0]] * 3
    assert line in messages[0]
    assert "Give every rank the same settings" in messages[0]


def test_several_differences_are_all_named() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)a: 1 on rank 0; 2 on rank 1\n.*b: 1 on rank 0; None"
    ):
        require_equal([{"a": 1, "b": 1, "c": 1}, {"a": 2, "c": 1}])


def test_a_fact_that_only_another_rank_has_is_named() -> None:
    """The same law when the first rank is the one that lacks it."""
    with pytest.raises(ValueError, match="b: None on rank 0; 1 on rank 1"):
        require_equal([{"a": 1}, {"a": 1, "b": 1}])
