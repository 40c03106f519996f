"""What this process may use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from lightning_dist.cli.doctor_finding import Finding

FILES = 4096
"""Each group has a socket for every peer, and each tensor of a data loader's worker a file."""
SHARED = 1_000_000_000
"""Bytes: batches of data loaders, and what NCCL exchanges inside a host. Docker gives 64 MB."""


def limits(
    shared: Path = Path("/dev/shm"), infiniband: Path = Path("/sys/class/infiniband")
) -> Iterator[Finding]:
    """Open files, shared memory, locked memory."""
    yield _files()
    yield _shared(shared)
    yield _locked(infiniband)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return Finding("open files", "ok", _number(soft))
    wanted = 1 << 16
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    what = f"{soft}: many ranks or data loaders run into 'Too many open files'"
    if wanted <= soft:
        fix = f"echo '* - nofile {1 << 16}' >> /etc/security/limits.conf  # and log in again"
        return Finding("open files", "warning", what, fix)
    return Finding("open files", "warning", what, f"ulimit -n {wanted}")


def _shared(path: Path) -> Finding:
    name = "shared memory"
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Finding(name, "n/a", f"{path}: {error.strerror}")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    what = f"{path} has {decimal(total)}, {decimal(free)} free"
    if total < SHARED:
        fix = f"mount -o remount,size=8g {path}  # Docker: --shm-size=8g"
        return Finding(name, "warning", f"{what}: data loaders die of SIGBUS", fix)
    if free < SHARED // 10:
        return Finding(name, "warning", what, f"ls -lS {path}  # left by whom?")
    return Finding(name, "ok", what)


def _locked(infiniband: Path) -> Finding:
    name = "locked memory"
    if not infiniband.is_dir() or not any(infiniband.iterdir()):
        return Finding(name, "n/a", "no InfiniBand, which alone needs it")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "ok", "unlimited")
    what = f"{decimal(soft)}: InfiniBand cannot register its buffers"
    return Finding(name, "error", what, "ulimit -l unlimited")


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
