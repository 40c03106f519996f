"""What codecs cost on this machine."""

from __future__ import annotations

import pytest
import torch
from planted_gpu import Gpu

from lightning_dist.codecs import Int8
from lightning_dist.measurement import calibration
from lightning_dist.measurement.calibration import calibrate
from lightning_dist.measurement.costs import CANDIDATES
from lightning_dist.measurement.device_clock import HostClock, StreamClock
from lightning_dist.measurement.microbenchmark import Passes

SECOND = 1_000_000_000


def test_every_candidate_has_a_cost_and_bytes() -> None:
    threads = torch.get_num_threads()
    costs = calibrate(units=1, rounds=1)
    assert tuple(costs) == CANDIDATES
    assert torch.get_num_threads() == threads
    for name, cost in costs.items():
        assert cost.name == name
        assert cost.encode > 0
        assert cost.decoding(1) >= 0
        assert cost.decoding(4) >= cost.decoding(1)
        assert cost.source == "measured alone on this machine now, not compiled"
    assert costs["int8"].wire == Int8().wire_bytes(1 << 20) / (1 << 20)
    assert [costs[name].wire for name in ("none", "fp16")] == [4.0, 2.0]
    assert costs["none"].decoding(1) == 0  # added up in the bucket itself
    assert costs["powersgd"].wire == 4 * 4 / 1024
    assert costs["powersgd"].assumption
    assert {name for name, cost in costs.items() if cost.assumption} == {"powersgd"}


def test_options_count() -> None:
    costs = calibrate(["topk:ratio=0.1", "topk"], units=1, rounds=1)
    assert costs["topk:ratio=0.1"].wire == pytest.approx(10 * costs["topk"].wire, rel=0.05)


def test_bytes_that_depend_on_the_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="depend on the gradient, got 'threshold'"):
        calibrate(["threshold"])


def test_a_codec_that_alternates_costs_the_mean_of_both() -> None:
    now = 0

    class Alternating(Passes):
        def __init__(self) -> None:
            self.step = 0

        def prepare(self) -> None:
            self.step += 1

        def encode(self) -> None:
            nonlocal now
            now += SECOND if self.step % 2 else 3 * SECOND

        def decode(self) -> None:
            nonlocal now
            now += 5 * SECOND

        def exchange(self) -> None:
            nonlocal now
            now += 7 * SECOND  # not of the codec

    clock = HostClock(lambda: now)
    assert calibration._seconds(Alternating(), rounds=3, clock=clock) == (2.0, 5.0)


def test_on_a_gpu_it_is_the_time_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for the work, which takes it next to no time."""
    (gpu := Gpu()).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.work(cycles / 2e6))

    class Asked(Passes):
        def __init__(self) -> None:
            pass

        def prepare(self) -> None:
            gpu.work(30)

        def encode(self) -> None:
            gpu.work(0.25)

        def decode(self) -> None:
            for _ in range(7):
                gpu.sleep(2)  # to launch a kernel takes longer than the kernel
                gpu.work(1)

        def exchange(self) -> None:
            gpu.work(11)  # not of the codec

    clock = StreamClock(torch.device("cuda", 0), gpu.clock)
    encode, decode = calibration._seconds(Asked(), rounds=3, clock=clock)
    assert encode == pytest.approx(0.25e-3, rel=0.01)
    assert decode == pytest.approx(7e-3, rel=0.01)
