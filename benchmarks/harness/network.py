"""Network namespaces and shaped links, through `ip` and `tc`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

_COMMAND_TIMEOUT_S = 30.0
_BURST_S = 0.010
_MIN_BURST_BYTES = 128 * 1024
_QUEUE_LATENCY_MS = 1000


class CommandFailed(RuntimeError):
    """A command for the network failed; the message holds it and what it printed."""


def missing_requirement() -> str | None:
    """What this machine lacks for network namespaces with shaped links; None: nothing known."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the program `{tool}` is not installed (Debian package iproute2)"
    return None


def run(commands: str) -> str:
    """Run a command, or one in each line, and return what they printed.

    They are out of reach of the terminal's Ctrl-C.
    """
    printed = []
    for command in filter(None, map(str.split, commands.splitlines())):
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
        if result.returncode != 0:
            reason = result.stderr.strip() or f"exit status {result.returncode}"
            raise CommandFailed(f"`{' '.join(command)}`: {reason}")
        printed.append(result.stdout)
    return "".join(printed)


def shape(namespace: str, device: str, *, rate_mbit: float | None) -> None:
    """Limit what the device sends to `rate_mbit` Mbit/s (10^6 bit/s), Ethernet headers included.

    None: no limit. A limit that is already there is replaced.
    """
    discipline = "noqueue"
    if rate_mbit is not None:
        rate_bit = int(rate_mbit * 1e6)
        burst_bytes = max(_MIN_BURST_BYTES, int(rate_bit / 8 * _BURST_S))
        discipline = f"tbf rate {rate_bit}bit burst {burst_bytes}b latency {_QUEUE_LATENCY_MS}ms"
    run(f"tc -n {namespace} qdisc replace dev {device} root {discipline}")


def own_congestion_control() -> str:
    """TCP's congestion control on this machine, in new namespaces too."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def tx_bytes(namespace: str, device: str) -> int:
    """Bytes the device has sent, from its own counter."""
    text = run(f"ip -n {namespace} -j -s link show {device}")
    return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in run("ip netns list").splitlines() if line]


def remove_namespace(name: str) -> None:
    """Kill whatever runs in the namespace, then remove it."""
    for pid in run(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run(f"ip netns del {name}")
