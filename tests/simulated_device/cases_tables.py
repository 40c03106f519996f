"""Whole buckets and Triton's kernels, interpreted in the memory of the simulated accelerator."""

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed, gradients, held
from interpreted import in_tables
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.reducer.units.table import TableUnit
from simulated_device.device import install
from simulated_device.ranks import SimulatedRank, delays, run_on_devices, to_cpu

sim = install()
SHAPES = {"first": (40, 48), "odd": (257,), "bias": (40,)}


def on_host(arguments: Sequence[Any]) -> list[Any]:
    """With CPU tensors of the same memory, once their stream has come to its end."""
    torch.accelerator.current_stream().synchronize()
    return [same_memory(each) if isinstance(each, Tensor) else each for each in arguments]


def same_memory(tensor: Tensor) -> Tensor:
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def steps(rank: Rank, codec: str, state_update: str, least: int) -> tuple[list[str], set[type]]:
    device = rank.accelerator if isinstance(rank, SimulatedRank) else torch.device("cpu")
    digests = []
    settings: dict[str, Any] = {"min_compress_numel": least, "error_feedback": True}
    settings |= {"state_update": state_update, "ddp": {"bucket_cap_mb": 1 if least else 0.004}}
    with compressed(rank, Fed(SHAPES).to(device), codec, **settings) as (model, reducer):
        for step in range(3):
            given: Tensors = {n: x.to(device) for n, x in feed(rank.rank, step, SHAPES).items()}
            backward(model, given)
            found = gradients(model)
            digests.append(digest(to_cpu([*(found[n] for n in sorted(found)), *held(reducer)])))
        groups = reducer.planner.planned
        units = {type(unit) for group in groups for unit in group.units}
    return digests, units


@pytest.mark.parametrize("least", [0, 1000])
@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@pytest.mark.parametrize(("codec", "size"), [("int8:block_size=64", 3), ("qsgd:block_size=64", 2)])
def test_steps_are_those_of_gloo_on_the_cpu(
    codec: str, size: int, state_update: str, least: int
) -> None:
    """With parameters beside that are not compressed, where ``least`` is not 0."""

    def body(rank: Rank) -> tuple[list[str], set[type]]:
        return steps(rank, codec, state_update, least)

    expected = [digests for digests, _ in run_threads(body, size)]
    with delays(size), in_tables(on_host):
        found = run_on_devices(body, size)
    assert [digests for digests, _ in found] == expected
    assert {unit for _, units in found for unit in units} == {TableUnit}
