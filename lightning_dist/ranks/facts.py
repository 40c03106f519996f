"""Facts of all ranks, and tensors of which each rank has parts."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.ranks.channel import Channel, WaitLimit
from lightning_dist.ranks.levels import ranks_by

Facts = Mapping[str, Any]


def all_facts(
    facts: Facts,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    limit: WaitLimit | None = None,
) -> list[Facts]:
    """The JSON-able ``facts`` of every rank, in rank order. Collective.

    Args:
        limit: of waits for other ranks; None: the group's own timeout.
    """
    mine = json.dumps(facts, default=repr).encode()
    of_all = all_bytes(mine, group=group, device=device, limit=limit)
    return [json.loads(text.rstrip(b"\0")) for text in of_all]


def all_bytes(
    mine: bytes, *, group: dist.ProcessGroup, device: torch.device, limit: WaitLimit | None = None
) -> list[bytes]:
    """The bytes of every rank, in rank order, padded with zeros to the longest. Collective."""
    channel = Channel(group, name="facts", limit=limit)
    padded = _padded(mine, channel, device)
    received = padded.new_empty(group.size() * len(padded))
    channel.all_gather(received, padded).wait()
    return [row.numpy().tobytes() for row in received.cpu().view(group.size(), -1)]


def gather_objects(
    mine: Any, channel: Channel, *, device: torch.device, to: int = 0
) -> list[Any] | None:
    """Objects of all ranks that can be pickled, on rank ``to``; None elsewhere. Collective."""
    padded = _padded(pickle.dumps(mine), channel, device)
    is_here = channel.group.rank() == to
    parts = [torch.empty_like(padded) for _ in range(channel.group.size())] if is_here else None
    channel.gather(parts, padded, to=to).wait()
    if parts is None:
        return None
    # An object ends before the padding.
    return [pickle.loads(part.cpu().numpy().data) for part in parts]


def _padded(mine: bytes, channel: Channel, device: torch.device) -> Tensor:
    length = torch.tensor([len(mine)], device=device)
    channel.all_reduce(length, op=dist.ReduceOp.MAX).wait()
    padded = torch.zeros(int(length), dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    return padded


def require_equal(facts: list[Facts]) -> None:
    """Raise if the ranks do not agree.

    Raises:
        ValueError: names every fact that differs and which ranks have which value.
    """
    if lines := differences(facts):
        raise ValueError(
            "All ranks must compress in the same way, but they differ in\n"
            + "\n".join(lines)
            + "\nGive every rank the same settings and the same version of the package."
        )


def differences(facts: Sequence[Facts]) -> list[str]:
    """A line for every fact that differs, with the values and which ranks have them."""
    lines = []
    for key in dict.fromkeys(key for of_rank in facts for key in of_rank):
        values = [repr(of_rank.get(key)) for of_rank in facts]
        groups = ranks_by(values)
        if len(groups) > 1:
            values_of_ranks = "; ".join(
                f"{values[ranks[0]]} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for ranks in groups
            )
            lines.append(f"  {key}: {values_of_ranks}")
    return lines


_BATCH = 1 << 22
"""Bytes of tensors that are gathered together; a larger one is gathered alone."""


@dataclass(frozen=True)
class Spread:
    """A tensor of which each rank has parts.

    Args:
        whole: stands for the tensor in a state, on all ranks: its shape and dtype. Its memory is
            not filled, and never read before :func:`gather`.
        own: contiguous parts that this rank has, with the element of ``whole`` at which each
            starts; those of different ranks do not overlap. What no rank has is zero.
        complete: whether it is an error that no rank has an element.
    """

    whole: Tensor
    own: tuple[tuple[int, Tensor], ...]
    complete: bool = False

    def runs(self) -> list[tuple[int, Tensor]]:
        """The parts with the byte at which they start, in order."""
        size = self.whole.element_size()
        return [(start * size, part) for start, part in sorted(self.own, key=lambda pair: pair[0])]


Read: TypeAlias = Callable[[Tensor, int, int], Tensor]
"""``read(whole, start, numel)`` gives these elements, flat; of a tensor in a file only these."""


def run_of(whole: Tensor, start: int, numel: int) -> Tensor:
    """Elements of a tensor in memory, flat: a :data:`Read`."""
    return whole.reshape(-1)[start : start + numel]


def read_whole(tensor: Tensor, read: Read = run_of) -> Tensor:
    """A tensor that may be in a file, where it is on ``"meta"``."""
    return read(tensor, 0, tensor.numel()).view(tensor.shape) if tensor.is_meta else tensor


def gather(
    spreads: Sequence[Spread], channel: Channel, *, device: torch.device, to: int = 0
) -> None:
    """Fill ``whole`` of each, on rank ``to`` of the channel's group. Collective.

    Some MB, or one tensor, at a time, over ``device``. In each turn all ranks send as many bytes as
    the one that has most, so it is for tensors of which all have about as much.

    Args:
        spreads: of the same tensors in the same order on all ranks; ``whole`` may be on ``"meta"``
            on the others.
    """
    runs = [spread.runs() for spread in spreads]
    places = [[[start, part.nbytes] for start, part in of_one] for of_one in runs]
    facts = all_facts({"runs": places}, group=channel.group, device=device, limit=channel.limit)
    of_ranks = [fact["runs"] for fact in facts]
    for batch in _batches(spreads):
        sizes = [sum(numel for i in batch for _, numel in places[i]) for places in of_ranks]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device)
        at = 0
        for _, part in (run for i in batch for run in runs[i]):
            mine[at : at + part.nbytes].copy_(_bytes(part))
            at += part.nbytes
        if channel.group.rank() != to:
            channel.gather(None, mine, to=to).wait()
            continue
        received = [torch.empty_like(mine) for _ in of_ranks]
        channel.gather(received, mine, to=to).wait()
        wholes = [_bytes(spreads[i].whole).zero_() for i in batch]
        for places, sent in zip(of_ranks, received, strict=True):
            at = 0
            for whole, i in zip(wholes, batch, strict=True):
                for start, size in places[i]:
                    whole[start : start + size] = sent[at : at + size]
                    at += size


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, in its memory."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


def _batches(spreads: Sequence[Spread]) -> Iterator[list[int]]:
    """Indices of tensors that are gathered together: by their sizes, which all ranks know."""
    batch, size = list[int](), 0
    for index, spread in enumerate(spreads):
        if batch and size + spread.whole.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += spread.whole.nbytes
    if batch:
        yield batch
