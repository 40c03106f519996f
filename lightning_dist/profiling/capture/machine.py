"""Which processes read the same clock."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME = Path("/proc/self/ns/time")


def this_machine() -> str:
    """The same for two processes only if their monotonic clocks are one.

    Name of the host, start of its kernel, and time namespace; a network namespace makes no
    difference. Where the kernel does not tell when it has started, every process counts for itself.
    """
    boot, zone = f"process {os.getpid()}", ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    with suppress(OSError):  # kernels before 5.6 have one time for all
        zone = os.readlink(_TIME)
    return f"{socket.gethostname()} {boot} {zone}"
