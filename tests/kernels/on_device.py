"""Device of the kernels' tests: the CPU, in Triton's interpreter, or with ``-m gpu`` a GPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")

on_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
] * (DEVICE.type == "cuda")
"""Marks of tests on it."""
