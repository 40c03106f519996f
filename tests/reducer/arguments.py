"""Arguments of the kernel passes, in the strides of a real bucket."""

from typing import Any

import torch
from torch import Tensor

from lightning_dist.codecs import BlockCodec, Payload
from lightning_dist.exchange.rounds import row_bytes, views

DEFERRED = ("encode", "decode_and_commit", "reduce", "server_feedback")
IMMEDIATE = ("encode_and_commit", "decode", "reduce", "server_feedback")
PASSES = (*DEFERRED, *IMMEDIATE[:2])
"""``decode`` is ``decode_and_commit`` without a state."""


def in_a_bucket(shape: tuple[int, int, int], *, spare: int, offset: int, seed: int) -> Tensor:
    """Normal numbers whose rows lie ``spare`` blocks apart and begin ``offset`` elements in."""
    rows, blocks, block = shape
    generator = torch.Generator().manual_seed(seed)
    stride = (blocks + spare) * block
    flat = torch.randn(offset + rows * stride, generator=generator)
    return flat.as_strided(shape, (stride, block, 1), offset)


def on_the_wire(codec: BlockCodec, rows: int, blocks: int, *, seed: int | None = None) -> Payload:
    """A payload inside a larger buffer: zeros, or an encoded gradient."""
    planes = codec.planes(torch.float32)
    buffer = torch.zeros(rows, row_bytes(planes, blocks + 3), dtype=torch.uint8)
    payload = tuple(plane[:, 2 : 2 + blocks] for plane in views(buffer, planes, blocks + 3))
    if seed is not None:
        x = in_a_bucket((rows, blocks, codec.block), spare=0, offset=0, seed=seed)
        for plane, values in zip(payload, codec.encode(x), strict=True):
            plane.copy_(values)
    return payload


def arguments(
    codec: BlockCodec,
    *,
    rows: int,
    blocks: int,
    offset: int = 0,
    scale: float = 8.0,
) -> dict[str, tuple[Any, ...]]:
    """Arguments of every pass for ``rows`` ranks, another residual layout than gradient layout."""
    shape = (rows, blocks, codec.block)
    grad = in_a_bucket(shape, spare=1, offset=offset, seed=1)
    residual = in_a_bucket(shape, spare=2, offset=offset, seed=2) * 0.01
    factor = torch.tensor(scale)
    own = on_the_wire(codec, rows, blocks, seed=3)
    received = (on_the_wire(codec, rows, blocks, seed=4),)
    shards = on_the_wire(codec, rows, blocks, seed=5)
    mean = on_the_wire(codec, 1, blocks, seed=6)
    return {
        "encode": (grad, (residual,), factor, None, on_the_wire(codec, rows, blocks)),
        "encode_and_commit": (grad, (residual,), factor, None, on_the_wire(codec, rows, blocks)),
        "decode_and_commit": (grad, (residual,), factor, None, own, received),
        "decode": (grad, (), factor, None, own, received),
        "reduce": (shards, None, on_the_wire(codec, 1, blocks)),
        "server_feedback": (residual[:1], factor, shards, mean),
    }


def leaves(tree: Any) -> list[Tensor]:
    if tree is None:
        return []
    return [tree] if isinstance(tree, Tensor) else [leaf for part in tree for leaf in leaves(part)]


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        if x.dim()
        else torch.equal(x, y)
        for x, y in pairs
    )
