"""Whole buckets and Triton's kernels, interpreted in the memory of the simulated accelerator."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from quick_interpreter import quicken_interpreter
from reducer.feeding import Fed, Tensors, backward, compressed, digest, feed, gradients, held
from torch import Tensor
from worlds import Rank, run_threads

from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, run_on_devices, to_cpu

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lightning_dist.kernels.triton import passes
from lightning_dist.reducer.plan import planner
from lightning_dist.reducer.units.table import TableUnit

sim = install()
quicken_interpreter()
_turn = threading.RLock()  # the interpreter's state is the process's
SHAPES = {"first": (40, 48), "odd": (257,), "bias": (40,)}


def _on_host(argument: Any) -> Any:
    """A CPU tensor of the same memory."""
    if not isinstance(argument, Tensor):
        return argument
    memory = (ctypes.c_uint8 * argument.nbytes).from_address(argument.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.view(argument.dtype).view(argument.shape)


@contextmanager
def tables() -> Iterator[None]:
    """Kernels that wait for their stream, and run on the host."""
    launch = passes._launch

    def interpreted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        torch.accelerator.current_stream().synchronize()
        with _turn:
            launch(kernel, *map(_on_host, arguments), **constants)

    with (
        patch.object(planner, "available_on", lambda device: device.type == "sim"),
        patch.object(passes, "_launch", interpreted),
    ):
        yield


def steps(rank: Rank, codec: str, commit: str, least: int) -> tuple[list[str], set[type]]:
    device = rank.accelerator if isinstance(rank, SimulatedRank) else torch.device("cpu")
    digests = []
    settings: dict[str, Any] = {"min_compress_numel": least, "error_feedback": True}
    settings |= {"commit": commit, "ddp": {"bucket_cap_mb": 1 if least else 0.004}}
    with compressed(rank, Fed(SHAPES).to(device), codec, **settings) as (model, reducer):
        for step in range(3):
            given: Tensors = {n: x.to(device) for n, x in feed(rank.rank, step, SHAPES).items()}
            backward(model, given)
            found = gradients(model)
            digests.append(digest(to_cpu([*(found[n] for n in sorted(found)), *held(reducer)])))
        groups = reducer._plans.groups()
        units = {type(unit) for group in groups for unit in group.units}
    return digests, units


@pytest.mark.parametrize("least", [0, 1000])
@pytest.mark.parametrize("commit", ["immediate", "deferred"])
@pytest.mark.parametrize(("codec", "size"), [("int8:block_size=64", 3), ("qsgd:block_size=64", 2)])
def test_steps_are_those_of_gloo_on_the_cpu(codec: str, size: int, commit: str, least: int) -> None:
    """With parameters beside that are not compressed, where ``least`` is not 0."""

    def body(rank: Rank) -> tuple[list[str], set[type]]:
        return steps(rank, codec, commit, least)

    expected = [digests for digests, _ in run_threads(body, size)]
    with delays(size), tables():
        found = run_on_devices(body, size)
    assert [digests for digests, _ in found] == expected
    assert {unit for _, units in found for unit in units} == {TableUnit}
