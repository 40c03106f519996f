"""Products of a codec are in float32, whatever precision the training has chosen for its own."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_dist.codecs import Int4
from lightning_dist.codecs.scales import full_precision

if not hasattr(torch.backends.mkldnn, "matmul"):
    pytest.skip("torch has one setting for all products", allow_module_level=True)
MATMULS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
REDUCED = ("tf32", "bf16")


@pytest.fixture(autouse=True)
def default_precision() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for matmul in MATMULS:
        matmul.fp32_precision = "none"


def legacy() -> None:
    torch.set_float32_matmul_precision("medium")


def only_cuda() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def everything() -> None:
    torch.backends.fp32_precision = "tf32"


def one_backend() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def settings() -> list[object]:
    try:
        common: object = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer where backends differ
        common = None
    return [common, torch.backends.fp32_precision, *(m.fp32_precision for m in MATMULS)]


@full_precision()
def leave_by_an_error() -> None:
    with full_precision():
        pass
    assert not {matmul.fp32_precision for matmul in MATMULS} & set(REDUCED)
    raise KeyError("out of it")


@pytest.mark.parametrize("choose", [legacy, only_cuda, everything, one_backend])
def test_the_setting_of_the_training_comes_back(choose: Callable[[], None]) -> None:
    choose()
    before = settings()
    assert set(before) & set(REDUCED)
    with pytest.raises(KeyError, match="out of it"):
        leave_by_an_error()
    assert settings() == before
    torch.backends.fp32_precision = "none"  # what was inherited still is
    if choose is everything:
        assert [matmul.fp32_precision for matmul in MATMULS] == ["none", "none"]


def test_the_rotation_is_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hardware that honours the setting a rotation in bfloat16 is not the rotation back's."""
    found = []
    product = Tensor.__matmul__

    def watched(a: Tensor, b: Tensor) -> Tensor:
        found.append([matmul.fp32_precision for matmul in MATMULS])
        return product(a, b)

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    codec = Int4(hadamard=True)
    legacy()
    codec.decode(codec.encode(torch.randn(3, 128)), torch.float32)
    assert len(found) == 2
    assert not {one for each in found for one in each} & set(REDUCED)
