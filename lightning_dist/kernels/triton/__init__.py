"""Multi-tensor Triton kernels of block codecs: one launch per pass, whatever the number of tensors.

Plain tensors in and out; nothing here knows of ``torch.distributed``. Importing this package does
not import Triton, :func:`kernels_of` does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lightning_dist.codecs.base import Codec
from lightning_dist.kernels.triton.table import GRADIENT_DTYPES, Slice, SliceTable, packed

if TYPE_CHECKING:
    from lightning_dist.kernels.triton.passes import TableKernels

_DEVICE_TYPES = ("cuda", "xpu")


def available_on(device: torch.device) -> bool:
    """Whether Triton compiles kernels for ``device``."""
    if device.type not in _DEVICE_TYPES or find_spec("triton") is None:
        return False
    from torch.utils._triton import has_triton  # no attribute of torch.utils before an import

    return bool(has_triton())


def kernels_of(codec: Codec, *, dtype: torch.dtype) -> TableKernels | None:
    """The kernels of ``codec`` for gradients in ``dtype``; None where there are none.

    None for codecs that the registry has not, for ``int4:hadamard=true`` (a matrix product), blocks
    of more than 8192 elements, float64, and where Triton is not installed: the eager definition is
    used instead.
    """
    if dtype not in GRADIENT_DTYPES or find_spec("triton") is None:
        return None
    from lightning_dist.kernels.triton.passes import FUNCTIONS, TableKernels
    from lightning_dist.kernels.triton.registry import device_codec

    device = device_codec(codec, FUNCTIONS)
    return None if device is None else TableKernels(device, dtype)


__all__ = ["GRADIENT_DTYPES", "Slice", "SliceTable", "available_on", "kernels_of", "packed"]
