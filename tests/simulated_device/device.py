"""Accelerator that is simulated on the CPU, as the device type ``sim`` of torch.

``install()`` builds the extension in ``csrc/`` where that has not been done on this machine, and
registers it; what it simulates is in README.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "sim"
_FLAGS = ["-O0", "-fPIC", "-std=c++20", "-Wno-interference-size", "-DUSE_C10D_GLOO"]
_FLAGS += ["-DTORCH_EXTENSION_NAME=simulated_device"]
_SOURCES = sorted((Path(__file__).parent / "csrc").iterdir())


def can_build() -> bool:
    """Whether there is a compiler."""
    return shutil.which("g++") is not None


@cache
def install() -> Any:
    """The module of the device, ``torch.sim``; built, loaded and registered once."""
    extension = _load(build())
    module = _module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _module(extension: Any) -> ModuleType:
    """What of ``torch.cuda`` is used of a device, for this one."""
    module = ModuleType(f"torch.{NAME}")

    def index(device: Any = None) -> int:
        if device is None:
            return int(extension.current_device())
        found = device if isinstance(device, int) else torch.device(device).index
        return int(extension.current_device()) if found is None else found

    class Stream(torch.Stream):
        """As ``torch.cuda.Stream``: from a pool of few, and of another one with priority."""

        def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
            made = torch.Stream.__new__(cls, torch.device(NAME, index(device)), priority=priority)
            return made

    def event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        return torch.Event(torch.device(NAME), enable_timing=enable_timing, blocking=blocking)

    module.Stream, module.Event = Stream, event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(
        torch.device(NAME, index(device))
    )
    module.stream = lambda stream: stream  # torch.Stream is a context manager
    module.synchronize = lambda device=None: extension.synchronize(index(device))
    module.is_available = lambda: True
    module.device_count = lambda: extension.DEVICES
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index(device))
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.extension = extension
    for name in (
        *("process_group", "reconfigurable_process_group", "set_delays", "written_after_free"),
    ):
        setattr(module, name, getattr(extension, name))
    for name in ("counters", "reset_counters", "drain", "hold"):
        setattr(module, name, lambda device=None, of=name: getattr(extension, of)(index(device)))
    return module


def register_backend(device: int = 0) -> str:
    """Backend ``simulated``, of groups whose ranks may change, for processes with one device each.

    Returns:
        A default process group's backends.
    """
    from torch.distributed import Backend, HashStore, PrefixStore
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    sim = install()

    def connected(store: Any, rank: int, size: int) -> Any:
        options: Any = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._threads, options._timeout = 2, timedelta(seconds=20)
        return ProcessGroupGloo(store, rank, size, options)

    def create(given: Any, _: Any = None) -> Any:
        if not given.enable_reconfigure:
            gloo = connected(given.store, given.group_rank, given.group_size)
            return sim.process_group(gloo, device)
        return sim.reconfigurable_process_group(
            connected(HashStore(), 0, 1),
            device,
            given.group_rank,
            lambda uuid, rank, size: connected(PrefixStore(f"{uuid}", given.store), rank, size),
        )

    Backend.register_backend("simulated", create, extended_api=True, devices=[NAME])
    return f"cpu:gloo,{NAME}:simulated"


def build() -> Path:
    """Where the extension is, built if need be: half a minute."""
    digest = hashlib.sha256(f"{torch.__version__} {_FLAGS}".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_dist_tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"simulated_device-{digest.hexdigest()[:16]}.so"
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    # Not torch.utils.cpp_extension.load: it needs ninja.
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_path("include")]
    flags = [*_FLAGS, *(f"-I{folder}" for folder in folders)]
    torch_libraries = [f"-L{folder}" for folder in library_paths()]
    torch_libraries += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    ready = library.with_suffix(".building")
    command = ["g++", "-shared", *flags, "-x", "c++", "-", *torch_libraries, "-o", str(ready)]
    # All sources at once: torch's headers take most of the time.
    sources = (f'#include "{each}"\n' for each in _SOURCES if each.suffix == ".cpp")
    done = subprocess.run(command, input="".join(sources), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    ready.rename(library)


def _load(library: Path) -> ModuleType:
    import torch.distributed  # its classes are bases of ours

    assert torch.distributed.is_available()
    spec = importlib.util.spec_from_file_location("simulated_device", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
