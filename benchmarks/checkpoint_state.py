"""What the checkpoint benchmark trains and saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = 32
TENSORS = 3 * PARAMETERS
"""Parameters, and two moments of Adam for each; all of one size."""

_BATCH = 64
_SMALL_WIDTH = 512
_SMALL_LAYERS = 4


class Training:
    """A perceptron and AdamW whose state takes ``mb`` megabytes; it has taken one step."""

    def __init__(self, mb: float, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.width = round((mb * 1e6 / 4 / TENSORS) ** 0.5)
        self.model = nn.Sequential(
            *(nn.Linear(self.width, self.width, bias=False) for _ in range(PARAMETERS))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(_BATCH, self.width)
        self.passes()
        self.step()

    def state(self) -> dict[str, Any]:
        """The live state, as a trainer hands it to what saves it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def passes(self) -> None:
        """Forward and backward."""
        self.model(self.inputs).square().mean().backward()

    def step(self) -> None:
        """The optimizer's part of a training step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_of(inner)


def nbytes_of(state: Any) -> int:
    """Bytes of all tensors in a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


class SmallTraining:
    """Steps of some milliseconds, to see what a save in flight costs each of them."""

    def __init__(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(_SMALL_LAYERS):
            layers += [nn.Linear(_SMALL_WIDTH, _SMALL_WIDTH), nn.ReLU()]
        self._model = nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._inputs = torch.randn(_BATCH, _SMALL_WIDTH)

    def steps(self, goes_on: Callable[[int], bool]) -> list[float]:
        """Seconds of each step; ``goes_on`` is asked before each, with the number of those done."""
        seconds: list[float] = []
        while goes_on(len(seconds)):
            began = time.perf_counter()
            self._optimizer.zero_grad(set_to_none=True)
            self._model(self._inputs).square().mean().backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - began)
        return seconds
