"""The arithmetic between gradient, residual and payload, fused where a compiler is there.

Plain torch functions over a codec. ``torch.compile`` turns each into one pass over memory (C++ on
CPU, Triton on CUDA); without it they run eagerly in cache-sized pieces and give the same bytes.

Shapes: ``grad, residual (rows, B, block)``; payload planes ``(rows, B, m)``; ``scale`` 0-d, the
GradScaler's scale (1 without one); ``ok`` 0-d bool, whether the step is finite on every rank.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, Payload

log = logging.getLogger(__name__)

_CACHE_ELEMENTS = 1 << 16  # 256 KB of float32 and its temporaries stay in a core's cache
_COMPILED_FROM_BLOCKS = 16  # below, calling a compiled kernel costs more than running it
COMPILE_FROM_ELEMENTS = 1 << 22  # a smaller model saves less than the 20 s that compiling costs


@dataclass(frozen=True)
class Factors:
    """Where the division by the world size happens, which differs by exchange."""

    encode: float = 1.0  # gradient -> what is encoded
    own: float = 1.0  # own decoded payload -> what it stands for
    mean: float = 1.0  # sum of the received payloads -> mean gradient


class Kernels:
    """The four passes of one codec; ``compile()`` replaces them by fused ones."""

    def __init__(self, codec: Codec, *, factors: Factors, world_size: int) -> None:
        self.codec = codec
        self._factors, self._world_size = factors, world_size
        self.compiled = False
        self._run: dict[str, Callable[..., None]] = {}

    def encode(self, grad: Tensor, residual: Tensor | None, scale: Tensor, own: Payload) -> None:
        """``own <- C(grad + scale * residual)``."""
        self._call("encode", self._encode, grad, residual, scale, own)

    def reduce(self, shards: Payload, mean: Payload) -> None:
        """``mean <- C(1/W * sum_r D(shards[r]))``, added in rank order."""
        self._call("reduce", self._reduce, shards, mean)

    def settle(
        self,
        grad: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        ok: Tensor,
        own: Payload,
        payloads: Sequence[Payload],
    ) -> None:
        """``residual <- (p - D(own)) / scale`` if ``ok``, and ``grad <- mean of D(payloads)``."""
        self._call("settle", self._settle, grad, residual, scale, ok, own, tuple(payloads))

    def carry(
        self, residual: Tensor, scale: Tensor, ok: Tensor, shards: Payload, mean: Payload
    ) -> None:
        """Add what the second rounding lost to the owner's residual ``(1, B, block)``.

        The owner of a shard alone knows the exact sum. ``W`` times the error of the mean in one
        rank's residual is the error itself in the mean residual, so mass is conserved without a
        second state.
        """
        self._call("carry", self._carry, residual, scale, ok, shards, mean)

    def _encode(self, grad: Tensor, residual: Tensor | None, scale: Tensor, own: Payload) -> None:
        x = _with_residual(grad, residual, scale)
        if self._factors.encode != 1:
            x = x * self._factors.encode
        _write(own, self.codec.encode(x))

    def _reduce(self, shards: Payload, mean: Payload) -> None:
        total = self._sum_of_ranks(shards, torch.float32)
        _write(mean, self.codec.encode(total * (1.0 / self._world_size)))

    def _settle(
        self,
        grad: Tensor,
        residual: Tensor | None,
        scale: Tensor,
        ok: Tensor,
        own: Payload,
        payloads: Sequence[Payload],
    ) -> None:
        dtype = compute_dtype(grad.dtype)
        if residual is not None:
            sent = self.codec.decode(own, dtype) * self._factors.own
            lost = (_with_residual(grad, residual, scale) - sent) / scale
            residual.copy_(torch.where(ok, lost, residual))
        total = self.codec.decode(payloads[0], dtype)
        for payload in payloads[1:]:
            total = total + self.codec.decode(payload, dtype)
        grad.copy_(total * self._factors.mean if self._factors.mean != 1 else total)

    def _carry(
        self, residual: Tensor, scale: Tensor, ok: Tensor, shards: Payload, mean: Payload
    ) -> None:
        total = self._sum_of_ranks(shards, residual.dtype)
        kept_back = total - self.codec.decode(mean, residual.dtype) * self._world_size
        residual.copy_(torch.where(ok, residual + kept_back / scale, residual))

    def _sum_of_ranks(self, shards: Payload, dtype: torch.dtype) -> Tensor:
        total = self.codec.decode(tuple(plane[:1] for plane in shards), dtype)
        for rank in range(1, self._world_size):
            row = tuple(plane[rank : rank + 1] for plane in shards)
            total = total + self.codec.decode(row, dtype)
        return total

    def _call(self, name: str, function: Callable[..., None], *tensors: Any) -> None:
        fused = self._run.get(name)
        blocks = _blocks(tensors)
        if fused is not None and blocks >= _COMPILED_FROM_BLOCKS:
            fused(*tensors)
            return
        step = max(1, _CACHE_ELEMENTS // self.codec.block)
        if tensors[0] is not None and _first_tensor(tensors).device.type != "cpu":
            step = blocks  # a GPU wants one launch, not many small ones
        for start in range(0, blocks, step):
            function(*_cut(tensors, slice(start, start + step)))

    def compile(self, example: Callable[[], dict[str, tuple[Any, ...]]]) -> None:
        """Compile every pass named in ``example()`` on those arguments and check it once.

        A compiled pass that does not reproduce the eager bytes is not used.
        """
        for name, arguments in example().items():
            function = getattr(self, f"_{name}")
            fused = torch.compile(function, dynamic=True, fullgraph=True)
            eager_arguments = _clone(arguments)
            keep_block_static(arguments)
            fused(*arguments)
            function(*eager_arguments)
            if not _same(arguments, eager_arguments):
                log.warning("compiled %s.%s differs from eager: not used", self.codec.name, name)
                continue
            self._run[name] = fused
        self.compiled = True


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic and residuals are in float32, or in float64 for float64 gradients."""
    return torch.promote_types(dtype, torch.float32)


