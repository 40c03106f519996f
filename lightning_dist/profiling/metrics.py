"""Metrics of compression for ``self.log``, averaged over ranks and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

if TYPE_CHECKING:
    from lightning_dist.profiling.capture.events import ErrorRecord

_COUNTERS = ("steps", "raw_bytes", "wire_bytes")


class ExchangedVolume(Metric):
    """Bytes that a rank sends in a synchronised step, or the compression ratio.

    The mean over ranks and steps since the last reset; with ``on_epoch=True`` that is the epoch::

        def on_train_batch_end(self, *args):
            self.volume.update(self.trainer.strategy.comm_stats())
            self.log("sent_bytes", self.volume, on_step=False, on_epoch=True)

    Args:
        ratio: bytes that uncompressed DDP would have sent over those that were sent, instead of
            bytes per step.
        kwargs: as of any ``torchmetrics.Metric``.
    """

    is_differentiable = False
    full_state_update = False
    steps: Tensor
    raw_bytes: Tensor
    wire_bytes: Tensor

    def __init__(self, *, ratio: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ratio = ratio
        self._counted = dict.fromkeys(_COUNTERS, 0)
        for name in _COUNTERS:
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, stats: Mapping[str, Any]) -> None:
        """Count what was sent since the last update.

        Args:
            stats: ``comm_stats()`` of a strategy, a hook or a plugin, which counts from its start;
                nothing is counted where it is empty.
        """
        if not stats:
            return
        if stats["steps"] < self._counted["steps"]:  # of another training
            self._counted = dict.fromkeys(_COUNTERS, 0)
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + stats[name] - self._counted[name])
        self._counted = {name: stats[name] for name in _COUNTERS}

    def compute(self) -> Tensor:
        """NaN where no step was synchronised, or for the ratio where nothing was sent."""
        if self._ratio:
            return self.raw_bytes / self.wire_bytes
        return self.wire_bytes / self.steps


class CompressionError(Metric):
    """Relative L2 error of what ranks have encoded, ``|p - C(p)| / |p|``.

    ``p`` is the gradient of a bucket with the residual of error feedback, ``C(p)`` its compressed
    form. The mean over ranks and samples since the last reset; ``CommProfiler`` takes a sample
    every ``error_every_n_steps`` steps, of a model whose gradients are compressed::

        def on_train_batch_end(self, *args):
            self.error.update(self.profiler.errors)
            self.log("compression_error", self.error, on_step=False, on_epoch=True)

    Args:
        kwargs: as of any ``torchmetrics.Metric``.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._newest: ErrorRecord | None = None
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, errors: Sequence[ErrorRecord]) -> None:
        """Count samples that are new since the last update.

        Args:
            errors: :attr:`CommProfiler.errors <lightning_dist.CommProfiler.errors>`, oldest first.
        """
        for error in takewhile(lambda error: error is not self._newest, reversed(errors)):
            self.total += error.relative_l2
            self.samples += 1
        self._newest = errors[-1] if errors else None

    def compute(self) -> Tensor:
        """NaN where nothing was sampled, as where nothing is compressed."""
        return self.total / self.samples
