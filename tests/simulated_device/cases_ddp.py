"""DDP and our hook on the simulated accelerator: what the CPU and gloo give, to the bit."""

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from feeding import (
    EVERY_CODEC,
    PER_LEVEL,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    few_first,
    gradients,
    held,
)
from layouts import FORMS, Layout, flat
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank

from lightning_dist.exchange.rounds import TwoShot
from lightning_dist.ranks.channel import Channel
from lightning_dist.reducer import reducer as reducer_module
from lightning_dist.reducer.network import SideStream, executor_for
from lightning_dist.reducer.plan.slices import slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.ddp import compress_ddp
from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, require_same, run_on_devices, to_cpu

sim = install()
CPU = torch.device("cpu")
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}
STEPS = 4
STATELESS = ("none", "fp16", "bf16", "qsgd:block_size=64", "terngrad:block_size=64")
BLOCK_CODECS = tuple(
    codec for codec in EVERY_CODEC if not codec.startswith(("threshold", "powersgd"))
)


def place(rank: Rank) -> torch.device:
    return rank.accelerator if isinstance(rank, SimulatedRank) else CPU


def given(rank: Rank, step: int) -> Tensors:
    device = place(rank)
    return {name: value.to(device) for name, value in feed(rank.rank, step).items()}


def left(model: nn.Module) -> list[torch.Tensor]:
    found = gradients(model)
    return to_cpu([found[name] for name in sorted(found)])


def take_step(rank: Rank, model: nn.Module, step: int) -> None:
    backward(model, given(rank, step))


def steps(
    rank: Rank,
    codec: str,
    *,
    count: int = STEPS,
    take: Callable[[Rank, nn.Module, int], object] = take_step,
    **settings: Any,
) -> list[str]:
    """Digests of gradients and state after every step."""
    digests = []
    settings = {"min_compress_numel": 0, "ddp": SMALL_BUCKETS, **settings}
    with compressed(rank, Fed().to(place(rank)), codec, **settings) as (model, reducer):
        for step in range(count):
            take(rank, model, step)
            digests.append(digest(left(model) + to_cpu(held(reducer))))
    return digests


@pytest.mark.parametrize(
    ("size", "seed"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("codec", few_first(EVERY_CODEC))
def test_it_is_gloo_on_the_cpu_to_the_bit(codec: str, size: int, seed: int) -> None:
    require_same(lambda rank: steps(rank, codec, **flat(size).form), size, seed=seed)


@pytest.mark.parametrize("layout", FORMS, ids=str)
@pytest.mark.parametrize(
    "codec",
    few_first(["none", "int8", "powersgd:rank=2", *PER_LEVEL], ["int8", PER_LEVEL[0]]),
)
def test_a_hierarchical_exchange_too(codec: str, layout: Layout) -> None:
    require_same(lambda rank: steps(rank, codec, **layout.form, count=3), layout.size, seed=2)


_module = nn.Sequential(
    nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 10)
)
"""Its bucket is made anew after the first backward pass."""


def train(
    rank: Rank,
    codec: str,
    *,
    count: int = 6,
    overflows_at: int = -1,
    state_update: Literal["auto", "deferred"] = "auto",
) -> tuple[list[str], list[dict[str, Any]]]:
    """Digests of weights after every step, and what was counted in its backward pass."""
    device = place(rank)
    module = copy.deepcopy(_module).to(device)
    model: DistributedDataParallel = rank.ddp(module, **SMALL_BUCKETS)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0) if overflows_at >= 0 else None
    settings: dict[str, Any] = {
        "min_compress_numel": 0,
        "grad_scaler": scaler,
        "state_update": state_update,
    }
    reducer = compress_ddp(model, codec, groups=rank.groups(), **settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank.rank)
    digests, counted = [], []
    for step in range(count):
        x = torch.randn(8, 48, generator=generator)
        if step == overflows_at and rank.rank == 1:
            x[0, 0] = torch.inf
        loss = model(x.to(device)).square().mean()
        loss = loss if scaler is None else scaler.scale(loss)
        if device != CPU:
            sim.drain(device)
            sim.reset_counters(device)
        loss.backward()
        if device != CPU:
            counted.append(sim.counters(device))
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        digests.append(digest(to_cpu(list(module.parameters()))))
    state = reducer.state_dict()
    if state is not None:
        residuals = [state["residuals"][name] for name in sorted(state["residuals"])]
        digests.append(digest([*residuals, torch.tensor([state["step"]])]))
    reducer.close()
    return digests, counted


