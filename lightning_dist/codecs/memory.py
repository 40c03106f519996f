"""Memory of a rank: nothing, a residual, a momentum, or both.

A codec chooses one in :meth:`Codec.memory`.

``x`` is the gradient of this step, ``compensated`` the gradient with what an earlier step did not
send, ``sent`` the decoded payload; all ``(rows, B, block)`` in the compute dtype. They carry the
GradScaler's ``scale``, the state does not: a change of the scale does not change its weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_dist.codecs.scales import block_scale, per_step

State: TypeAlias = tuple[Tensor, ...]
KINDS = ("residual", "momentum")
"""Of state that a memory may keep."""


class Memory(ABC):
    """One rule of what is sent and what is kept. Pure: the caller stores what :meth:`after` says.

    Subclasses are frozen dataclasses. ``kinds`` names the state tensors, each of the shape of the
    gradient: ``"residual"``, what is to be sent later, and ``"momentum"``.
    """

    kinds: ClassVar[tuple[str, ...]]

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
        """Any state of at least so many blocks, for whoever compiles the arithmetic."""
        shapes = [(rows, blocks + number, block) for number in range(len(self.kinds))]
        return tuple(0.01 * torch.randn(s, generator=generator, dtype=dtype) for s in shapes)


@dataclass(frozen=True)
class NoMemory(Memory):
    """Send the gradient; what the codec loses is lost."""

    kinds: ClassVar[tuple[str, ...]] = ()

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return ()


@dataclass(frozen=True)
class ErrorFeedback(Memory):
    """``p = g + e``, ``e <- p - sent``.

    Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., "Error
    feedback fixes SignSGD" (arXiv 1901.09847).
    """

    kinds: ClassVar[tuple[str, ...]] = ("residual",)

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x + state[0] * scale

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return ((compensated - sent) / scale,)


@dataclass(frozen=True)
class DecayedErrorFeedback(Memory):
    """``p = g + decay e``, ``e <- p - sent``: what is not sent for long fades.

    For differences of weights that were worked out long ago, as in SparseLoCo (arXiv 2508.15706).
    """

    decay: float
    kinds: ClassVar[tuple[str, ...]] = ("residual",)

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        return x + state[0] * self.decay * scale

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        return ((compensated - sent) / scale,)


@dataclass(frozen=True)
class RoundedError(Memory):
    """Error feedback whose residual is in 8 bits: a bfloat16 scale a block and a byte an element.

    For gradients that are sharded over all ranks, where the sender would otherwise keep a residual
    of the whole model. What rounding the residual loses is lost: in each element at most half a
    scale, 0.4 % of the largest error of its block. The residual has the gradients' scale: not for
    a GradScaler. As in LoCo (arXiv 2407.04480), without its moving average.
    """

    kinds: ClassVar[tuple[str, ...]] = ("scale", "codes")

    def empty(
        self, rows: int, blocks: int, block: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """State of blocks of which nothing is owed."""
        scale = torch.zeros(rows, blocks, 1, dtype=torch.bfloat16, device=device)
        return scale, torch.zeros(rows, blocks, block, dtype=torch.int8, device=device)

    def drawn(
        self, rows: int, blocks: int, block: int, *, dtype: torch.dtype, generator: torch.Generator
    ) -> State:
        step, codes = self.empty(rows, blocks, block, torch.device("cpu"))
        return step.fill_(0.01), codes.random_(-127, 128, generator=generator)

    def compensated(self, x: Tensor, state: State, scale: Tensor) -> Tensor:
        step, codes = state
        return x + codes.to(x.dtype) * step.to(x.dtype)

    def after(
        self, x: Tensor, compensated: Tensor, sent: Tensor, state: State, scale: Tensor
    ) -> State:
        error = compensated - sent
        step = block_scale(error.abs().amax(-1, keepdim=True), levels=127)
        codes = torch.round(error * per_step(step)).to(torch.int8)
        return step.to(torch.bfloat16), codes


@dataclass(frozen=True)
class Momentum(Memory):
    """``u <- m u + g``, ``p = u``: what DGC does to the tensors that it does not compress."""

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
    1712.01887), sections 3.1 and 3.2. What is sent is a sum of momenta, so the optimizer has none.
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
