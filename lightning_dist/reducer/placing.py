"""From the host to where the gradients are."""

from __future__ import annotations

import torch
from torch import Tensor


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, which is on the host, on ``device``.

    An accelerator gets it in the order of its stream. From memory that is not pinned the host would
    wait until the stream has come to it, and be ahead no more.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
