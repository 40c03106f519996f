"""Table of exchanges: rows that are added, and those of the package."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dist import exchanges
from lightning_dist.exchange import rounds
from lightning_dist.exchanges import EXCHANGES, ExchangeKind, register_exchange

GATHER = EXCHANGES["gather"]


def mine(implementation: type = rounds.AllGather) -> ExchangeKind:
    return replace(GATHER, name="mine", implementation=implementation)


def test_rows_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "EXCHANGES", dict(EXCHANGES))
    register_exchange(mine())
    register_exchange(mine())  # a module that is imported again
    assert list(exchanges.EXCHANGES) == ["allreduce", "gather", "two_shot", "mine"]
    with pytest.raises(ValueError, match=r"must not be taken, got 'mine' for .*:TwoShot, .*:AllGa"):
        register_exchange(mine(rounds.TwoShot))
    with pytest.raises(ValueError, match="must not be taken, got 'gather'"):
        register_exchange(replace(mine(rounds.TwoShot), name="gather"))


def test_two_ranks_gather_where_more_use_two_shots() -> None:
    kind = EXCHANGES["two_shot"]
    assert [kind.among(ranks).name for ranks in (2, 3)] == ["gather", "two_shot"]
    assert [kind.among(ranks).rows(ranks) for ranks in (1, 2, 3)] == [1, 1, 3]
    assert [kind.among(ranks).received(ranks) for ranks in (2, 3)] == [2, 1]
    assert [EXCHANGES["allreduce"].received(ranks) for ranks in (2, 3)] == [1, 1]
