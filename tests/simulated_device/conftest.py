"""Both sides of a comparison factorise matrices as accelerators do."""

import sys

import pytest
import torch
from processes import ROOT
from torch import Tensor

from lightning_dist.codecs.powersgd import cholesky_qr
from lightning_dist.reducer.units import low_rank

sys.path += [str(ROOT / "tests" / room) for room in ("checkpoint", "kernels")]  # of their helpers


def _as_on_an_accelerator(matrices: Tensor) -> Tensor:
    return cholesky_qr(torch.nan_to_num(matrices, posinf=0.0, neginf=0.0))


@pytest.fixture(autouse=True)
def _one_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "orthonormal", _as_on_an_accelerator)
