"""Versions of this package and of those it works with, from their metadata: nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from lightning_dist._version import __version__

FRAMEWORKS = ("lightning", "accelerate")


def versions(packages: Iterable[str] = FRAMEWORKS) -> dict[str, str]:
    """Versions of this package, torch, Python, and those of ``packages`` that are installed."""
    found = {"lightning_dist": __version__}
    for name in ("torch", "python", *packages):
        try:
            found[name] = platform.python_version() if name == "python" else version(name)
        except PackageNotFoundError:
            continue
    return found
