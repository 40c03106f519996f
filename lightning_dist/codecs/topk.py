"""``topk``: the few largest elements of every block, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_dist.codecs.base import BlockCodec, Codec, Native, Payload, Plane
from lightning_dist.codecs.memory import ErrorFeedback, Memory
from lightning_dist.codecs.scales import (
    HEADROOM,
    SMALLEST_NORMAL,
    block_scale,
    cut_to_bfloat16,
    pack,
    per_step,
    unpack,
)

_VALUE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "int2": torch.uint8,
}
_GROUP = 8  # of the search; 4 to 16 measured, 8 is the fastest at 1 %


@dataclass(frozen=True)
class TopK(BlockCodec):
    """The ``k = ratio * block`` elements of largest magnitude of every block; the others are 0.

    ``|C(x) - x|^2 <= (1 - k/block) |x|^2``. Compared with the largest elements of a whole tensor,
    the error is the same within 1 % (0.917 for 0.915 at 1 % of Gaussian numbers), the search is
    many times faster, and an index needs 12 bits. Two indices share three bytes, so ``k`` is
    rounded up to an even number. Of equal magnitudes the first are sent.

    ``values`` are sent as ``"bf16"``, ``"fp32"``, ``"int8"`` with one bfloat16 scale per block, or
    ``"int2"``: the sign and one of two magnitudes, the means of those above and below the block's
    mean magnitude. ``decay`` is the share of the residual that is kept from step to step.

    Wire bytes per rank and step: ``(W-1) * n k/block * 3.5`` (bf16), which grows with W because
    every rank receives every payload: 111 times less than float32 at 1 % and W=2, 28 times at W=8.
    State: one residual per element, without which it does not converge. Use it on very slow links
    with few ranks.

    Sparsification with memory: Stich et al. (arXiv 1809.07599); top-k: Aji and Heafield (arXiv
    1704.05021); two bits and decay, for pseudo-gradients: Sarfi et al., SparseLoCo (arXiv
    2508.15706).
    """

    ratio: float = 0.01  # share of the elements that are sent
    block_size: int = 4096
    values: str = "bf16"  # or "fp32", "int8", "int2"
    decay: float = 1.0

    name: ClassVar[str] = "topk"
    use: ClassVar[str] = "very slow links and few ranks"
    exchange: ClassVar[str] = "gather"
    min_numel: ClassVar[int] = 4096
    keeps_residual: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio_and_block_size(self, self.ratio, self.block_size, largest=4096)
        if self.values not in _VALUE_DTYPES:
            raise ValueError(
                f"{self.name}: values must be 'bf16', 'fp32', 'int8' or 'int2', got "
                f"{self.values!r}; use 'bf16', the default"
            )
        decay: object = self.decay
        if not isinstance(decay, float | int) or isinstance(decay, bool) or not 0 < decay <= 1:
            raise ValueError(
                f"{self.name}: decay must be a number above 0 and up to 1, got {decay!r}; 1 keeps "
                "the whole residual"
            )

    @property
    def k(self) -> int:
        """Elements that are sent of every block: even, with two-bit values a multiple of four."""
        k = max(1, round(self.ratio * self.block_size))
        return k + -k % (4 if self.values == "int2" else 2)

    @property
    def fusable(self) -> bool:  # type: ignore[override]  # the C++ has neither
        return self.values != "int2" and self.decay == 1

    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        plain = super().memory(error_feedback)
        return ErrorFeedback(decay=self.decay) if plain.kinds and self.decay < 1 else plain

    @property
    def native(self) -> Native | None:
        if not self.fusable:
            return None
        planes = ("places", "values", "scales")
        return Native("topk", planes, _VALUE_DTYPES[self.values], self.k)

    @property
    def block(self) -> int:
        return self.block_size

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        places = Plane(torch.uint8, self.k // 2 * 3)
        if self.values == "int2":
            return places, Plane(torch.uint8, self.k // 4), Plane(torch.bfloat16, 2)
        values = Plane(_VALUE_DTYPES[self.values], self.k)
        scale = (Plane(torch.bfloat16, 1),) if self.values == "int8" else ()
        return places, values, *scale

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        places = largest(x, self.k)
        values = x.gather(-1, places)
        if self.values == "int2":
            return pack_places(places), *_in_two_bits(values)
        if self.values != "int8":
            return pack_places(places), values.to(_VALUE_DTYPES[self.values])
        scale = block_scale(values.abs().amax(-1, keepdim=True), levels=127)
        codes = torch.round(values * per_step(scale)).to(torch.int8)
        return pack_places(places), codes, scale.to(torch.bfloat16)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        places, values = self._sent(payload, dtype)
        zeros = values.new_zeros(*values.shape[:-1], self.block_size)
        return zeros.scatter_(-1, places, values)

    def add(
        self, total: Tensor, payload: Payload, *, weight: float, keys: Tensor | None = None
    ) -> Tensor:
        """As in the base class, but *in place*: only what was sent is read and written."""
        places, values = self._sent(payload, total.dtype)
        return total.scatter_add_(-1, places, values * weight if weight != 1 else values)

    def error_bound(self, x: Tensor) -> Tensor:
        size = x.abs()
        threshold = size.gather(-1, largest(x, self.k)).amin(-1, keepdim=True)
        wire = torch.finfo(torch.float32 if self.values != "bf16" else torch.bfloat16)
        amax = size.amax(-1, keepdim=True)
        rounding = size * (wire.eps / 2) + SMALLEST_NORMAL
        if self.values == "int8":
            rounding = amax * (HEADROOM / 127 / 2 * (1 + 1e-4)) + 128 * SMALLEST_NORMAL
        if self.values == "int2":
            rounding = (amax - threshold) + amax * 2**-7 + SMALLEST_NORMAL
        bound = torch.minimum(size, threshold) + rounding
        return torch.where(amax <= wire.max, bound, torch.inf)

    def finite(self, payload: Payload) -> Tensor:
        # Values, or their scales.
        return payload[-1].isfinite().all()

    def _sent(self, payload: Payload, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.values == "int2":
            codes = unpack(payload[1], bits=2)
            small, large = torch.split(payload[2].to(dtype), 1, dim=-1)
            magnitudes = torch.where(codes >> 1 == 1, large, small)
            return unpack_places(payload[0]), torch.where(codes & 1 == 1, -magnitudes, magnitudes)
        values = payload[1].to(dtype)
        if self.values == "int8":
            values = values * payload[2].to(dtype)
        return unpack_places(payload[0]), values


def check_ratio_and_block_size(codec: Codec, ratio: object, size: object, *, largest: int) -> None:
    """Raise ValueError unless ``codec`` can send this share of the elements of such blocks."""
    if not isinstance(ratio, float | int) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ValueError(
            f"{codec.name}: ratio must be a number above 0 and up to 1, got {ratio!r}; 0.01 sends "
            "one element in a hundred"
        )
    if not isinstance(size, int) or not 64 <= size <= largest or size & (size - 1):
        raise ValueError(
            f"{codec.name}: block_size must be a power of two from 64 to {largest}, got {size!r}; "
            "use 4096, the default"
        )


def _in_two_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """``(..., k)`` -> codes of sign and size, packed, and the two magnitudes ``(..., 2)``."""
    sizes = values.abs()
    largest_size = sizes.amax(-1, keepdim=True)
    shares = sizes / largest_size.clamp_min(SMALLEST_NORMAL)  # whose sum is finite
    large = shares > shares.mean(-1, keepdim=True)
    counts = torch.stack([(~large).sum(-1), large.sum(-1)], dim=-1).clamp_min(1)
    sums = torch.stack(
        [shares.masked_fill(group, 0.0).sum(-1) for group in (large, ~large)], dim=-1
    )
    means = (sums / counts * largest_size).to(torch.float32)
    magnitudes = cut_to_bfloat16(means).to(torch.bfloat16)
    return pack(2 * large.to(torch.int32) + (values < 0), bits=2), magnitudes


def largest(x: Tensor, k: int) -> Tensor:
    """int64 ``(..., k)``: places of the ``k`` largest magnitudes of every block, NaN before inf.

    On a CPU they ascend, and of equal magnitudes the first ones are taken, as in the compiled
    passes. An accelerator, which would have to be waited for, takes any of the equal ones.
    """
    # As integers magnitudes have the same order, and are compared faster.
    bits = x.abs().view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    few = (k + 1) * 8 * _GROUP <= bits.shape[-1]
    if bits.device.type != "cpu":
        return _among_columns(bits, k)[1] if few else bits.topk(k, sorted=False).indices
    if few:
        sizes, places = _among_columns(bits, k + 1)
        if not (sizes[..., k - 1] == sizes[..., k]).any():
            return places[..., :k].sort(-1).values
        limit = sizes[..., k - 1 : k]
    else:
        limit = bits.topk(k, sorted=False).values.amin(-1, keepdim=True)
    chosen = bits >= limit
    tied = chosen.sum(-1) > k
    if tied.any():
        some, least = bits[tied], limit[tied]
        needed = k - (some > least).sum(-1, keepdim=True)
        equal = some == least
        order = equal.cumsum(-1, dtype=torch.int16)  # a block has up to 4096 elements
        chosen[tied] = (some > least) | (equal & (order <= needed))
    return (chosen.flatten().nonzero() % bits.shape[-1]).view(*bits.shape[:-1], k)


def _among_columns(bits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of every block and their places, largest first.

    They lie in the k groups of largest maximum: where k is small only these are searched, twice as
    fast at 1 % as one search. A group is a column, so that whole vectors are compared.
    """
    groups = bits.reshape(*bits.shape[:-1], _GROUP, -1)
    columns = groups.amax(-2).topk(k, sorted=False).indices
    shape = (*columns.shape[:-1], _GROUP, k)
    candidates = groups.gather(-1, columns.unsqueeze(-2).expand(shape)).flatten(-2)
    sizes, order = candidates.topk(k)
    return sizes, order // k * groups.shape[-1] + columns.gather(-1, order % k)


def pack_places(places: Tensor) -> Tensor:
    """``(..., k)`` in [0, 4096) -> uint8 ``(..., 3 k / 2)``: two of 12 bits share three bytes."""
    first, second = places.to(torch.int32).chunk(2, dim=-1)
    middle = (first >> 8) | ((second >> 8) << 4)
    return torch.cat([first & 255, middle, second & 255], dim=-1).to(torch.uint8)


def unpack_places(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_places`, int64."""
    first, middle, second = packed.to(torch.int64).chunk(3, dim=-1)
    return torch.cat([first | ((middle & 15) << 8), second | ((middle >> 4) << 8)], dim=-1)
