"""What is waited for is said, and not before it takes long."""

from __future__ import annotations

import threading

from lightning_dist.integrations.profiler.run import log_if_slow


def timers() -> set[threading.Timer]:
    """Those that run in this process."""
    return {each for each in threading.enumerate() if isinstance(each, threading.Timer)}


def test_it_is_said_while_it_is_waited_for() -> None:
    said = threading.Event()
    with log_if_slow(0.01, lambda text: said.set() if text == "for rank 1" else None, "for rank 1"):
        assert said.wait(20)


def test_what_is_over_soon_is_not_spoken_of() -> None:
    told: list[str] = []
    before = timers()
    with log_if_slow(3600, told.append, "for rank 1"):
        (timer,) = timers() - before
    timer.join(20)
    assert not timer.is_alive()
    assert told == []
