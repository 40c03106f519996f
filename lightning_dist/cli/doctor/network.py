"""Checks of the way to other ranks: a launcher's variables, interfaces, addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from lightning_dist.cli.doctor import Finding
from lightning_dist.ranks.launch import Launch

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher(environ: Mapping[str, str]) -> Finding:
    """Variables from which ranks find each other."""
    there = [each for each in NEEDED if environ.get(each)]
    missing = [each for each in NEEDED if each not in there]
    if not there:
        return Finding("ok", "not set; a launcher sets them")
    if missing == ["RANK", "WORLD_SIZE"]:
        what = "only the rendezvous address is set; Lightning starts the ranks of this node"
        return Finding("ok", what)
    try:
        if missing:
            what = f"{', '.join(there)} without {', '.join(missing)}"
            raise ValueError(f"{what}: ranks wait for each other or fail")
        launch = Launch.from_env(environ)
        size, local_size = launch.world_size, launch.local_world_size
        if not 0 <= launch.rank < size:
            raise ValueError(f"RANK must be below WORLD_SIZE={size}, got {launch.rank}")
        if local_size is not None and not 0 <= launch.local_rank < local_size:
            rule = f"LOCAL_RANK must be below LOCAL_WORLD_SIZE={local_size}"
            raise ValueError(f"{rule}, got {launch.local_rank}")
        if not 0 < launch.master_port < 1 << 16:
            raise ValueError(f"MASTER_PORT must be from 1 to 65535, got {launch.master_port}")
    except ValueError as error:
        return Finding("error", str(error), f"unset {' '.join(there)}")
    return Finding("ok", f"rank {launch.rank} of {size}")


@dataclass(frozen=True)
class Interface:
    """Network interface of this node. ``mbit`` is None where the driver does not tell."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]
    mtu: int
    mbit: int | None

    @property
    def has_address(self) -> bool:
        """Up, with an address."""
        return self.is_up and bool(self.addresses)

    @property
    def is_usable(self) -> bool:
        """Other nodes could be reached through it."""
        return self.has_address and not all(map(_is_loopback, self.addresses))

    def __str__(self) -> str:
        speed = "speed unknown" if self.mbit is None else f"{self.mbit} Mbit/s"
        address = ", ".join(self.addresses) or "no address"
        return f"{self.name} {'up' if self.is_up else 'down'}, {address}, MTU {self.mtu}, {speed}"


def interfaces() -> list[Interface]:
    """Interfaces of this node, in the kernel's order."""
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


def network(
    environ: Mapping[str, str],
    *,
    found: Sequence[Interface] | None = None,
    hostname: str | None = None,
) -> dict[str, Finding]:
    """Interfaces, the one that gloo uses, and the way to ``MASTER_ADDR``."""
    found = interfaces() if found is None else found
    usable = [each for each in found if each.is_usable]
    way, master = _master(environ, found)
    default = _route("198.51.100.1", found)  # reserved for documents (RFC 5737)
    best = next((each for each in (way, default, *usable) if each in usable), None)
    all_usable = Finding("ok", "; ".join(map(str, usable)))
    if not usable:
        what = "no interface but loopback is up with an address: no other node can be reached"
        all_usable = Finding("warning", what, "ip link; ip addr")
    return {
        "interfaces": all_usable,
        "gloo address": _gloo(environ, found, hostname or socket.gethostname(), way, best),
        "MASTER_ADDR": master,
    }


def _gloo(
    environ: Mapping[str, str],
    found: Sequence[Interface],
    hostname: str,
    way: Interface | None,
    best: Interface | None,
) -> Finding:
    value = environ.get("GLOO_SOCKET_IFNAME", "")
    fix = f"export GLOO_SOCKET_IFNAME={best.name}" if best else "unset GLOO_SOCKET_IFNAME"
    known = {each.name: each for each in found}
    if value.startswith(("^", "=")):
        what = f"{value!r}: gloo takes an interface name without {value[0]}, unlike NCCL"
        return Finding("error", what, fix)
    for name in value.split(",") if value else ():
        if name not in known:
            what = f"no interface {name!r}; available: {', '.join(known)}"
            return Finding("error", what, fix)
        if not known[name].has_address:
            return Finding("error", str(known[name]), fix)
    using: Interface | None = None
    if value:
        using = first = known[value.split(",")[0]]
        address, cause = first.addresses[0], f"GLOO_SOCKET_IFNAME={value}"
    elif own := _bindable(hostname):
        using = _with_address(own, found)
        address, cause = own, f"the hostname {hostname} resolves to it"
    else:
        address = "127.0.0.1"
        cause = f"the hostname {hostname} resolves to no address of this node"
    if best is None:
        return Finding("ok", f"{address}, the only network")
    if _is_loopback(address):
        what = f"{address} ({cause}): ranks of other nodes cannot connect"
        return Finding("error" if _has_several_nodes(environ) else "warning", what, fix)
    if not value and using and way and way.is_usable and using != way:
        what = f"{using.name} {address} ({cause}), and MASTER_ADDR is reached through {way.name}"
        return Finding("warning", what, fix)
    return Finding("ok", f"{address} ({cause})")


def _master(
    environ: Mapping[str, str], found: Sequence[Interface]
) -> tuple[Interface | None, Finding]:
    """The interface on the way to ``MASTER_ADDR``; None where it is not known."""
    fix = "export MASTER_ADDR=ADDRESS  # of the node of rank 0, such as 10.0.0.1"
    if not (master := environ.get("MASTER_ADDR")):
        return None, Finding("n/a", "not set; a launcher sets it")
    try:
        address = str(socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return None, Finding("error", f"{master} cannot be resolved: {error.strerror}", fix)
    if _is_loopback(address) and _has_several_nodes(environ):
        what = f"{master} is {address}, which is each node itself"
        return None, Finding("error", what, fix)
    way = _route(address, found)
    if way is None:
        what = f"no route to {master} ({address})"
        return None, Finding("error", what, f"ip route get {address}")
    return way, Finding("ok", f"{master} ({address}) through {way.name}")


def _has_several_nodes(environ: Mapping[str, str]) -> bool:
    with suppress(ValueError):
        launch = Launch.from_env(environ)
        here = launch.local_world_size or launch.world_size
        return launch.nodes > 1 or launch.world_size > here
    return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _with_address(address: str, found: Sequence[Interface]) -> Interface | None:
    return next((each for each in found if address in each.addresses), None)


def _bindable(hostname: str) -> str | None:
    """The address that gloo takes: the first of the hostname's that this node has."""
    with suppress(OSError):
        known = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in known:
            with suppress(OSError), socket.socket(family, kind, protocol) as free:
                free.bind(address)
                return str(address[0])
    return None


def _route(address: str, found: Sequence[Interface]) -> Interface | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, and chooses the way
        return _with_address(str(probe.getsockname()[0]), found)
    return None
