"""What runs beside a training on the simulated accelerator, and delayed and local updates of it."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding import Fed, backward, compressed, digest
from snapshots import assert_equal
from torch import nn
from torch.utils._pytree import tree_map
from worlds import Rank, run_threads

from lightning_dist import local_updates
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.measurement.microbenchmark import StreamClock, clock_of
from lightning_dist.profiling.capture.ddp_hook import watch_allreduce
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep
from lightning_dist.settings.run import CheckpointSettings
from simulated_device.cases_ddp import SMALL_BUCKETS, given, left, place
from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, require_same, run_on_devices, to_cpu

sim = install()
STEPS = 4


def recorder_of(rank: Rank) -> Recorder:
    clock = clock_of(place(rank))
    assert isinstance(clock, StreamClock) == isinstance(rank, SimulatedRank)
    return Recorder(device_clock=clock)


def read(recorder: Recorder) -> StepRecord:
    """The step that is over, once the device has come to its end."""
    clock, begin = recorder.device_clock, recorder.device_clock.now()
    sim.synchronize()
    buckets, spans = recorder.take()
    return PendingStep(begin, begin, buckets=buckets, spans=spans).read(clock)


def profiled(
    rank: Rank, codec: str, *, watched: bool
) -> tuple[list[str], list[StepRecord], Counter[str]]:
    """Digests of gradients, the last steps, and waits of the host, samples of errors included."""
    digests, records, waits = [], [], Counter()
    settings: dict[str, Any] = {"min_compress_numel": 0, "ddp": SMALL_BUCKETS}
    with compressed(rank, Fed().to(place(rank)), codec, **settings) as (model, reducer):
        recorder = recorder_of(rank)
        if watched:
            reducer.observe(recorder)
        for step in range(STEPS):
            gradients = given(rank, step)
            if watched:
                recorder.errors.ask(step)
            sim.drain(rank.rank)
            sim.reset_counters(rank.rank)
            model.zero_grad()
            model(gradients).backward()
            waits = Counter(sim.counters(rank.rank)["synchronisations"])
            digests.append(digest(left(model)))
            if watched:
                error, _ = recorder.errors.take()
                assert (error is None) == (codec == "none")
                assert error is None or error() is not None
                records.append(read(recorder))
        recorder.close()
    return digests, records, waits


@pytest.mark.parametrize("codec", ["int8", "none", "powersgd:rank=2", "threshold:tau=1.5"])
def test_a_profile_changes_nothing_and_waits_for_nothing(codec: str) -> None:
    with delays(1):
        alone = run_on_devices(lambda rank: profiled(rank, codec, watched=False), 3)
        watched = run_on_devices(lambda rank: profiled(rank, codec, watched=True), 3)
    assert [digests for digests, _, _ in watched] == [digests for digests, _, _ in alone]
    assert [waits for _, _, waits in watched] == [waits for _, _, waits in alone]


def test_times_of_a_profile_are_in_their_order() -> None:
    with delays(6):
        ((_, records, _), *_) = run_on_devices(lambda r: profiled(r, "int8", watched=True), 3)
    for record in records[1:]:
        assert record.buckets
        exchanges = [span for span in record.spans if span.phase == "exchange"]
        assert exchanges
        assert all(span.begin <= span.end for span in record.spans)
        for bucket in record.buckets:
            mine = [span for span in exchanges if span.bucket == bucket.index]
            assert bucket.ready <= min(span.begin for span in mine)
            payloads = [span.end for span in mine if span.group != "control"]
            assert max(payloads) <= bucket.done


def test_the_hook_that_watches_ddp_gives_its_means() -> None:
    def body(rank: Rank, watched: bool) -> list[str]:
        model = rank.ddp(Fed().to(place(rank)), **SMALL_BUCKETS)
        recorder = recorder_of(rank)
        if watched:
            watch_allreduce(model, recorder, crosses=False)
        digests = []
        for step in range(STEPS):
            backward(model, given(rank, step))
            digests.append(digest(left(model)))
            if watched and isinstance(rank, SimulatedRank):
                record = read(recorder)
                assert len(record.buckets) == len(record.spans) > 0
                assert all(each.ready <= each.done for each in record.buckets)
        return digests

    expected = run_threads(lambda rank: body(rank, False), 3)
    with delays(2):
        assert run_on_devices(lambda rank: body(rank, True), 3) == expected


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_checkpoint_is_the_state_at_the_trigger(seed: int, tmp_path: Path) -> None:
    """What is copied later waits for the stream of the training, and the next step for the copy."""
    device = torch.device("sim", 0)
    sim.set_device(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(16, 64).to(device)
    checkpointer = Checkpointer(CheckpointSettings(writer="thread"))
    checkpointer.open(str(tmp_path))
    checkpointer.watch([optimizer])

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    expected = []
    with delays(seed, probability=0.5):
        for number in range(4):
            step()
            expected.append(copy.deepcopy(state()))  # a copy in the order of the stream
            checkpointer.save(state(), f"{tmp_path}/{number}.ckpt", step=number)
            step()
        checkpointer.close()
    assert [type(event) for event in checkpointer.poll()] == [Committed] * 4
    for number, of_step in enumerate(expected):
        loaded = torch.load(tmp_path / f"{number}.ckpt", map_location="cpu")
        assert_equal(loaded, tree_map(_on_cpu, of_step))
    assert sim.written_after_free() == 0


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def late(rank: Rank, codec: str) -> list[str]:
    digests = []
    settings: dict[str, Any] = {"min_compress_numel": 0, "ddp": SMALL_BUCKETS, "delay": 1}
    with compressed(rank, Fed().to(place(rank)), codec, **settings) as (model, reducer):
        for step in range(5):
            backward(model, given(rank, step))
            digests.append(digest(left(model)))
            if step == 3:
                state = reducer.state_dict()
                digests += [] if state is None else [digest(list(state["delayed"].values()))]
        reducer.wait()
    return digests


@pytest.mark.parametrize("codec", ["none", "int8", "topk:ratio=0.1", "powersgd:rank=2"])
@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2)])
def test_delayed_means(codec: str, size: int, seed: int) -> None:
    require_same(lambda rank: late(rank, codec), size, seed=seed)


SCHEDULES: list[dict[str, Any]] = [
    {"method": "diloco", "sync_every": 2},
    {"method": "streaming", "sync_every": 4, "fragments": 2, "overlap_steps": 1},
]


def local(
    rank: Rank, schedule: dict[str, Any], *, offload: bool
) -> tuple[list[str], Counter[str], int]:
    """Digests of the weights, bytes of the anchor and its momenta by device, and elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    model = model.to(place(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"groups": rank.groups(), "min_compress_numel": 0, "codec": "int8", **schedule}
    updates = local_updates(model, optimizer, offload=offload, **settings)
    digests = []
    for step in range(9):
        generator = torch.Generator().manual_seed(100 * rank.rank + step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(place(rank))
        optimizer.step()
        updates.step()
        digests.append(digest(to_cpu([p.detach() for p in model.parameters()])))
    outer = updates.outer_optimizer
    held = [each for group in outer.param_groups for each in group["params"]]
    held += [state["momentum_buffer"] for state in outer.state.values()]
    updates.close()
    nbytes = Counter[str]()
    for each in held:
        nbytes[each.device.type] += each.nbytes
    return digests, nbytes, sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["diloco", "streaming"])
def test_local_updates(schedule: dict[str, Any], offload: bool) -> None:
    expected = run_threads(lambda rank: local(rank, schedule, offload=False), 2)
    with delays(3):
        found = run_on_devices(lambda rank: local(rank, schedule, offload=offload), 2)
    assert [digests for digests, *_ in found] == [digests for digests, *_ in expected]
    for _, nbytes, elements in found:
        assert nbytes == {"cpu" if offload else sim.__name__.removeprefix("torch."): 8 * elements}
