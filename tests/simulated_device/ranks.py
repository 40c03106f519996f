"""Ranks in threads, as of ``worlds``, each with a simulated device of its own."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override
from worlds import Rank, run_threads

from simulated_device.device import NAME, install

T = TypeVar("T")


class SimulatedRank(Rank):
    """A rank whose groups exchange tensors of its device."""

    @property
    def accelerator(self) -> torch.device:
        return torch.device(NAME, self.rank)

    @override
    def _new_group(self, name: str, members: list[int]) -> dist.ProcessGroup:
        group = super()._new_group(name, members)
        gloo = group._get_backend(torch.device("cpu"))
        backend = install().process_group(gloo, self.rank)
        group._register_backend(torch.device(NAME), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group


def run_on_devices(function: Callable[[SimulatedRank], T], size: int, **arguments: Any) -> list[T]:
    """``run_threads``, with a device for every rank; what failed in a stream is raised."""
    sim = install()

    def body(rank: Rank) -> T:
        sim.set_device(rank.rank)
        result = function(SimulatedRank(**{f.name: getattr(rank, f.name) for f in fields(rank)}))
        sim.drain(rank.rank)
        return result

    results = run_threads(body, size, **arguments)
    assert sim.written_after_free() == 0, "memory was written to after it was freed"
    return results


def require_same(body: Callable[[Rank], Any], size: int, *, seed: int) -> None:
    """Ranks on devices, whose streams are late, return what ranks on the CPU do."""
    expected = run_threads(body, size)
    with delays(seed):
        assert run_on_devices(body, size) == expected


@contextmanager
def delays(seed: int, *, probability: float = 0.2, microseconds: int = 300) -> Any:
    """Context in which tasks of streams are late at random; 0: never."""
    sim = install()
    sim.set_delays(seed, probability if seed else 0.0, microseconds)
    try:
        yield
    finally:
        sim.set_delays(0, 0.0, 0)


def to_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]
