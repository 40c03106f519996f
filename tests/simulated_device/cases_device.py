"""The simulation itself: that it is asynchronous, and shows what a GPU would hide."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, run_on_devices

sim = install()
DEVICE = torch.device("sim", 0)


@pytest.fixture(autouse=True)
def _no_delays() -> Iterator[None]:
    sim.drain(0)
    sim.reset_counters(0)
    yield
    sim.set_delays(0, 0.0, 0)
    sim.drain(0)


_x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
_at = torch.tensor([0, 4, 2, 1, 3])
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda x, at: (x * 2 + 1, x @ x.T, x / 3, x.addcmul(x, x.sum())),
    "in place": lambda x, at: x.clone().mul_(3).add_(x),
    "reduce": lambda x, at: (x.sum(), x.abs().amax(-1, keepdim=True), x.isfinite().all()),
    "select": lambda x, at: (x.topk(2), x.sort(), x.kthvalue(2), x.gather(-1, x.argsort())),
    "index": lambda x, at: (x[at], torch.zeros_like(x).index_add_(0, at, x), x[x > 0]),
    "join": lambda x, at: (torch.cat([x, x]), torch.stack([x, x]), torch.where(x > 0, x, 0.0)),
    "cast": lambda x, at: (x.to(torch.bfloat16), x.to(torch.float8_e4m3fn).view(torch.uint8)),
    "bits": lambda x, at: ((x > 0).to(torch.uint8) << at[:, None].to(torch.uint8)).sum(-1),
    "linear algebra": lambda x, at: (torch.linalg.qr(x), torch.linalg.vector_norm(x)),
    "layers": lambda x, at: (
        torch.nn.functional.layer_norm(x, (6,)),
        torch.nn.functional.cross_entropy(x, at),
        torch.nn.functional.embedding(at, x),
    ),
    "empty": lambda x, at: (x[:0] + 1, torch.cat([x[:0], x])),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_the_cpu(name: str) -> None:
    expected = OPERATORS[name](_x, _at)
    found = OPERATORS[name](_x.to(DEVICE), _at.to(DEVICE))
    for here, there in zip(tree_leaves(expected), tree_leaves(found), strict=True):
        assert there.device == DEVICE
        assert torch.equal(here, there.cpu())


def test_the_host_is_ahead_of_the_stream() -> None:
    event = sim.Event(enable_timing=True)
    after = sim.Event(enable_timing=True)
    event.record(sim.current_stream(DEVICE))
    release = sim.hold(DEVICE)
    after.record(sim.current_stream(DEVICE))
    assert not after.query()
    release()
    sim.synchronize(DEVICE)
    assert after.query()
    assert event.elapsed_time(after) > 0


def test_what_another_stream_reads_too_early_is_nan() -> None:
    side = sim.Stream(DEVICE)
    release = sim.hold(DEVICE)
    early = torch.ones(8, device=DEVICE)
    with sim.stream(side):
        wrong = early + 0
    side.synchronize()
    release()
    ordered = sim.Stream(DEVICE)
    ordered.wait_stream(sim.current_stream(DEVICE))
    with sim.stream(ordered):
        right = early + 0
    sim.synchronize(DEVICE)
    assert wrong.cpu().isnan().all()
    assert torch.equal(right.cpu(), torch.ones(8))


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_reads_it_is_nan(recorded: bool) -> None:
    side = sim.Stream(DEVICE)
    freed = torch.ones(8, device=DEVICE)
    side.wait_stream(sim.current_stream(DEVICE))
    with sim.stream(side):
        release = sim.hold(DEVICE)
        copy = freed + 0
        if recorded:
            freed.record_stream(side)
        del freed
    if not recorded:  # otherwise it is freed when the side stream is done
        sim.current_stream(DEVICE).synchronize()
    release()
    sim.synchronize(DEVICE)
    assert torch.equal(copy.cpu(), torch.ones(8)) == recorded


def test_a_write_after_the_free_is_counted() -> None:
    assert sim.written_after_free() == 0
    side = sim.Stream(DEVICE)
    freed = torch.ones(8, device=DEVICE)
    side.wait_stream(sim.current_stream(DEVICE))
    with sim.stream(side):
        release = sim.hold(DEVICE)
        freed.fill_(2.0)
        del freed
    sim.current_stream(DEVICE).synchronize()
    release()
    sim.synchronize(DEVICE)
    assert sim.written_after_free() == 1
    assert sim.written_after_free() == 0


def test_waits_of_the_host_are_counted() -> None:
    x = torch.ones(8, device=DEVICE)
    pinned = torch.ones(8).pin_memory()
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x.add_(x.sum())
    assert sim.counters(0)["synchronisations"] == {}
    x.sum().item()
    x.cpu()
    x.copy_(torch.ones(8))
    x.nonzero()
    assert sim.counters(0)["synchronisations"] == {
        "item": 1,
        "copy to host": 1,
        "copy from pageable memory": 1,
        "aten::nonzero": 1,
    }


def test_an_error_in_a_stream_is_raised_where_the_host_waits() -> None:
    values = torch.ones(4, device=DEVICE)
    wrong = values[torch.full((2,), 9).to(DEVICE)]  # out of bounds, which only the values tell
    with pytest.raises(RuntimeError, match="simulated device 0"):
        wrong.cpu()
    sim.synchronize(DEVICE)


def test_a_collective_holds_up_a_stream_and_not_the_host() -> None:
    launched = threading.Event()

    def body(rank: SimulatedRank) -> tuple[list[float], bool]:
        group = rank.group("test")
        x = torch.full((4,), 1.0 + rank.rank, device=rank.accelerator)
        if rank.rank == 1:
            assert launched.wait(10)
        work = dist.all_reduce(x, group=group, async_op=True)
        early = (x * 1).tolist()  # nobody has waited for it
        assert early == [1.0] * 4 or rank.rank == 1
        work.wait()
        work.get_future().wait()
        later = x * 2
        was_over = bool(work.is_completed())
        launched.set()
        return later.tolist(), was_over

    (first, was_over), (second, _) = run_on_devices(body, 2)
    assert first == second == [6.0] * 4
    assert not was_over, "rank 0 went on before rank 1 had staggered"


def test_callbacks_of_futures_run_in_a_stream_that_waits() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        x = torch.full((4,), 1.0 + rank.rank, device=rank.accelerator)
        work = dist.all_reduce(x, group=rank.group("test"), async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
        doubled.wait()
        found: list[float] = doubled.value().tolist()
        return found

    with delays(3):
        assert run_on_devices(body, 2) == [[6.0] * 4] * 2
