"""What runs beside a training on the simulated accelerator: profiles and checkpoints."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.snapshots import assert_equal
from reducer.feeding import Fed, backward, compressed, digest
from torch import nn
from torch.utils._pytree import tree_map
from worlds import Rank, run_threads

from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.jobs import Committed
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.measurement.device_clock import StreamClock, clock_of
from lightning_dist.profiling.capture.ddp_hook import watch_allreduce
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep
from simulated_device.cases_ddp import SMALL_BUCKETS, given, left, place
from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, run_on_devices

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
