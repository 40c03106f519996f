"""Which versions a run was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_dist._version import __version__


def versions() -> dict[str, str]:
    """Of this package, torch, Python, and the frameworks that are installed."""
    found = {
        "lightning_dist": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    for name in ("lightning", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
