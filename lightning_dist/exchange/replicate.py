"""Tensors of a model that are to be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from lightning_dist.ranks.channel import Channel


@torch.no_grad()
def replicate(tensors: Mapping[str, Tensor], channel: Channel, *, owner: int = 0) -> None:
    """Copy ``tensors`` of rank ``owner`` of the channel's group to all its ranks, in place.

    Collective. A collective takes the memory of a tensor, from its first element on, whatever its
    strides: so it is sent from contiguous memory, and copied element by element. Of a tensor that
    was expanded the elements that are in memory are sent.

    Args:
        tensors: by name, in an order that is equal on all ranks.

    Raises:
        ValueError: elements of a tensor overlap in memory otherwise.
    """
    for name, tensor in tensors.items():
        held = _in_memory(tensor)
        if _overlaps(held):
            raise ValueError(
                f"{name!r} must not have elements that overlap in memory, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; register a clone of it"
            )
        sent = held.contiguous()
        channel.broadcast(sent, owner=owner).wait()
        if sent.data_ptr() != held.data_ptr():
            held.copy_(sent)


def bits_digest(tensor: Tensor) -> int:
    """64-bit digest of the elements of ``tensor``, in an int64."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return int.from_bytes(blake2b(content.numpy().data, digest_size=8).digest(), "big", signed=True)


def _in_memory(tensor: Tensor) -> Tensor:
    """Part of ``tensor`` without the dimensions that it was expanded over."""
    return tensor.detach()[
        tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())
    ]


def _overlaps(tensor: Tensor) -> bool:
    """True unless each dimension steps over all elements of the dimensions inside it."""
    inside = 0
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(each for each in dimensions if each[1] > 1):
        if stride <= inside:
            return True
        inside += stride * (size - 1)
    return False
