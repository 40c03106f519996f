"""PreemptionListener: real signals, to this process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_dist.elastic.process.preemption import PreemptionListener

LIMIT = 20.0


class Heard:
    """The reasons that were given, and a way to wait for the first."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.event.set()


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1


def started(*signals: signal.Signals, heard: Heard) -> PreemptionListener:
    notices = PreemptionListener(signals, on_notice=heard)
    notices.start()
    return notices


def kill_when_waiting(number: int) -> threading.Thread:
    """Sends a signal to this process from another thread."""
    thread = threading.Thread(target=os.kill, args=(os.getpid(), number))
    thread.start()
    return thread


def test_a_signal_is_noted_while_the_main_thread_waits() -> None:
    heard = Heard()
    notices = started(signal.SIGTERM, heard=heard)
    sender = kill_when_waiting(signal.SIGTERM)
    assert heard.event.wait(LIMIT)
    sender.join()
    assert notices.reason == "SIGTERM"
    assert heard.reasons == ["SIGTERM"]
    notices.stop()


def test_a_signal_is_noted_while_the_main_thread_is_in_a_call_that_does_not_return() -> None:
    """As in a collective: Python handlers do not run in there."""
    heard = Heard()
    here, there = socket.socketpair()
    notices = PreemptionListener(
        [signal.SIGTERM], on_notice=lambda reason: (heard(reason), there.close())
    )
    notices.start()
    sender = kill_when_waiting(signal.SIGTERM)
    assert here.recv(1) == b"", "only the notice ends this"
    sender.join()
    assert heard.reasons == ["SIGTERM"]
    notices.stop()
    here.close()


def test_the_first_reason_counts_and_is_reported_once() -> None:
    heard = Heard()
    notices = started(signal.SIGUSR1, signal.SIGUSR2, heard=heard)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard.event.wait(LIMIT)
    os.kill(os.getpid(), signal.SIGUSR1)
    notices.give("another")
    notices.stop()
    assert (notices.reason, heard.reasons) == ("SIGUSR2", ["SIGUSR2"])


def test_other_signals_are_none() -> None:
    heard, seen = Heard(), threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.set())
    notices = started(signal.SIGUSR1, heard=heard)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert seen.wait(LIMIT), "whoever handled them still does"
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard.event.wait(LIMIT)
    notices.stop()
    assert heard.reasons == ["SIGUSR1"]


def test_who_woke_up_before_still_does_and_gets_the_fd_back() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
    heard = Heard()
    notices = started(signal.SIGTERM, heard=heard)
    os.kill(os.getpid(), signal.SIGTERM)
    assert here.recv(1) == bytes([signal.SIGTERM])
    assert heard.reasons == ["SIGTERM"]
    notices.stop()
    assert signal.set_wakeup_fd(-1) == there.fileno()
    here.close()
    there.close()


def test_who_woke_up_before_and_does_not_read_costs_no_notice() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            there.send(b"x" * 4096)
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    first, second = threading.Event(), Heard()
    signal.signal(signal.SIGUSR2, lambda number, frame: first.set())
    notices = started(signal.SIGUSR1, heard=second)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert first.wait(LIMIT)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert second.event.wait(LIMIT)
    notices.stop()
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def test_a_forked_child_is_not_this_process() -> None:
    """Loaders and pools fork, and end their children with SIGTERM."""
    heard = Heard()
    notices = started(signal.SIGTERM, signal.SIGUSR1, heard=heard)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard.event.wait(LIMIT)
    notices.stop()
    assert heard.reasons == ["SIGUSR1"], "a signal to the child is none to its parent"
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_nobody_listens_after_the_end() -> None:
    heard, threads = Heard(), threading.active_count()
    notices = started(signal.SIGTERM, heard=heard)
    (listener,) = [t for t in threading.enumerate() if t is not threading.current_thread()][
        threads - 1 :
    ]
    notices.stop()
    listener.join(LIMIT)
    assert not listener.is_alive()
    os.kill(os.getpid(), signal.SIGTERM)  # the handler stays: this ends nobody
    assert notices.reason == ""
    notices.stop()


def test_a_cloud_is_asked_on_a_thread_until_it_says_so() -> None:
    heard, asked = Heard(), []

    def preempted() -> bool:
        asked.append(threading.current_thread())
        return len(asked) == 3

    notices = PreemptionListener([], check=preempted, poll_interval=0.001, on_notice=heard)
    notices.start()
    assert heard.event.wait(LIMIT)
    asked[0].join(LIMIT)
    notices.stop()
    assert heard.reasons == ["preemption notice"]
    assert len(asked) == 3
    assert threading.main_thread() not in asked


def test_a_question_that_fails_is_not_asked_again() -> None:
    asked: list[threading.Thread] = []
    called = threading.Event()

    def preempted() -> bool:
        asked.append(threading.current_thread())
        called.set()
        raise OSError("no route to the metadata server")

    notices = PreemptionListener([], check=preempted, poll_interval=0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notices.start()
        assert called.wait(LIMIT)
        asked[0].join(LIMIT)
    notices.stop()
    assert [str(each.message) for each in caught] == [
        "[lightning_dist] preemption_check() failed and will not be called again: OSError: no "
        "route to the metadata server"
    ]
    assert len(asked) == 1
    assert notices.reason == ""


def test_nobody_asks_after_the_end() -> None:
    asked: list[threading.Thread] = []
    called, go_on = threading.Event(), threading.Event()

    def preempted() -> bool:
        asked.append(threading.current_thread())
        called.set()
        go_on.wait(LIMIT)
        return False

    notices = PreemptionListener([], check=preempted, poll_interval=0.001)
    notices.start()
    assert called.wait(LIMIT)
    notices.stop()
    go_on.set()
    asked[0].join(LIMIT)
    assert not asked[0].is_alive()
    assert len(asked) == 1


def test_a_child_that_lives_on_does_not_hold_up_the_end() -> None:
    """As a worker of a DataLoader that stays, which has the socket of the signals open too."""
    before = set(threading.enumerate())
    notices = started(signal.SIGTERM, heard=Heard())
    (listener,) = set(threading.enumerate()) - before
    there, here = socket.socketpair()
    child = os.fork()
    if child == 0:
        there.close()
        here.recv(1)
        os._exit(0)
    here.close()
    try:
        notices.stop()
        listener.join(LIMIT)
        assert not listener.is_alive()
    finally:
        there.close()
        os.waitpid(child, 0)
