"""Versions of this package and of those it works with, from their metadata: nothing is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from lightning_dist._version import __version__

FRAMEWORKS = ("lightning", "accelerate")


def versions(packages: Iterable[str] = FRAMEWORKS) -> dict[str, str]:
    """Versions of this package, torch, Python, and those of ``packages`` that are installed."""
    own = {"lightning_dist": __version__, "torch": installed_version("torch")}
    others = {name: installed_version(name) for name in packages}
    found = {**own, "python": platform.python_version(), **others}
    return {name: version for name, version in found.items() if version}


def installed_version(package: str) -> str:
    """Version of a package, from its metadata; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` of ``"2.13.0a0+5228986.nv26.07"``; empty for what is no version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return () if found is None else tuple(map(int, found[0].split(".")))
