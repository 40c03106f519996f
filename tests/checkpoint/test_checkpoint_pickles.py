"""``data.pkl`` is torch's own, byte for byte, and the storages are those of the archive."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from snapshots import trained
from torch import nn

from lightning_dist.checkpoint.snapshot.pickling import pickled

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@dataclass
class Config:
    """An object that torch knows nothing of."""

    name: str
    weight: torch.Tensor


def tied() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model.state_dict()


def views() -> Any:
    base = torch.arange(24.0)
    return {"base": base, "part": base[3:9], "matrix": base.view(4, 6).T, "step": base[::2]}


def optimizer(kind: type[torch.optim.Optimizer], **arguments: Any) -> Callable[[], Any]:
    def state() -> Any:
        model, made = trained(kind, **arguments)
        return {"model": model.state_dict(), "optimizer": made.state_dict()}

    return state


STATES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no tensors": lambda: {"a": [1, 2.5, "x", None, (1, 2)], "b": {3: {4: b"5"}}},
    "tied": tied,
    "views": views,
    "module": lambda: trained()[0],
    "parameter": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "adamw": optimizer(torch.optim.AdamW),
    "amsgrad": optimizer(torch.optim.AdamW, amsgrad=True),
    "sgd": optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "empty": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int64)],
    "scalar": lambda: torch.tensor(3.5),
    "ordered": lambda: OrderedDict(z=torch.ones(2), a=OrderedDict(b=torch.zeros(1))),
    "same twice": lambda: [torch.ones(3)] * 2,
    "object": lambda: Config("x", torch.ones(2)),
    "typed storage": lambda: {"s": torch.arange(3.0).storage(), "t": torch.ones(2)},
    "untyped storage": lambda: torch.arange(3.0).untyped_storage(),
    "tensor and its storage": lambda: (lambda t: [t, t.storage()])(torch.arange(4.0)),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "random state": lambda: {"torch": torch.get_rng_state(), "size": torch.Size([2, 3])},
    "meta": lambda: torch.empty(3, device="meta"),
    "dtypes": lambda: {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES},
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STATES)
def test_the_pickle_is_torchs(name: str) -> None:
    state = STATES[name]()
    file = io.BytesIO()
    torch.save(state, file)
    found = pickled(state)
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].split("/")[0]
        assert found.data == archive.read(f"{root}/data.pkl")
        stored = [n for n in archive.namelist() if n.startswith(f"{root}/data/")]
        assert len(stored) == len(found.storages)
        for key, storage in enumerate(found.storages):
            assert bytes(storage.tolist()) == archive.read(f"{root}/data/{key}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tensor_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    (storage,) = pickled([tensor, tensor[1:]]).storages
    assert storage.nbytes() == 3 * dtype.itemsize


def test_memory_seen_as_two_dtypes_is_refused() -> None:
    """As by ``torch.save``, which would give it back as one of them."""
    tensor = torch.ones(4)
    state = [tensor, tensor.view(torch.int32)]
    with pytest.raises(RuntimeError, match="different types"):
        torch.save(state, io.BytesIO())
    with pytest.raises(ValueError, match="clone one of them in on_save_checkpoint"):
        pickled(state)


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(AttributeError, match="local object"):
        pickled({"f": lambda: None})
