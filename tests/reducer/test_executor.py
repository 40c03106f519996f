"""One worker, one queue: order, and that a failure reaches whoever waits."""

import threading
from contextlib import closing
from functools import partial

import pytest
import torch
from fed_model import SHAPES, Model
from feeding import feed
from processes import run
from threads import on_threads
from worlds import Rank

from lightning_dist.exchange.rounds import AllGather
from lightning_dist.reducer.network import ExecutorThread, executor_for

LIMIT = 10


def test_tasks_run_in_their_order_on_one_thread_without_autograd_until_it_is_closed() -> None:
    before = set(threading.enumerate())
    worker, gate = ExecutorThread("lightning_dist test"), threading.Event()
    ran: list[tuple[int, str, bool]] = []

    def note(number: int) -> None:
        ran.append((number, threading.current_thread().name, torch.is_grad_enabled()))

    worker.submit(lambda: gate.wait(LIMIT))
    for number in range(200):
        worker.submit(partial(note, number))
    gate.set()
    worker.close()
    assert ran == [(number, "lightning_dist test", False) for number in range(200)]
    assert torch.is_grad_enabled()
    assert set(threading.enumerate()) == before


_LEFT_OPEN = """
import threading, time, torch
from lightning_dist.reducer.network import Worker

class Last:  # of what Python takes apart, after its other threads are to stop
    def __del__(self, wake=threading.Event.set, sleep=time.sleep):
        wake(gone)
        sleep(0.2)

future, last = torch.futures.Future(), Last()
staggered, gone = threading.Event(), threading.Event()
future.then(lambda _: (staggered.set(), gone.wait(0.5)))
worker = Worker("lightning_dist test")
worker.submit(lambda: future.set_result(None))
staggered.wait()
"""


def test_a_process_ends_well_whose_worker_nobody_has_closed(quick_python: list[str]) -> None:
    """It may still be telling of the last gradients, inside torch, when the script is over."""
    run([*quick_python, "-c", _LEFT_OPEN], limit=60, TAKEN_APART="1").require_success()


def test_a_worker_that_is_forgotten_ends() -> None:
    worker = ExecutorThread("lightning_dist forgotten")
    thread = worker._thread
    del worker
    assert not thread.is_alive()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_side_stream_waits_for_the_current_one() -> None:
    device = torch.device("cuda")
    stream = executor_for(device)
    x = torch.zeros(1 << 22, device=device)
    for _ in range(10):
        x.add_(1)
    out = []
    stream.submit(lambda: out.append(x.sum()))
    stream.close()
    assert out[0].item() == 10 * x.numel()


def fail(self: AllGather) -> None:
    raise RuntimeError("the link broke")


@pytest.mark.parametrize("verb", ["start", "wait"])
@on_threads(2)
def test_a_failing_exchange_reaches_every_waiting_bucket(
    rank: Rank, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is left pending blocks the backward pass for ever: DDP waits without limit."""
    monkeypatch.setattr(AllGather, verb, fail)
    model, said = Model(rank.network()), []
    with closing(model.reducer):
        futures = model.begin(feed(rank.rank, 0, SHAPES))
        assert model.reducer._executor.drain(LIMIT), "the worker is gone or stuck"
    for future in futures:
        assert future.done()
        with pytest.raises(RuntimeError, match="lightning_dist: ") as error:
            future.value()
        said.append(str(error.value))
    assert "lightning_dist: the link broke" in " ".join(said)


@on_threads(2)
def test_a_closed_reducer_averages_nothing(rank: Rank) -> None:
    """Its thread has ended, so a gradient that were handed over would be waited for for ever."""
    model = Model(rank.network())
    model.step(rank.rank, 0)
    model.reducer.close()
    with pytest.raises(RuntimeError, match="a reducer that is closed"):
        model.begin(feed(rank.rank, 1, SHAPES))
    with pytest.raises(RuntimeError, match="a reducer that is closed"):
        model.reducer.finish()
    model.reducer.abandon()


@on_threads(2)
def test_close_in_a_step_ends_its_futures(rank: Rank) -> None:
    model = Model(rank.network())
    (future,) = model.begin(feed(rank.rank, 0, SHAPES), 1)
    model.reducer.close()
    assert future.done()
    with pytest.raises(RuntimeError, match="closed in a step"):
        future.wait()
