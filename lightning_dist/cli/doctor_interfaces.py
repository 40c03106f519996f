"""Network interfaces of this host, and the variables that choose among them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from lightning_dist.cli.doctor_finding import Finding

SLOW_MBIT = 1000
"""A wired network of today is not slower."""


@dataclass(frozen=True)
class Interface:
    """One of this host. ``mbit`` is None where the driver does not tell."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]
    mtu: int
    mbit: int | None

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(map(is_loopback, self.addresses))

    @property
    def usable(self) -> bool:
        """Other hosts could be reached through it."""
        return self.is_up and bool(self.addresses) and not self.is_loopback

    def __str__(self) -> str:
        speed = "speed not told" if self.mbit is None else f"{self.mbit} Mbit/s"
        address = ", ".join(self.addresses) or "no address"
        state = "up" if self.is_up else "down"
        return f"{self.name} {state}, {address}, MTU {self.mtu}, {speed}"


def interfaces() -> list[Interface]:
    """All of this host, in the kernel's order."""
    addresses = psutil.net_if_addrs()
    found = []
    for name, stats in psutil.net_if_stats().items():
        own = [
            each.address.partition("%")[0]
            for each in addresses.get(name, ())
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        mbit = stats.speed if 0 < stats.speed < 65535 else None  # 65535: unknown, to some drivers
        found.append(Interface(name, stats.isup, tuple(own), stats.mtu, mbit))
    return found


def is_loopback(address: str) -> bool:
    """Whether ``address`` never leaves this host."""
    return ipaddress.ip_address(address).is_loopback


def named(
    environ: Mapping[str, str], found: Sequence[Interface], *, best: Interface | None
) -> Iterator[Finding]:
    """All interfaces, and whether those that were chosen are among them.

    Args:
        best: the one to choose, if there is one.
    """
    ways = [each for each in found if each.usable]
    if ways:
        yield Finding("interfaces", "ok", "; ".join(map(str, ways)))
    else:
        what = "none but loopback is up with an address: this host reaches no other one"
        yield Finding("interfaces", "warning", what, "ip link; ip addr")
    for each in ways:
        if each.mbit is not None and each.mbit < SLOW_MBIT:
            what = f"{each.name} runs at {each.mbit} Mbit/s"
            yield Finding("link speed", "warning", what, f"ethtool {each.name}  # cable, switch")
    yield _of_gloo(environ.get("GLOO_SOCKET_IFNAME"), found, best)
    yield _of_nccl(environ.get("NCCL_SOCKET_IFNAME"), found, best)


def _of_gloo(value: str | None, found: Sequence[Interface], best: Interface | None) -> Finding:
    name = "GLOO_SOCKET_IFNAME"
    if not value:
        return Finding(name, "ok", "not set")
    known = {each.name: each for each in found}
    fix = _choose(name, best)
    if value.startswith(("^", "=")):
        what = f"{value!r}: gloo takes the name of an interface, and no {value[0]} as NCCL does"
        return Finding(name, "error", what, fix)
    for each in value.split(","):
        if each not in known:
            there = ", ".join(known)
            return Finding(name, "error", f"there is no interface {each!r}, only {there}", fix)
        if not (known[each].is_up and known[each].addresses):
            return Finding(name, "error", f"{known[each]}", fix)
    return Finding(name, "ok", value)


def _of_nccl(value: str | None, found: Sequence[Interface], best: Interface | None) -> Finding:
    name = "NCCL_SOCKET_IFNAME"
    if not value:
        return Finding(name, "ok", "not set")
    excluding, exact = value.startswith("^"), value.removeprefix("^").startswith("=")
    words = value.removeprefix("^").removeprefix("=").split(",")

    def matches(interface: Interface) -> bool:
        if exact:
            return interface.name in words
        return any(interface.name.startswith(word) for word in words)

    left = [each for each in found if each.is_up and each.addresses]
    left = [each for each in left if matches(each) != excluding]
    if left:
        return Finding(name, "ok", f"{value}: {', '.join(each.name for each in left)}")
    there = ", ".join(each.name for each in found if each.is_up and each.addresses)
    what = f"{value!r} leaves no interface; up, with an address, are {there}"
    return Finding(name, "error", what, _choose(name, best))


def _choose(variable: str, best: Interface | None) -> str:
    return f"unset {variable}" if best is None else f"export {variable}={best.name}"
