"""PreemptionListener: real signals, to this process."""

import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from lightning_dist.elastic.process.lifecycle import PreemptionListener

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


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listen(heard: Heard) -> Iterator[Callable[..., PreemptionListener]]:
    """Start a listener to these signals, or one that asks as the options say."""
    started: list[PreemptionListener] = []

    def start(*signals: signal.Signals, **options: Any) -> PreemptionListener:
        started.append(PreemptionListener(signals, on_notice=heard, **options))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.stop()


Listen = Callable[..., PreemptionListener]


def test_a_signal_is_noted_while_the_main_thread_is_in_a_call_that_does_not_return(
    heard: Heard,
) -> None:
    """As in a collective: Python handlers do not run in there."""
    here, there = socket.socketpair()
    notices = PreemptionListener(
        [signal.SIGTERM], on_notice=lambda reason: (heard(reason), there.close())
    )
    notices.start()
    sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
    sender.start()
    assert here.recv(1) == b"", "only the notice ends this"
    sender.join()
    assert heard.reasons == ["SIGTERM"]
    notices.stop()
    here.close()


def test_the_first_reason_counts_and_is_reported_once(heard: Heard, listen: Listen) -> None:
    notices = listen(signal.SIGUSR1, signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard.event.wait(LIMIT)
    os.kill(os.getpid(), signal.SIGUSR1)
    notices.give("another")
    notices.stop()
    assert (notices.reason, heard.reasons) == ("SIGUSR2", ["SIGUSR2"])


def test_who_woke_up_before_still_does_and_gets_the_fd_back(heard: Heard, listen: Listen) -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
    notices = listen(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert here.recv(1) == bytes([signal.SIGTERM])
    assert heard.reasons == ["SIGTERM"]
    notices.stop()
    assert signal.set_wakeup_fd(-1) == there.fileno()
    here.close()
    there.close()


def test_who_woke_up_before_and_does_not_read_costs_no_notice(heard: Heard, listen: Listen) -> None:
    """Other signals are none, and whoever handled them still does."""
    here, there = socket.socketpair()
    there.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            there.send(b"x" * 4096)
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    handled = threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: handled.set())
    notices = listen(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert handled.wait(LIMIT)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard.event.wait(LIMIT)
    notices.stop()
    assert heard.reasons == ["SIGUSR1"]
    signal.set_wakeup_fd(-1)
    here.close()
    there.close()


def test_a_forked_child_is_not_this_process(heard: Heard, listen: Listen) -> None:
    """Loaders and pools fork, and end their children with SIGTERM."""
    notices = listen(signal.SIGTERM, signal.SIGUSR1)
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


def test_nobody_listens_after_the_end(listen: Listen) -> None:
    before = set(threading.enumerate())
    notices = listen(signal.SIGTERM)
    (listener,) = set(threading.enumerate()) - before
    notices.stop()
    listener.join(LIMIT)
    assert not listener.is_alive()
    os.kill(os.getpid(), signal.SIGTERM)  # the handler stays: this ends nobody
    assert notices.reason == ""


def test_a_cloud_is_asked_on_a_thread_until_it_says_so(heard: Heard, listen: Listen) -> None:
    asked = []

    def preempted() -> bool:
        asked.append(threading.current_thread())
        return len(asked) == 3

    listen(check=preempted, poll_interval=0.001)
    assert heard.event.wait(LIMIT)
    asked[0].join(LIMIT)
    assert heard.reasons == ["preemption notice"]
    assert len(asked) == 3
    assert threading.main_thread() not in asked


def test_a_question_that_fails_is_not_asked_again(listen: Listen) -> None:
    asked: list[threading.Thread] = []
    called = threading.Event()

    def preempted() -> bool:
        asked.append(threading.current_thread())
        called.set()
        raise OSError("no route to the metadata server")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notices = listen(check=preempted, poll_interval=0.001)
        assert called.wait(LIMIT)
        asked[0].join(LIMIT)
    assert [str(each.message) for each in caught] == [
        "[lightning_dist] preemption_check() failed and will not be called again: OSError: no "
        "route to the metadata server"
    ]
    assert len(asked) == 1
    assert notices.reason == ""


def test_nobody_asks_after_the_end(listen: Listen) -> None:
    asked: list[threading.Thread] = []
    called, resume = threading.Event(), threading.Event()

    def preempted() -> bool:
        asked.append(threading.current_thread())
        called.set()
        resume.wait(LIMIT)
        return False

    notices = listen(check=preempted, poll_interval=0.001)
    assert called.wait(LIMIT)
    notices.stop()
    resume.set()
    asked[0].join(LIMIT)
    assert not asked[0].is_alive()
    assert len(asked) == 1


def test_a_child_that_lives_on_does_not_hold_up_the_end(listen: Listen) -> None:
    """As a worker of a DataLoader that stays, which has the socket of the signals open too."""
    before = set(threading.enumerate())
    notices = listen(signal.SIGTERM)
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
