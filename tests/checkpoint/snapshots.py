"""States worth saving, and saves of them as a writer gets them."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.checkpoint.disk.format import Origin
from lightning_dist.checkpoint.disk.jobs import Committed, Event, SaveFile, SaveFolder
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.checkpoint.snapshot.plan import Pickled, SnapshotPlan, pickled, plan
from lightning_dist.checkpoint.snapshot.snapshot import copy_now

Snapshot = memoryview


def origin(step: int = 1, *, ranks: int = 1, newer: int = 0) -> Origin:
    """Of a save at ``step``; a later step was taken later, ``newer`` ones later still."""
    return Origin(f"{step:08x}{newer:08x}", step, 10**18 + step + newer, ranks)


def small_state(step: int = 1) -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4) + step
    return {"step": step, "weight": weight, "tied": weight.T, "mask": torch.tensor([True, False])}


def trained(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **arguments: Any) -> Any:
    """A model and its optimizer after one step."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    made = optimizer(model.parameters(), **arguments)
    model(torch.randn(5, 13)).sum().backward()
    made.step()
    return model, made


def owned_tensors(*tensors: Tensor) -> dict[int, Tensor]:
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def filled(divided: SnapshotPlan) -> Snapshot:
    """The snapshot of a plan, copied at once."""
    memory = torch.zeros(divided.nbytes, dtype=torch.uint8)
    for record_range, content in divided.constants:
        slot = memory[record_range.offset : record_range.offset + record_range.nbytes]
        slot.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    copy_now((*divided.now, *divided.later), memory)
    return memoryview(memory.numpy())


def file_save(target: object, state: Any, of: Origin | None = None) -> tuple[SaveFile, Snapshot]:
    divided = plan(pickled(state), owned={}, overlap=False)
    return SaveFile(of or origin(), str(target), divided.ranges), filled(divided)


def folder_saves(
    target: object,
    state: Any,
    ranks: int,
    *,
    owned: Mapping[int, Tensor] | None = None,
    step: int = 1,
    peer_timeout: float = 20.0,
) -> list[tuple[SaveFolder, Snapshot]]:
    """One for every rank; ``owned`` is what they share, everything if None."""
    content: Pickled = pickled(state)
    if owned is None:
        whole = [torch.empty(0, dtype=torch.uint8).set_(s) for s in content.storages if s.nbytes()]
        owned = owned_tensors(*whole)
    made = []
    for rank in range(ranks):
        divided = plan(content, owned=owned, overlap=False, rank=rank, ranks=ranks)
        save = SaveFolder(
            origin(step, ranks=ranks), str(target), divided.ranges, rank, divided.records,
            peer_timeout=peer_timeout,
        )  # fmt: skip
        made.append((save, filled(divided)))
    return made


def write_file(target: object, state: Any, of: Origin | None = None) -> None:
    events: list[Event] = []
    Writer(report=events.append).do(*file_save(target, state, of))
    assert [type(event) for event in events] == [Committed], events


class Ranks:
    """A writer for every rank, each on a thread of its own."""

    def __init__(self, count: int, **arguments: Any) -> None:
        self._events: list[list[Event]] = [[] for _ in range(count)]
        self._writers = [Writer(report=events.append, **arguments) for events in self._events]

    def write(self, saves: list[tuple[SaveFolder, Snapshot]]) -> list[Event]:
        """Every rank does its save; what became of them, in rank order."""
        start = threading.Barrier(len(saves), timeout=20)

        def write(rank: int) -> None:
            start.wait()
            self._writers[rank].do(*saves[rank])

        with ThreadPoolExecutor(len(saves)) as pool:
            list(pool.map(write, range(len(saves))))
        return [events[-1] for events in self._events[: len(saves)]]


def write_folder(saves: list[tuple[SaveFolder, Snapshot]], **arguments: Any) -> list[Event]:
    return Ranks(len(saves), **arguments).write(saves)


def damage(path: Path) -> None:
    """Flip a bit of a file, or of the shard in a folder."""
    (found,) = [path] if path.is_file() else path.glob("shard-*")
    content = bytearray(found.read_bytes())
    content[len(content) // 2] ^= 1
    found.write_bytes(content)


def assert_equal(found: Any, expected: Any) -> None:
    """Equal to the bit, in the same nesting."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert raw(found) == raw(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
