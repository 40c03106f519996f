"""What a trainer asks to remove goes after a success, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from slow_copies import held_copies
from snapshots import trained

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Failed
from lightning_dist.checkpoint.removals import Removals
from lightning_dist.checkpoint.settings import CheckpointSettings

Kind = Literal["process", "thread"]
LIMIT = 30.0


class Run:
    """A training that saves its only checkpoint under names of one letter."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, writer: Kind) -> None:
        self.model, optimizer = trained()
        self.folder, self._patch = folder, patch
        self.checkpointer = Checkpointer(CheckpointSettings(writer=writer))
        self.checkpointer.open(str(folder))
        self.checkpointer.watch([optimizer])

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}.ckpt"

    def save(self, name: str, *, torn: bool = False) -> list[object]:
        """What became of it."""
        with held_copies(self._patch) as held:
            self.checkpointer.save(self.model.state_dict(), self.path(name), step=1)
            if torn:
                assert held.begun.wait(LIMIT)
                with torch.no_grad():
                    self.model[0].weight.add_(1)
        self.checkpointer.wait(LIMIT)
        return list(self.checkpointer.poll())

    def names(self) -> list[str]:
        self.checkpointer.wait(LIMIT)
        return sorted(name[0] for name in os.listdir(self.folder) if name.endswith(".ckpt"))


@pytest.fixture(params=["process", "thread"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    made = Run(tmp_path, monkeypatch, writer=request.param)
    yield made
    made.checkpointer.close(LIMIT)


def test_a_dropped_save_keeps_what_it_would_have_replaced(run: Run) -> None:
    run.save("a")
    (event,) = run.save("b", torn=True)
    assert isinstance(event, Failed)
    assert event.dropped
    run.checkpointer.remove(run.path("a"))
    run.checkpointer.link(run.path("b"), run.path("l"))
    assert run.names() == ["a"]
    assert run.checkpointer.poll() == [], "the link to nothing is no second failure"
    run.save("c")
    assert run.names() == ["c"]


def test_a_removal_that_waits_can_be_taken_back(run: Run) -> None:
    run.save("a")
    run.save("b", torn=True)
    run.checkpointer.remove(run.path("a"))
    run.checkpointer.keep(run.path("a"))
    run.save("c")
    assert run.names() == ["a", "c"]


def test_links_under_way_have_their_names(run: Run) -> None:
    with held_copies(run._patch) as held:
        run.checkpointer.save(run.model.state_dict(), run.path("a"), step=1)
        run.checkpointer.link(run.path("a"), run.path("l"))
        assert held.begun.wait(LIMIT)
        assert run.checkpointer.is_pending(run.path("l"))
    run.checkpointer.wait(LIMIT)
    assert not run.checkpointer.is_pending(run.path("l"))
    assert run.names() == ["a", "l"]


def test_what_a_lost_writer_was_asked_for_is_asked_again_once() -> None:
    removals = Removals()
    for path in ("done", "waits", "open", "kept"):
        removals.ask(path)
    removals.answered("done", waits=False)
    removals.answered("waits", waits=True)
    removals.lost()
    removals.cancel("kept")
    assert removals.take_again() == ["waits", "open"]
    assert removals.take_again() == []
    removals.succeeded()
    removals.lost()
    assert removals.take_again() == ["open"], "a success did what waited"
