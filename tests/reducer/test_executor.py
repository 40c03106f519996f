"""One worker, one queue: order, and that a failure reaches whoever waits."""

from __future__ import annotations

import threading

import pytest
import torch
from fed_model import SHAPES, Model
from feeding import FakeBucket, Fed, backward, compressed, feed
from processes import run
from threads import on_threads
from worlds import Rank, run_threads

from lightning_dist.exchange.rounds import AllGather, AllReduce
from lightning_dist.integrations.torch.buckets import DDPBuckets
from lightning_dist.reducer.executor import Worker, executor_for
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings import Settings

LIMIT = 10


def test_tasks_run_in_the_order_in_which_they_came_on_one_thread() -> None:
    worker = Worker("lightning_dist test")
    ran: list[tuple[int, str]] = []
    for number in range(200):
        worker.submit(lambda n=number: ran.append((n, threading.current_thread().name)))
    worker.close()
    assert ran == [(number, "lightning_dist test") for number in range(200)]


def test_tasks_run_without_autograd() -> None:
    worker = Worker("lightning_dist test")
    modes: list[bool] = []
    worker.submit(lambda: modes.append(torch.is_grad_enabled()))
    worker.close()
    assert modes == [False]
    assert torch.is_grad_enabled()


def test_close_waits_for_what_was_submitted_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    worker, gate = executor_for(torch.device("cpu")), threading.Event()
    ran = []
    worker.submit(lambda: (gate.wait(LIMIT), ran.append(1)))
    gate.set()
    worker.close()
    assert ran == [1]
    assert set(threading.enumerate()) == before


_LEFT_OPEN = """
import threading, time, torch
from lightning_dist.reducer.executor import Worker

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
    worker = Worker("lightning_dist forgotten")
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


class _BrokenLink(RuntimeError):
    pass


def two_buckets(rank: Rank) -> list[str]:
    """What the futures of a step of two buckets say; "pending" for one that was left waiting."""
    weights = [torch.zeros(40, 48), torch.zeros(33, 50)]
    names = {weights[0]: "first", weights[1]: "second"}
    settings = Settings.check("int8", min_compress_numel=0)
    reducer = Reducer(names, settings=settings, network=rank.network())
    try:
        futures = [
            DDPBuckets(reducer).reduce(FakeBucket(torch.ones(w.numel()), [w], number, number == 1))
            for number, w in enumerate(weights)
        ]
        return say(reducer, futures)
    finally:
        reducer.close()


def say(reducer: Reducer, futures: list[torch.futures.Future[torch.Tensor]]) -> list[str]:
    """Outcome of each future once the worker has nothing left to do."""
    idle = threading.Event()
    reducer._executor.submit(idle.set)
    assert idle.wait(LIMIT), "the worker is gone or stuck"
    said = []
    for future in futures:
        try:
            said.append(f"{future.value().mean():.2f}" if future.done() else "pending")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_every_bucket_gets_its_mean() -> None:
    assert run_threads(two_buckets, 2) == [["1.00", "1.00"]] * 2


@pytest.mark.parametrize("verb", ["start", "wait"])
def test_a_failing_exchange_reaches_every_waiting_bucket(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is left pending blocks the backward pass for ever: DDP waits without limit."""

    def fail(self: AllGather) -> None:
        raise _BrokenLink("the link broke")

    monkeypatch.setattr(AllGather, verb, fail)
    for said in run_threads(two_buckets, 2):
        assert len(said) == 2
        assert "lightning_dist: the link broke" in " ".join(said)
        assert all("lightning_dist: " in message for message in said), said


def test_after_a_failure_every_later_bucket_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are no longer in step: going on would mix payloads of different buckets."""

    def body(rank: Rank) -> list[str]:
        weight = torch.zeros(40, 48)
        settings = Settings.check("fp16")
        reducer = Reducer({weight: "weight"}, settings=settings, network=rank.network())
        buckets = [FakeBucket(torch.ones(weight.numel()), [weight]) for _ in range(2)]
        try:
            return say(reducer, [DDPBuckets(reducer).reduce(bucket) for bucket in buckets])
        finally:
            reducer.close()

    def fail(self: AllReduce) -> None:
        raise _BrokenLink("the link broke")

    monkeypatch.setattr(AllReduce, "start", fail)
    ((first, second),) = run_threads(body, 2)[:1]
    assert "the link broke" in first
    assert "An earlier exchange failed" in second


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
    name, parameter = next(iter(model.parameters.items()))
    flat = feed(rank.rank, 0, SHAPES)[name].flatten()
    future = model.buckets.reduce(FakeBucket(flat, [parameter], 0, last=False))
    model.reducer.close()
    assert future.done()
    with pytest.raises(RuntimeError, match="closed in a step"):
        future.wait()


@on_threads(2)
def test_a_backward_pass_after_close_raises(rank: Rank) -> None:
    with compressed(rank, Fed()) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        reducer.close()
        with pytest.raises(RuntimeError, match="a reducer that is closed"):
            backward(model, feed(rank.rank, 1))
