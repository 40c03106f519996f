"""Memory of a rank: nothing, a residual, a momentum, or both. See :meth:`Codec.memory`.

``x`` is the gradient of this step, ``compensated`` the input of the codec, ``sent`` the decoded
payload; all are ``(rows, B, block)`` in the compute dtype, multiplied by the GradScaler's
``scale``. The state is not, so a change of the scale does not change its weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_dist.codecs.scales import block_scale, per_step

State: TypeAlias = tuple[Tensor, ...]
KINDS = ("residual", "momentum")
"""Kinds of state."""


class Memory(ABC):
    """Rule of what is encoded and what is kept. Pure: the caller stores the new state.

    Subclasses are frozen dataclasses. ``kinds`` names the state tensors, each of the shape of the
    gradient: ``"residual"``, which is sent later, and ``"momentum"``. ``in_tables``: whether the
    kernels over tables of slices (``kernels/triton``) compute it.
    """

    kinds: ClassVar[tuple[str, ...]]
    in_tables: ClassVar[bool] = False

    @abstractmethod
    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        """The compensated gradient, which is encoded."""

    @abstractmethod
    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        """The new state, in the order of ``kinds``."""

    def drawn(
        self, rows: int, blocks: int, block: int, *, dtype: torch.dtype, generator: torch.Generator
    ) -> State:
        """Random state of at least so many blocks, as an example for compilers."""
        shapes = [(rows, blocks + number, block) for number in range(len(self.kinds))]
        return tuple(0.01 * torch.randn(s, generator=generator, dtype=dtype) for s in shapes)


@dataclass(frozen=True)
class NoMemory(Memory):
    """No state: ``p = g``."""

    kinds: ClassVar[tuple[str, ...]] = ()
    in_tables: ClassVar[bool] = True

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return ()


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """``p = g + decay e``, ``e <- p - sent``; with a ``decay`` below 1 old errors fade.

    Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., "Error
    feedback fixes SignSGD" (arXiv 1901.09847). With decay, for pseudo-gradients, as in SparseLoCo:
    Sarfi et al. (arXiv 2508.15706).
    """

    decay: float = field(default=1.0, kw_only=True)
    kinds: ClassVar[tuple[str, ...]] = ("residual",)

    @property
    def in_tables(self) -> bool:  # type: ignore[override]  # depends on the decay
        return self.decay == 1

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        kept = state[0] * self.decay if self.decay != 1 else state[0]
        return x + kept * scale

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return ((compensated - sent) / scale,)


@dataclass(frozen=True)
class RoundedError(Memory):
    """Error feedback with a residual of 8 bits: a bfloat16 scale per block, a byte per element.

    For sharded gradients, where each rank keeps a residual of the whole model. Rounding the
    residual loses at most half a scale per element, 0.4 % of the largest error of its block. The
    residual is scaled as the gradients are: not for a GradScaler. As in LoCo (arXiv 2407.04480),
    without its moving average.
    """

    kinds: ClassVar[tuple[str, ...]] = ("scale", "codes")

    def empty(
        self, rows: int, blocks: int, block: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """State of blocks without an error."""
        scale = torch.zeros(rows, blocks, 1, dtype=torch.bfloat16, device=device)
        return scale, torch.zeros(rows, blocks, block, dtype=torch.int8, device=device)

    def drawn(
        self, rows: int, blocks: int, block: int, *, dtype: torch.dtype, generator: torch.Generator
    ) -> State:
        step, codes = self.empty(rows, blocks, block, torch.device("cpu"))
        return step.fill_(0.01), codes.random_(-127, 128, generator=generator)

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x + self.value(state, x.dtype)

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return self.rounded(compensated - sent)

    def value(self, state: State, dtype: torch.dtype = torch.float32) -> Tensor:
        """The error that ``state`` stands for."""
        step, codes = state
        return codes.to(dtype) * step.to(dtype)

    def rounded(self, error: Tensor) -> State:
        """State that stands for ``error (rows, B, block)``."""
        step = block_scale(error.abs().amax(-1, keepdim=True), levels=127)
        codes = torch.round(error * per_step(step)).to(torch.int8)
        return step.to(torch.bfloat16), codes


@dataclass(frozen=True)
class Momentum(Memory):
    """``u <- m u + g``, ``p = u``: for the tensors that DGC does not compress."""

    momentum: float
    kinds: ClassVar[tuple[str, ...]] = ("momentum",)

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x + state[0] * self.momentum * scale

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return (compensated / scale,)


@dataclass(frozen=True)
class MomentumCorrection(Memory):
    """``u <- m u + g``, ``p = e + u``, ``e <- p - sent``; ``u <- 0`` where something was sent.

    Momentum before compression, and factor masking: Lin et al., "Deep gradient compression" (arXiv
    1712.01887), sections 3.1 and 3.2. Momentum is part of what is sent: the optimizer has none.
    """

    momentum: float
    kinds: ClassVar[tuple[str, ...]] = ("residual", "momentum")

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        residual, velocity = state
        return x + (residual + velocity * self.momentum) * scale

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        velocity = x / scale + state[1] * self.momentum
        return (compensated - sent) / scale, torch.where(
            sent == 0, velocity, torch.zeros_like(sent)
        )