def compiler_is_there(device: torch.device) -> bool:
    """Whether torch.compile can generate code for ``device`` (a C++ compiler, or Triton)."""
    if device.type == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++"))
    return bool(torch.utils._triton.has_triton())


def should_compile(wish: bool | Literal["auto"], *, numel: int, device: torch.device) -> bool:
    """``auto``: where a compiler is there and the model is large enough to win the time back.

    Raises:
        ValueError: ``wish`` is True and there is no compiler.
    """
    if wish is False:
        return False
    there = compiler_is_there(device)
    if wish is True and not there:
        raise ValueError(
            f"compile_kernels=True needs a compiler for {device.type} (g++ or clang++ on CPU, "
            "Triton on CUDA) and found none; install one or use 'auto'"
        )
    return there and (wish is True or numel >= COMPILE_FROM_ELEMENTS)


def keep_block_static(tensors: Any) -> None:
    """Let compiled kernels vary the number of rows and blocks, not the length of a block."""
    for tensor in _tensors(tensors):
        if tensor.dim() == 3:
            torch._dynamo.mark_static(tensor, 2)


def _with_residual(grad: Tensor, residual: Tensor | None, scale: Tensor) -> Tensor:
    x = grad.to(compute_dtype(grad.dtype))
    return x if residual is None else x + residual * scale


def _write(out: Payload, values: Payload) -> None:
    for plane, value in zip(out, values, strict=True):
        plane.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for part in tree for leaf in _tensors(part)] if isinstance(tree, tuple) else []


def _first_tensor(tree: Any) -> Tensor:
    return _tensors(tree)[0]


def _blocks(tree: Any) -> int:
    return _first_tensor(tree).shape[1]


def _cut(tree: Any, blocks: slice) -> Any:
    if isinstance(tree, tuple):
        return tuple(_cut(part, blocks) for part in tree)
    return tree[:, blocks] if isinstance(tree, Tensor) and tree.dim() == 3 else tree


def _clone(tree: Any) -> Any:
    if isinstance(tree, tuple):
        return tuple(_clone(part) for part in tree)
    return tree.clone() if isinstance(tree, Tensor) else tree


def _same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_tensors(left), _tensors(right), strict=True))
