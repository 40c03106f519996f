"""float16 with a real GradScaler."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision


def half(**scaler: Any) -> list[MixedPrecision]:
    """16-mixed on the CPU, which ``precision="16-mixed"`` would turn into bf16-mixed."""
    real = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **scaler})
    return [MixedPrecision("16-mixed", device="cpu", scaler=real)]
