"""Processors, compiler, and the folder for results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.filesize import decimal

from lightning_dist.cli.doctor_finding import Finding

COMPILERS = ("g++", "clang++")
ROOM = 1_000_000_000
"""Bytes that checkpoints and logs may well need."""


def machine(
    environ: Mapping[str, str], folder: Path, *, quota: Path = Path("/sys/fs/cgroup/cpu.max")
) -> Iterator[Finding]:
    """Threads for processors, a compiler for kernels, a place for results."""
    yield _threads(environ, quota)
    yield _compiler(environ.get("PATH"))
    yield _folder(folder)


def processors(quota: Path) -> int:
    """That this process may use, by its affinity and by the quota of its container."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        allowed, period = quota.read_text().split()
        available = min(available or 1, max(1, int(allowed) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        pass
    return available or 1


def _threads(environ: Mapping[str, str], quota: Path) -> Finding:
    name, available = "processors", processors(quota)
    value, ranks = environ.get("OMP_NUM_THREADS", ""), environ.get("LOCAL_WORLD_SIZE", "1")
    local = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    fix = f"export OMP_NUM_THREADS={max(1, available // local)}"
    if not value:
        visible = os.cpu_count() or 1
        if local > 1 or available < visible:
            what = f"{available}, and each of {local} ranks will use {visible} threads"
            return Finding(name, "warning", f"{what}: OMP_NUM_THREADS is not set", fix)
        return Finding(name, "ok", f"{available}; OMP_NUM_THREADS is not set, 1 rank uses all")
    first = value.split(",")[0]
    if not first.isdecimal() or int(first) < 1:
        what = f"OMP_NUM_THREADS must be a number above 0, it is {value!r}"
        return Finding(name, "error", what, fix)
    what = f"{available} for {local} ranks here of {first} threads (OMP_NUM_THREADS)"
    if int(first) * local > available:
        return Finding(name, "warning", f"{what}: they take turns", fix)
    return Finding(name, "ok", what)


def _compiler(path: str | None) -> Finding:
    found = next((there for each in COMPILERS if (there := shutil.which(each, path=path))), None)
    if found is not None:
        return Finding("compiler", "ok", found)
    what = f"none of {', '.join(COMPILERS)}: codecs on CPU are not compiled, and slower"
    return Finding("compiler", "warning", what, "apt-get install g++")


def _folder(folder: Path) -> Finding:
    name = "results"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        what = f"{folder} cannot be written to: {error.strerror}"
        return Finding(name, "error", what, f"chown $(id -u) {folder}  # or another --folder")
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        return Finding(name, "warning", f"{folder} has {decimal(free)} free", f"du -sh {folder}/*")
    return Finding(name, "ok", f"{folder}, {decimal(free)} free")
