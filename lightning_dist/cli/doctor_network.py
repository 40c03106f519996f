"""Which address ranks will have, and how they reach the one that they meet at."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence

from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_interfaces import Interface, interfaces, is_loopback, named
from lightning_dist.cli.doctor_launcher import several_hosts

ANYWHERE = "198.51.100.1"
"""Reserved for documents (RFC 5737): which route would be taken to nowhere in particular."""

ADDRESS = "export MASTER_ADDR=ADDRESS  # of the host of rank 0, such as 10.0.0.1"


def network(
    environ: Mapping[str, str],
    *,
    found: Sequence[Interface] | None = None,
    hostname: str | None = None,
) -> Iterator[Finding]:
    """Interfaces, gloo's address, and the way to ``MASTER_ADDR``."""
    found = interfaces() if found is None else found
    way, finding = _to_master(environ, found)
    best = _best(way, found)
    yield from named(environ, found, best=best)
    yield _of_gloo(environ, found, hostname or socket.gethostname(), way=way, best=best)
    yield finding


def _best(way: Interface | None, found: Sequence[Interface]) -> Interface | None:
    """The interface for ranks to use: on the way to where they meet, or else to anywhere."""
    ways = [way, _route(ANYWHERE, found), *found]
    return next((each for each in ways if each is not None and each.usable), None)


def _of_gloo(
    environ: Mapping[str, str],
    found: Sequence[Interface],
    hostname: str,
    *,
    way: Interface | None,
    best: Interface | None,
) -> Finding:
    name, chosen = "gloo address", environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
        using = next((each for each in found if each.name == chosen.split(",")[0]), None)
        if using is None or not using.addresses:
            return Finding(name, "n/a", "GLOO_SOCKET_IFNAME is wrong")
        address, cause = using.addresses[0], f"GLOO_SOCKET_IFNAME={chosen}"
    elif own := _bindable(hostname):
        using = next((each for each in found if own in each.addresses), None)
        address, cause = own, f"the hostname {hostname} resolves to it"
    else:
        using, address = None, "127.0.0.1"
        cause = f"the hostname {hostname} resolves to no address of this host"
    if best is None:
        return Finding(name, "ok", f"{address}, and there is no other network")
    fix = f"export GLOO_SOCKET_IFNAME={best.name}"
    if is_loopback(address):
        what = f"{address} ({cause}): ranks of several hosts will not find each other"
        return Finding(name, "error" if several_hosts(environ) else "warning", what, fix)
    if not chosen and way is not None and way.usable and using is not None and using != way:
        what = f"{using.name} {address} ({cause}), and MASTER_ADDR is reached through {way.name}"
        return Finding(name, "warning", what, fix)
    return Finding(name, "ok", f"{address} ({cause})")


def _bindable(hostname: str) -> str | None:
    """The address that gloo takes: the first of the host's name that is one of this host."""
    try:
        known = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in known:
        try:
            with socket.socket(family, kind, protocol) as free:
                free.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def _to_master(
    environ: Mapping[str, str], found: Sequence[Interface]
) -> tuple[Interface | None, Finding]:
    """The interface on the way to ``MASTER_ADDR``; None where that cannot be said."""
    name, master = "MASTER_ADDR", environ.get("MASTER_ADDR", "")
    if not master:
        return None, Finding(name, "n/a", "not set; a launcher sets it")
    try:
        address = str(socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        what = f"{master} cannot be resolved: {error.strerror}"
        return None, Finding(name, "error", what, ADDRESS)
    if is_loopback(address) and several_hosts(environ):
        what = f"{master} is {address}, which is another host on every host"
        return None, Finding(name, "error", what, ADDRESS)
    way = _route(address, found)
    if way is None:
        what = f"there is no route to {master} ({address})"
        return None, Finding(name, "error", what, f"ip route get {address}")
    return way, Finding(name, "ok", f"{master} ({address}) through {way.name}")


def _route(address: str, found: Sequence[Interface]) -> Interface | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, and chooses the way
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return next((each for each in found if own in each.addresses), None)
