"""Which packages are here, and whether they fit together."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from lightning_dist._version import __version__
from lightning_dist.cli.doctor_finding import Finding

PACKAGES = ("torch", "lightning", "accelerate")
DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> Iterator[Finding]:
    """Python, this package, and those it works with."""
    yield Finding("python", "ok", platform.python_version())
    yield Finding("lightning_dist", "ok", __version__)
    needs = _needs()
    for name in PACKAGES:
        yield version_of(name, needs.get(name))


def version_of(name: str, need: Requirement | None) -> Finding:
    """Whether ``name`` is here in a version that ``need`` allows."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "n/a", "not installed")
    if need is None or need.specifier.contains(found, prereleases=True):
        return Finding(name, "ok", found)
    what = f"{found}, and lightning_dist needs {need.specifier}"
    return Finding(name, "error", what, f"pip install '{name}{need.specifier}'")


def _needs() -> dict[str, Requirement]:
    try:
        lines = metadata.requires("lightning-dist") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return {}
    needs = [Requirement(line) for line in lines]
    return {each.name: each for each in needs if each.specifier}


def devices(driver: Path = DRIVER) -> Iterator[Finding]:
    """GPUs, and the libraries through which ranks talk."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("cuda", "ok", f"{torch.version.cuda}; {', '.join(names)}")
    elif driver.exists():
        what = f"there is an NVIDIA driver, and torch {torch.__version__} sees no GPU"
        remedy = "see https://pytorch.org/get-started/locally"
        fix = f"install a build of torch for this driver ({remedy}), or unset CUDA_VISIBLE_DEVICES"
        yield Finding("cuda", "warning", what, fix)
    else:
        yield Finding("cuda", "n/a", "no GPU")
    if dist.is_nccl_available():
        numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield Finding("nccl", "ok", ".".join(map(str, numbers)))
    else:
        yield Finding("nccl", "n/a", f"torch {torch.__version__} is built without it")
    if dist.is_gloo_available():
        yield Finding("gloo", "ok", "there")
    else:
        what = f"torch {torch.__version__} is built without it"
        yield Finding("gloo", "error", what, "pip install --force-reinstall torch")
