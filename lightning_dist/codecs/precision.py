"""Matrix products in float32, where the training has chosen TF32 or bfloat16 for its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REDUCED = ("tf32", "bf16")
_turn = threading.RLock()  # the setting is the process's, and reducers have threads of their own


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32. The setting of the training is restored.

    The sum of what was sent and what is kept is the gradient only if both are of the same product:
    with TF32 the difference is 1e-3. While the setting is changed the process has no other: what
    other threads multiply meanwhile is exact too.
    """
    with _turn:
        if not hasattr(torch.backends.mkldnn, "matmul"):  # torch 2.7, which has one setting
            common = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(common)
            return
        matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        before = [(matmul, matmul.fp32_precision) for matmul in matmuls]
        if any(precision in _REDUCED for _, precision in before):
            try:
                # As it was chosen: torch raises where its two ways to set it contradict.
                common = torch.get_float32_matmul_precision()
            except RuntimeError:
                common = "highest"
            try:
                if common != "highest":
                    torch.set_float32_matmul_precision("highest")
                else:
                    for matmul, _ in before:
                        matmul.fp32_precision = "ieee"
                yield
            finally:
                if common != "highest":
                    torch.set_float32_matmul_precision(common)
                for matmul, precision in before:
                    matmul.fp32_precision = "none"
                    if matmul.fp32_precision != precision:  # it was not inherited
                        matmul.fp32_precision = precision
            return
    yield
