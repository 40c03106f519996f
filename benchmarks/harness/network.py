"""Network namespaces and their links, through `ip` and `tc`."""

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


def run(*command: str) -> str:
    """Run one command, out of reach of the terminal's Ctrl-C, and return what it printed."""
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
    return result.stdout


def add_namespace(name: str) -> None:
    """A namespace with its loopback up."""
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


def add_bridge(namespace: str, name: str) -> None:
    """A bridge that sends nothing of its own."""
    quiet = ["stp_state", "0", "mcast_snooping", "0"]
    run("ip", "-n", namespace, "link", "add", name, "type", "bridge", *quiet)
    set_up(namespace, name)


def add_veth(namespace: str, name: str, *, peer_namespace: str, peer_name: str) -> None:
    """A veth pair between two namespaces; it never touches the root namespace. Both ends down."""
    end = ["ip", "link", "add", name, "netns", namespace]
    run(*end, "type", "veth", "peer", "name", peer_name, "netns", peer_namespace)


def set_up(namespace: str, device: str) -> None:
    """Up, without the IPv6 link-local chatter that would show in the counters."""
    run("ip", "-n", namespace, "link", "set", device, "addrgenmode", "none", "up")


def shape(namespace: str, device: str, *, rate_mbit: float | None) -> None:
    """Limit what the device sends to `rate_mbit` Mbit/s (10^6 bit/s), Ethernet headers included.

    None: no limit. A limit that is already there is replaced.
    """
    replace = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"]
    if rate_mbit is None:
        run(*replace, "noqueue")
        return
    rate_bit = int(rate_mbit * 1e6)
    burst_bytes = max(_MIN_BURST_BYTES, int(rate_bit / 8 * _BURST_S))
    limits = ["rate", f"{rate_bit}bit", "burst", f"{burst_bytes}b"]
    queue = ["latency", f"{_QUEUE_LATENCY_MS}ms"]
    run(*replace, "tbf", *limits, *queue)


def set_congestion_control(
    namespace: str, device: str, *, subnet: str, address: str, name: str
) -> None:
    """Let TCP connections through the device, whose own ``address`` is in ``subnet``, use it.

    Connections that exist keep theirs. The kernel may forbid to set it for a namespace, not for a
    route.
    """
    route = ["route", "change", subnet, "dev", device, "proto", "kernel", "scope", "link"]
    run("ip", "-n", namespace, *route, "src", address, "congctl", name)


def own_congestion_control() -> str:
    """The one that TCP uses on this machine, in new namespaces too."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def tx_bytes(namespace: str, device: str) -> int:
    """Bytes the device has sent, from its own counter."""
    text = run("ip", "-n", namespace, "-j", "-s", "link", "show", device)
    return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


def namespaces() -> list[str]:
    """The names of all network namespaces of this machine."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]


def remove_namespace(name: str) -> None:
    """Kill whatever runs in the namespace, then remove it."""
    for pid in run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", name)
