"""Random generators of a process: their states, and seeds for a purpose."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dist.base.accelerator import device_module, is_accelerator


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A seed of 63 bits for one purpose: the same everywhere, and unlike that of any other."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


try:
    import numpy as np
except ImportError:  # torch runs without it
    np = None  # type: ignore[assignment]


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, and of that of an accelerator.

    Plain values and tensors only, so that ``torch.load(weights_only=True)`` reads them.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.random.get_rng_state(),
    }
    if np is not None:
        name, keys, position, has_gauss, cached = np.random.get_state()
        state["numpy"] = [
            name,
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ]
    if (module := _module_of(device)) is not None:
        assert device is not None
        state[device.type] = module.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Go on from what :func:`capture` has returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.random.set_rng_state(state["torch"].cpu())
    if np is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if (module := _module_of(device)) is not None:
        assert device is not None
        if device.type in state:
            module.set_rng_state(state[device.type].cpu(), device)


def hold() -> Callable[[], None]:
    """Function that resets CPU generators to their state now; cheaper than :func:`capture`."""
    of_python, of_torch = random.getstate(), torch.random.get_rng_state()
    of_numpy = None if np is None else np.random.get_state()

    def put_back() -> None:
        random.setstate(of_python)
        torch.random.set_rng_state(of_torch)
        if of_numpy is not None:
            np.random.set_state(of_numpy)

    return put_back


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Give all of them one seed."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if np is not None:
        np.random.seed(seed % 2**32)
    if (module := _module_of(device)) is not None:
        with module.device(device):
            module.manual_seed(seed)


def _module_of(device: torch.device | None) -> Any:
    """Torch's module for an accelerator with a generator of its own; None for others."""
    if device is None or not is_accelerator(device):
        return None
    module = device_module(device)
    return module if hasattr(module, "get_rng_state") else None


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Inside, generators on the CPU have this seed; outside, nothing has happened."""
    put_back = hold()
    seed_all(seed)
    try:
        yield
    finally:
        put_back()