@pytest.mark.parametrize("seed", [0, pytest.param(5, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "codec",
    few_first(
        ["none", "int8", "int4:block_size=64", "powersgd:rank=2"], ["int8", "powersgd:rank=2"]
    ),
)
def test_a_training_is_that_of_the_cpu(codec: str, seed: int) -> None:
    require_same(lambda rank: train(rank, codec)[0], 2, seed=seed)


@pytest.mark.parametrize(
    "codec", few_first(["none", "int8", "powersgd:rank=2", "qsgd:block_size=64"], ["int8"])
)
def test_an_overflow_under_a_scaler_is_that_of_the_cpu(codec: str) -> None:
    require_same(lambda rank: train(rank, codec, overflows_at=2)[0], 2, seed=4)


def counted(codec: str, state_update: Literal["auto", "deferred"] = "auto") -> dict[str, Any]:
    """Of the last step of rank 0, in which nothing is made for the first time."""
    (_, of_steps), *_ = run_on_devices(
        lambda rank: train(rank, codec, count=3, state_update=state_update), 3
    )
    return of_steps[-1]


@pytest.mark.parametrize("codec", few_first(BLOCK_CODECS))
def test_the_host_never_waits_for_a_block_codec(codec: str) -> None:
    assert counted(codec)["synchronisations"] == {}


@pytest.mark.parametrize(
    "codec", few_first(codec for codec in BLOCK_CODECS if codec not in STATELESS)
)
def test_with_the_deferred_commit_the_host_waits_once_a_step(codec: str) -> None:
    """For the answer of all ranks whether the step was finite."""
    assert counted(codec, "deferred")["synchronisations"] == {"copy to host": 1}


@pytest.mark.parametrize(
    "codec", ["threshold:tau=1.5", "powersgd:rank=2", "powersgd:rank=2,two_phase=true"]
)
def test_what_the_host_waits_for_beyond_that(codec: str) -> None:
    """Lengths and places that only values tell, and numbers for the matrix products."""
    found = counted(codec)["synchronisations"]
    units = 2  # one for each bucket that has something for the codec
    if codec.startswith("powersgd"):
        assert found == {"copy to host": units}
    else:
        # Lengths are read once, to receive; elements of 8 parameters are chosen.
        assert found == {"copy to host": units, "aten::nonzero": 8}


DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "unused parameters": {"find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize(
    "codec", few_first(["none", "int8", "topk:ratio=0.1,block_size=128"], ["int8"])
)
@pytest.mark.parametrize("name", DDP_SETTINGS)
def test_however_ddp_is_set(name: str, codec: str) -> None:
    def take(rank: Rank, model: nn.Module, step: int) -> None:
        fed = given(rank, step)
        if name == "unused parameters" and step % 2:
            del fed["second"]
        backward(model, fed)

    ddp = SMALL_BUCKETS | DDP_SETTINGS[name]
    require_same(lambda rank: steps(rank, codec, take=take, ddp=ddp), 3, seed=7)


@pytest.mark.parametrize("codec", ["int8", "qsgd:block_size=64", "powersgd:rank=2"])
def test_gradients_that_are_accumulated(codec: str) -> None:
    def take(rank: Rank, model: nn.Module, step: int) -> None:
        model.zero_grad()
        with model.no_sync():
            model(given(rank, 20 + step)).backward()
        model(given(rank, step)).backward()

    require_same(lambda rank: steps(rank, codec, take=take), 2, seed=8)


def test_a_resumed_state_goes_on_as_on_the_cpu() -> None:
    def body(rank: Rank) -> list[str]:
        settings: dict[str, Any] = {"ddp": SMALL_BUCKETS, "min_compress_numel": 0}
        digests = []
        with compressed(rank, Fed().to(place(rank)), "int8", **settings) as (model, reducer):
            for step in range(2):
                backward(model, given(rank, step))
            state = reducer.state_dict()
        if state is not None:
            states.append(state)
        rank.barrier.wait()
        with compressed(rank, Fed().to(place(rank)), "int8", **settings) as (model, reducer):
            reducer.load_state_dict(states[-1])
            for step in range(2, STEPS):
                backward(model, given(rank, step))
                digests.append(digest(left(model) + to_cpu(held(reducer))))
        return digests

    states: list[Any] = []
    require_same(body, 2, seed=9)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_hook_returns_before_the_exchange_is_issued(in_order: bool) -> None:
    """So that the backward pass goes on launching; unless the model communicates, too."""

    def body(rank: SimulatedRank) -> str:
        weight = torch.zeros(40, 48, device=rank.accelerator)
        settings = ExchangeSettings("int8", min_compress_numel=0)
        executor = executor_for(rank.accelerator, in_order=in_order)
        gate = threading.Event()
        if in_order:
            gate.set()
        with compressed(rank, Fed().to(rank.accelerator)) as (_, other):
            reducer = Reducer(
                {weight: "first"}, settings=settings, network=other.network, executor=executor
            )
            executor.submit(partial(gate.wait, 10))
            flat = feed(rank.rank, 0)["first"].flatten().to(rank.accelerator)
            handle = reducer.start(flat, slices_of(["first"], [weight]), key=0)
            assert bool(handle.groups) is in_order
            gate.set()
            reducer.finish()
            handle.done.wait()
            mean = digest(to_cpu([flat]))
            reducer.close()
            assert executor.close()
            return mean

    with delays(3):
        first, second = run_on_devices(body, 2)
    assert first == second


@pytest.mark.parametrize("finds_unused", [False, True])
def test_beside_collectives_of_ddp_one_thread_issues_all(finds_unused: bool) -> None:
    """With unused parameters DDP says in the backward pass which were used, in another group."""

    def body(rank: SimulatedRank) -> None:
        ddp = {"find_unused_parameters": finds_unused}
        with compressed(rank, Fed().to(rank.accelerator), "none", ddp=ddp) as (_, reducer):
            assert isinstance(reducer._executor, SideStream)
            assert (reducer._executor._worker is None) is finds_unused

    run_on_devices(body, 2)


def test_an_error_of_the_worker_reaches_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TwoShot) -> None:
        raise RuntimeError("the link broke")

    def body(rank: SimulatedRank) -> None:
        module = Fed().to(rank.accelerator)
        with compressed(rank, module, "int8", min_compress_numel=0) as (model, reducer):
            with pytest.raises(RuntimeError, match="the link broke"):
                backward(model, given(rank, 0))
            assert not reducer.in_step

    monkeypatch.setattr(TwoShot, "start", fail)
    run_on_devices(body, 3)


def test_a_stream_that_does_not_end_is_given_up() -> None:
    """Whoever closes or rebinds a reducer does not wait for ever."""
    device = torch.device("sim", 0)
    executor = executor_for(device)
    executor.submit(lambda: None)
    assert executor.drain(5.0)
    release = sim.hold(device)  # the side stream waits for what was launched before
    executor.submit(lambda: None)
    start = time.monotonic()
    assert not executor.drain(0.2)
    assert time.monotonic() - start < 5.0
    release()
    assert executor.close(5.0)


def test_a_reducer_on_a_stream_that_does_not_end_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where NCCL hangs: the host has issued everything, and the stream does not come to it."""
    monkeypatch.setattr(reducer_module, "_ACCELERATOR_PATIENCE", 0.2)

    def body(rank: SimulatedRank) -> None:
        with compressed(rank, Fed().to(rank.accelerator), "none") as (_, reducer):
            release = sim.hold(rank.accelerator)
            monkeypatch.setattr(dist.ProcessGroup, "abort", lambda _: release())
            reducer._executor.submit(lambda: None)  # behind what is held up
            assert reducer.in_step
            closer = threading.Thread(target=reducer.close)
            closer.start()
            closer.join(5.0)
            returned = not closer.is_alive()
            release()
            closer.join()
            assert returned
            del reducer._executor  # which a second call does not wait for again
            reducer.close()

    run_on_devices(body, 1)


def test_its_thread_is_on_the_device_of_its_rank() -> None:
    """A thread begins on device 0, and on CUDA leaving a stream there makes a context."""
    executor, seen = executor_for(torch.device("sim", 3)), list[int]()
    assert isinstance(executor, SideStream)
    assert executor._worker is not None
    executor._worker.submit(lambda: seen.append(sim.current_device()))
    executor.submit(lambda: None)
    executor._worker.submit(lambda: seen.append(sim.current_device()))
    assert executor.close(5.0)
    assert seen == [3, 3]


def test_its_groups_have_communicated_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL makes a communicator then, and the backward pass of a rank would wait for others."""
    seen, usual = list[str](), Channel.all_reduce

    def noted(channel: Channel, tensor: Any, **arguments: Any) -> Any:
        seen.append(channel.name)
        return usual(channel, tensor, **arguments)

    def body(rank: SimulatedRank) -> None:
        with compressed(rank, Fed().to(rank.accelerator), "none"):
            pass

    monkeypatch.setattr(Channel, "all_reduce", noted)
    run_on_devices(body, 2)
    assert sorted(name for name in seen if name != "facts") == ["control"] * 2 + ["flat"] * 2


def test_the_reducers_of_several_models_have_one_thread() -> None:
    """NCCL wants collectives of different groups in one order on all ranks."""
    device, order = torch.device("sim", 0), list[str]()
    first, second = executor_for(device), executor_for(device)
    gate = threading.Event()
    first.submit(partial(gate.wait, 10))
    first.submit(lambda: order.append("first"))
    second.submit(lambda: order.append("second"))
    assert not order
    gate.set()
    assert first.close(5.0)
    second.submit(lambda: order.append("second again"))
    assert isinstance(second, SideStream)
    assert second._worker is not None
    thread = second._worker._thread
    assert second.close(5.0)
    assert order == ["first", "second", "second again"]
    assert not thread.is_alive()


def test_the_stream_of_a_reducer_has_priority_over_that_of_the_backward_pass() -> None:
    device = torch.device("sim", 0)
    streams: list[torch.Stream] = []
    executor = executor_for(device)
    executor.submit(lambda: streams.append(torch.accelerator.current_stream(device)))
    assert executor.close(5.0)
    pool = {sim.Stream(device, priority=-1).stream_id for _ in range(64)}
    assert streams[0].stream_id in pool


def test_a_step_in_other_groups_is_that_of_before() -> None:
    def body(rank: SimulatedRank) -> list[str]:
        with compressed(rank, Fed().to(rank.accelerator), "none") as (model, reducer):
            first = digest(to_cpu(list(backward(model, given(rank, 0)).values())))
            channels = [Channel(rank.group(f"second {name}")) for name in ("data", "control")]
            network = replace(reducer.network, data=channels[0], control=channels[1])
            start = time.monotonic()
            reducer.rebind(network)
            assert time.monotonic() - start < 8.0  # an executor is waited for up to 10 s
            return [first, digest(to_cpu(list(backward(model, given(rank, 0)).values())))]

    for before, after in run_on_devices(body, 2):
        assert before == after
