"""Checks of this node: features, GPUs, limits, processors, compiler."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil
from rich.filesize import decimal

from lightning_dist.base.features import FEATURES, Feature
from lightning_dist.base.versions import installed_version
from lightning_dist.cli.doctor import Finding

FILES = 4096
"""Each group has a socket for every peer, and each tensor of a data loader's worker a file."""
ROOM = 1_000_000_000
"""Bytes in shared memory, for data loaders and NCCL; Docker gives 64 MB."""


def devices(driver: Path = Path("/proc/driver/nvidia/version")) -> dict[str, Finding]:
    """GPUs, and the libraries through which ranks talk."""
    import torch
    import torch.distributed as dist

    missing = f"torch {torch.__version__} is built without it"
    cuda, nccl, gloo = Finding("n/a", "no GPU"), Finding("n/a", missing), Finding("ok", "available")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        cuda = Finding("ok", f"{torch.version.cuda}; {', '.join(names)}")
    elif driver.exists():
        what = f"an NVIDIA driver is installed, but torch {torch.__version__} finds no GPU"
        torchs = (
            "install a build of torch for this driver (see https://pytorch.org/get-started/locally)"
        )
        cuda = Finding("warning", what, f"{torchs}, or unset CUDA_VISIBLE_DEVICES")
    if dist.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = Finding("ok", ".".join(map(str, version)))
    if not dist.is_gloo_available():
        gloo = Finding("error", missing, "pip install --force-reinstall torch")
    return {"cuda": cuda, "nccl": nccl, "gloo": gloo}


def features() -> dict[str, Finding]:
    """Features that the installed packages serve, by the names that each needs."""
    return {each.title: _feature(each) for each in FEATURES}


def _feature(feature: Feature) -> Finding:
    if not installed_version(feature.package):
        return Finding("n/a", f"{feature.package} is not installed")
    return (
        Finding("ok", "available") if feature.missing is None else Finding("n/a", feature.refusal)
    )


def limits(shared: Path = Path("/dev/shm")) -> dict[str, Finding]:
    """Open files, shared memory."""
    return {"open files": _open_files(), "shared memory": _shared_memory(shared)}


def _open_files() -> Finding:
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited or soft >= FILES:
        return Finding("ok", "unlimited" if soft == unlimited else str(soft))
    what = f"{soft}: many ranks or data loaders run into 'Too many open files'"
    wanted = 1 << 16 if hard == unlimited else min(1 << 16, hard)
    if wanted > soft:
        return Finding("warning", what, f"ulimit -n {wanted}")
    fix = f"echo '* - nofile {1 << 16}' >> /etc/security/limits.conf  # and log in again"
    return Finding("warning", what, fix)


def _shared_memory(path: Path) -> Finding:
    try:
        usage = psutil.disk_usage(str(path))
    except OSError as error:
        return Finding("n/a", f"{path}: {error.strerror}")
    what = f"{path} has {decimal(usage.total)}, {decimal(usage.free)} free"
    if usage.total < ROOM:
        fix = f"mount -o remount,size=8g {path}  # Docker: --shm-size=8g"
        return Finding("warning", f"{what}: data loaders may be killed by SIGBUS", fix)
    if usage.free < ROOM // 10:
        return Finding("warning", what, f"ls -lS {path}  # files left behind")
    return Finding("ok", what)


def machine(environ: Mapping[str, str]) -> dict[str, Finding]:
    """Threads for processors, a compiler for kernels."""
    names, path = ("g++", "clang++"), environ.get("PATH")
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    what = f"none of {', '.join(names)}: codecs on CPU are not compiled, and slower"
    none = Finding("warning", what, "apt-get install g++")
    return {"processors": _threads(environ), "compiler": Finding("ok", found) if found else none}


def processors(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that this process may use, by its affinity and the quota of its container."""
    available = len(psutil.Process().cpu_affinity() or [0])
    try:
        allowed, period = quota.read_text().split()
        return min(available, max(1, int(allowed) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return available


def _threads(environ: Mapping[str, str]) -> Finding:
    available, ranks = processors(), environ.get("LOCAL_WORLD_SIZE", "1")
    local = max(1, int(ranks)) if ranks.isdecimal() else 1
    fix = f"export OMP_NUM_THREADS={max(1, available // local)}"
    if not (value := environ.get("OMP_NUM_THREADS", "")):
        visible = os.cpu_count() or 1
        if local == 1 and available == visible:
            return Finding("ok", f"{available}; OMP_NUM_THREADS is not set, 1 rank uses all")
        what = f"{available}, and each of {local} ranks will use {visible} threads"
        return Finding("warning", f"{what}: OMP_NUM_THREADS is not set", fix)
    each = value.split(",")[0]
    if not each.isdecimal() or int(each) < 1:
        return Finding("error", f"OMP_NUM_THREADS must be a number above 0, got {value!r}", fix)
    what = f"{available} for {local} ranks here of {each} threads (OMP_NUM_THREADS)"
    if int(each) * local > available:
        return Finding("warning", f"{what}: more threads than processors", fix)
    return Finding("ok", what)
