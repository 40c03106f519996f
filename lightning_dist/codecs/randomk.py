"""``randomk``: a few elements of every block at random, the same ones on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dist.codecs import noise
from lightning_dist.codecs.base import BlockCodec, Native, Payload, Plane
from lightning_dist.codecs.topk import check_ratio_and_block_size


@dataclass(frozen=True)
class RandomK(BlockCodec):
    """``k = ratio * block`` random elements of every block, drawn from a seed that all ranks share.

    All ranks send the same elements, so the network adds the values, in the gradient's own dtype,
    and no index is sent. Each element is sent with probability ``k/block``, drawn anew in each
    step: ``E|C(x) - x|^2 = (1 - k/block) |x|^2``. ``unbiased`` multiplies decoded values by
    ``block/k``: the mean is exact in expectation, with noise of ``block/k - 1`` times the energy of
    the gradient, and no residual is kept.

    Wire bytes per rank and step: ``2 (W-1)/W * itemsize * n k/block``, 100 times less than float32
    at 1 %, at any world size. State: one residual per element, none if ``unbiased``. Per byte it
    converges slower than ``topk``; use it where there are too many ranks to gather.

    Stich et al., "Sparsified SGD with Memory" (arXiv 1809.07599); Wangni et al. (arXiv 1710.09854).
    """

    ratio: float = 0.01  # share of the elements that are sent
    block_size: int = 4096
    unbiased: bool = False

    name: ClassVar[str] = "randomk"
    use: ClassVar[str] = "very slow links and too many ranks for all_gather"
    exchange: ClassVar[str] = "allreduce"
    min_numel: ClassVar[int] = 4096
    stochastic: ClassVar[bool] = True
    shared_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unbiased: object = self.unbiased
        check_ratio_and_block_size(self, self.ratio, self.block_size, largest=65536)
        if not isinstance(unbiased, bool):
            raise ValueError(
                f"randomk: unbiased must be True or False, got {unbiased!r}; False, with error "
                "feedback, is the default"
            )

    @property
    def k(self) -> int:
        """Elements that are sent of every block."""
        return max(1, round(self.ratio * self.block_size))

    @property
    def native(self) -> Native:
        gain = self.block_size / self.k if self.unbiased else 1.0
        return Native("randomk", ("values",), torch.float32, self.k, gain)

    @property
    def keeps_residual(self) -> bool:  # type: ignore[override]  # depends on a hyperparameter
        return not self.unbiased

    @property
    def contraction(self) -> bool:
        return not self.unbiased

    @property
    def seldom(self) -> bool:
        return self.ratio < 0.1

    @property
    def block(self) -> int:
        return self.block_size

    def planes(self, dtype: torch.dtype) -> tuple[Plane, ...]:
        return (Plane(dtype, self.k),)

    def encode(self, x: Tensor, keys: Tensor | None = None) -> Payload:
        # Zero, unless a value that may not be among the chosen is not finite. Not x * 0, which
        # torch's compiler takes for 0.
        poison = (x - x).sum(-1, keepdim=True)
        return (x.gather(-1, self._places(keys)) + poison,)

    def decode(self, payload: Payload, dtype: torch.dtype, keys: Tensor | None = None) -> Tensor:
        values = payload[0].to(dtype)
        if self.unbiased:
            values = values * (self.block_size / self.k)
        # The last block of a tensor may have sent only its padding: of such a block too, what is
        # not finite is seen.
        first = values[..., :1]
        rest = torch.where(first.isnan(), first, 0).expand(*values.shape[:-1], self.block_size)
        return rest.scatter(-1, self._places(keys), values)

    def error_bound(self, x: Tensor) -> Tensor:
        gain = self.block_size / self.k if self.unbiased else 1.0
        size = x.abs()
        fits = size <= torch.finfo(x.dtype).max / gain
        # The product with the gain is rounded.
        return torch.where(fits, size * (max(1.0, gain - 1) * (1 + 1e-6)), torch.inf)

    def _places(self, keys: Tensor | None) -> Tensor:
        """int64 ``(..., B, k)``: ``a + i b`` modulo the block, each element equally likely.

        Distinct, since ``b`` is odd and the block a power of two.
        """
        assert keys is not None, "a stochastic codec was not given keys"
        numbers = noise.bits(keys, 2)
        start, step = numbers[..., :1], numbers[..., 1:] | 1
        order = torch.arange(self.k, dtype=torch.int32, device=keys.device)
        return ((start + order * step) & (self.block_size - 1)).to(torch.int64)
