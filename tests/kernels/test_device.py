"""Device functions on the numbers that decide: ties, the edges of a format, every code."""

from typing import Any

import pytest
import torch
from eager import DEVICE, on_device
from torch import Tensor

from lightning_dist.codecs import noise

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
tl: Any = triton.language
codecs = pytest.importorskip("lightning_dist.kernels.triton.passes")
device = pytest.importorskip("lightning_dist.kernels.triton.device")

pytestmark = on_device


@triton.jit
def _apply(x, out, FUNCTION: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, FUNCTION(tl.load(x + place)))


@triton.jit
def _fp8_level(codes):
    return codecs.fp8_level(codes, 448)


def applied(function: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    size = 1 << (len(x) - 1).bit_length()
    padded = torch.zeros(size, dtype=x.dtype, device=DEVICE)
    padded[: len(x)] = x
    out = torch.zeros(size, dtype=dtype, device=DEVICE)
    _apply[(1,)](padded, out, FUNCTION=function, SIZE=size, enable_fp_fusion=False)
    return out[: len(x)].cpu()


def around(x: Tensor) -> Tensor:
    """``x``, its neighbours, and the negative ones."""
    up, down = (torch.nextafter(x, torch.full_like(x, to)) for to in (torch.inf, -torch.inf))
    return torch.cat([x, up, down, -x, -up, -down])


def test_every_tie_of_fp8_is_rounded_to_even() -> None:
    levels = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = around(torch.cat([levels, (levels[1:] + levels[:-1]) / 2]))
    x = x[x.abs() <= 448]
    codes = applied(codecs._to_e4m3, x, torch.int32)
    assert codes.tolist() == x.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_every_code_of_fp8_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    values = applied(_fp8_level, codes, torch.float32)
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    good = expected.isfinite()
    assert torch.equal(values[good].view(torch.int32), expected[good].view(torch.int32))
    assert torch.equal(values.isnan(), expected.isnan())


def test_ties_of_integers_are_rounded_to_even() -> None:
    x = around(torch.arange(0, 128, 0.5))
    assert torch.equal(applied(device.nearest, x, torch.int32), x.round().to(torch.int32))


def test_the_hash_is_the_one_of_the_definition() -> None:
    x = torch.arange(-(2**31), 2**31, 2**23 + 77, dtype=torch.int64).to(torch.int32)
    assert torch.equal(applied(_mix, x, torch.int32), noise.mix(x))


@triton.jit
def _mix(x):
    return device.mix(x.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
