"""What is waited for is said, and not before it takes long."""

from __future__ import annotations

import threading

from lightning_dist.integrations.said_after import said_after


def test_it_is_said_while_it_is_waited_for() -> None:
    said = threading.Event()
    with said_after(0.01, lambda text: said.set() if text == "for rank 1" else None, "for rank 1"):
        assert said.wait(20)


def test_what_is_over_soon_is_not_spoken_of() -> None:
    told: list[str] = []
    before = threading.active_count()
    with said_after(3600, told.append, "for rank 1"):
        assert threading.active_count() == before + 1
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(20)
    assert threading.active_count() == before
    assert told == []
