"""Checks of this host: packages, GPUs, clocks, limits, processors, compiler, disk."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.filesize import decimal

from lightning_dist._version import __version__
from lightning_dist.cli.doctor import Finding

CLOCK = Path("/sys/devices/system/clocksource/clocksource0")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
FILES = 4096
"""Each group has a socket for every peer, and each tensor of a data loader's worker a file."""
ROOM = 1_000_000_000
"""Bytes in shared memory, for data loaders and NCCL (Docker gives 64 MB), and on disk."""


def versions() -> dict[str, Finding]:
    """Python, this package, and those it works with."""
    try:
        requirements = list(map(Requirement, metadata.requires("lightning-dist") or []))
    except metadata.PackageNotFoundError:  # run from its sources
        requirements = []
    needs = {each.name: each for each in requirements if each.specifier}
    return {
        "python": Finding("ok", platform.python_version()),
        "lightning_dist": Finding("ok", __version__),
        **{
            name: version_of(name, needs.get(name)) for name in ("torch", "lightning", "accelerate")
        },
    }


def version_of(name: str, need: Requirement | None) -> Finding:
    """Installed version of ``name``, and whether ``need`` allows it."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("n/a", "not installed")
    if need is None or need.specifier.contains(version, prereleases=True):
        return Finding("ok", version)
    what = f"{version}; lightning_dist requires {need.specifier}"
    return Finding("error", what, f"pip install '{name}{need.specifier}'")


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


def clocks(folder: Path = CLOCK) -> dict[str, Finding]:
    """Source and resolution of time stamps, and whether other hosts have the same time."""
    # The shortest of many, because this process may be interrupted at any of them.
    stamps = sorted({time.monotonic_ns() for _ in range(1000)})
    shortest = min((after - before for before, after in pairwise(stamps)), default=0)
    finest = max(time.get_clock_info("monotonic").resolution * 1e9, shortest)
    time_stamps = Finding("ok", f"{finest:.0f} ns apart")
    if finest > 1000:
        what = f"{finest:.0f} ns apart at best: this limits the resolution of profiles"
        time_stamps = Finding("warning", what, f"cat {CLOCK}/available_clocksource")

    adjust = getattr(ctypes.CDLL(None), "adjtimex", lambda timex: -1)
    state = adjust(ctypes.create_string_buffer(512))  # struct timex, all 0: change nothing
    time_of_day = Finding("ok", "synchronised")
    if state == 5:  # TIME_ERROR of adjtimex(2)
        what = "not synchronised: logs of several hosts do not line up"
        time_of_day = Finding("warning", what, "timedatectl set-ntp true")
    elif state < 0:
        time_of_day = Finding("n/a", "this system does not report it")
    source = _clock_source(folder)
    return {"clock source": source, "time of day": time_of_day, "time stamps": time_stamps}


def _clock_source(folder: Path) -> Finding:
    try:
        current = (folder / "current_clocksource").read_text().strip()
        available = (folder / "available_clocksource").read_text().split()
    except OSError:
        return Finding("n/a", f"{folder} cannot be read")
    if current not in SLOW_CLOCKS:
        return Finding("ok", current)
    what = f"{current}: reading it takes microseconds, in every GPU operation"
    for faster in available:
        if faster not in SLOW_CLOCKS:
            return Finding("warning", what, f"echo {faster} > {folder}/current_clocksource")
    return Finding(
        "warning", what, "dmesg | grep -i clocksource  # why the faster one was given up"
    )


def limits(
    shared: Path = Path("/dev/shm"), infiniband: Path = Path("/sys/class/infiniband")
) -> dict[str, Finding]:
    """Open files, shared memory, locked memory."""
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = Finding("ok", "unlimited")
    if not any(infiniband.glob("*")):
        locked = Finding("n/a", "needed for InfiniBand only")
    elif locked_bytes != resource.RLIM_INFINITY:
        what = f"{decimal(locked_bytes)}: InfiniBand cannot register its buffers"
        locked = Finding("error", what, "ulimit -l unlimited")
    files, memory = _open_files(), _shared_memory(shared)
    return {"open files": files, "shared memory": memory, "locked memory": locked}


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
        return Finding("warning", f"{what}: data loaders die of SIGBUS", fix)
    if usage.free < ROOM // 10:
        return Finding("warning", what, f"ls -lS {path}  # files left behind")
    return Finding("ok", what)


def machine(environ: Mapping[str, str], folder: Path) -> dict[str, Finding]:
    """Threads for processors, a compiler for kernels, a place for results."""
    names, path = ("g++", "clang++"), environ.get("PATH")
    found = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    what = f"none of {', '.join(names)}: codecs on CPU are not compiled, and slower"
    none = Finding("warning", what, "apt-get install g++")
    return {
        "processors": _threads(environ),
        "compiler": Finding("ok", found) if found else none,
        "results": _results(folder),
    }


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
        return Finding("error", f"OMP_NUM_THREADS must be a number above 0, it is {value!r}", fix)
    what = f"{available} for {local} ranks here of {each} threads (OMP_NUM_THREADS)"
    if int(each) * local > available:
        return Finding("warning", f"{what}: more threads than processors", fix)
    return Finding("ok", what)


def _results(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        what = f"{folder} cannot be written to: {error.strerror}"
        return Finding("error", what, f"chown $(id -u) {folder}  # or another --folder")
    free = psutil.disk_usage(str(folder)).free
    if free < ROOM:
        return Finding("warning", f"{folder} has {decimal(free)} free", f"du -sh {folder}/*")
    return Finding("ok", f"{folder}, {decimal(free)} free")
