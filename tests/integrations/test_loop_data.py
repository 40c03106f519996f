"""Dataloaders of every kind in a loop: it goes on in the data, or says why it could not."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from elastic_data import LOADERS, SilentStream
from elastic_runs import SIZE, Fault, committed
from loop_runs import failing, net, train
from torch.utils.data import DataLoader

from lightning_dist import ElasticLoop

DEALT = [name for name in LOADERS if not name.startswith("stateful stream")]


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    before = {each.pid for each in multiprocessing.active_children()}  # of other files' tests
    yield
    assert not {each.pid for each in multiprocessing.active_children()} - before


def ids_of(folder: Path) -> list[list[int]]:
    return [step.ids for step in committed(folder / "account").values()]


@pytest.mark.parametrize("data", DEALT)
def test_a_second_start_goes_on_in_the_data(data: str, tmp_path: Path) -> None:
    fails = failing("in_pass", 17)  # in the second epoch
    expected = train(tmp_path / "reference", "plain", data=data, epochs=2)
    with pytest.raises(Fault):
        train(tmp_path / "run", "plain", data=data, epochs=2, strike=fails)
    assert train(tmp_path / "run", "plain", data=data, epochs=2) == expected
    assert ids_of(tmp_path / "run") == ids_of(tmp_path / "reference")
    of_epochs = [[*chain(*ids_of(tmp_path / "run")[at : at + 12])] for at in (0, 12)]
    assert [sorted(ids) for ids in of_epochs] == [list(range(SIZE))] * 2
    assert of_epochs[0] != of_epochs[1]


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(SilentStream(), batch_size=4)
    with pytest.raises(ValueError, match="or use a map-style dataset"):
        ElasticLoop(tmp_path, loader=loader, state={"model": net()}).__enter__()
