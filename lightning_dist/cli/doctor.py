"""``lightning-dist doctor``: what this node and its network can do."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.filesize import decimal
from rich.text import Text

from lightning_dist.base.console import print_table
from lightning_dist.base.features import FEATURES, Feature
from lightning_dist.base.versions import installed_version, versions
from lightning_dist.cli.command import Json, print_json, reported
from lightning_dist.ranks.launch import Launch


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        state: ``"error"``: training will fail or hang. ``"warning"``: it may, or is slow.
            ``"n/a"``: it could not be checked, or there is nothing to check.
        fix: a command or a line to paste, or a sentence where there is none; empty if all is well.
    """

    state: Literal["ok", "warning", "error", "n/a"]
    what: str
    fix: str = ""


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher(environ: Mapping[str, str]) -> Finding:
    """Variables from which ranks find each other."""
    there = [variable for variable in NEEDED if environ.get(variable)]
    missing = [variable for variable in NEEDED if variable not in there]
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
    all_interfaces = []
    for name, stats in psutil.net_if_stats().items():
        reachable = [
            address.address.partition("%")[0]
            for address in addresses.get(name, ())
            if address.family in (socket.AF_INET, socket.AF_INET6)
        ]
        mbit = stats.speed if 0 < stats.speed < 65535 else None  # 65535: unknown, to some drivers
        all_interfaces.append(Interface(name, stats.isup, tuple(reachable), stats.mtu, mbit))
    return all_interfaces


def network(
    environ: Mapping[str, str],
    *,
    found: Sequence[Interface] | None = None,
    hostname: str | None = None,
) -> dict[str, Finding]:
    """Interfaces, the one that gloo uses, and the way to ``MASTER_ADDR``."""
    found = interfaces() if found is None else found
    usable = [interface for interface in found if interface.is_usable]
    way, master = _master(environ, found)
    default = _route("198.51.100.1", found)  # reserved for documents (RFC 5737)
    best = next((interface for interface in (way, default, *usable) if interface in usable), None)
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
    interfaces: Sequence[Interface],
    hostname: str,
    way: Interface | None,
    best: Interface | None,
) -> Finding:
    value = environ.get("GLOO_SOCKET_IFNAME", "")
    fix = f"export GLOO_SOCKET_IFNAME={best.name}" if best else "unset GLOO_SOCKET_IFNAME"
    known = {interface.name: interface for interface in interfaces}
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
    elif bindable := _bindable(hostname):
        using = _with_address(bindable, interfaces)
        address, cause = bindable, f"the hostname {hostname} resolves to it"
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
    environ: Mapping[str, str], interfaces: Sequence[Interface]
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
    way = _route(address, interfaces)
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


def _with_address(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    return next((interface for interface in interfaces if address in interface.addresses), None)


def _bindable(hostname: str) -> str | None:
    """The address that gloo takes: the first of the hostname's that this node has."""
    with suppress(OSError):
        known = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in known:
            with suppress(OSError), socket.socket(family, kind, protocol) as free:
                free.bind(address)
                return str(address[0])
    return None


def _route(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing, and chooses the way
        return _with_address(str(probe.getsockname()[0]), interfaces)
    return None


FILES = 4096
"""Each group has a socket for every peer, and each tensor of a data loader's worker a file."""
ROOM = 1_000_000_000
"""Bytes in shared memory, for data loaders and NCCL; Docker gives 64 MB."""


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


def features() -> dict[str, Finding]:
    """Features that the installed packages serve, by the names that each needs."""
    return {feature.title: _feature(feature) for feature in FEATURES}


def _feature(feature: Feature) -> Finding:
    if not installed_version(feature.package):
        return Finding("n/a", f"{feature.package} is not installed")
    return (
        Finding("ok", "available") if feature.missing is None else Finding("n/a", feature.refusal)
    )


def limits(shared: Path = Path("/dev/shm")) -> dict[str, Finding]:
    """Open files, shared memory."""
    return {"open files": _open_files(), "shared memory": _shared_memory(shared)}


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
        return Finding("warning", f"{what}: data loaders may be killed by SIGBUS", fix)
    if usage.free < ROOM // 10:
        return Finding("warning", what, f"ls -lS {path}  # files left behind")
    return Finding("ok", what)


def machine(environ: Mapping[str, str]) -> dict[str, Finding]:
    """Threads for processors, a compiler for kernels."""
    names, path = ("g++", "clang++"), environ.get("PATH")
    compiler = next(filter(None, (shutil.which(name, path=path) for name in names)), None)
    problem = f"none of {', '.join(names)}: codecs on CPU are not compiled, and slower"
    missing = Finding("warning", problem, "apt-get install g++")
    finding = Finding("ok", compiler) if compiler else missing
    return {"processors": _threads(environ), "compiler": finding}


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
    threads = value.split(",")[0]
    if not threads.isdecimal() or int(threads) < 1:
        return Finding("error", f"OMP_NUM_THREADS must be a number above 0, got {value!r}", fix)
    what = f"{available} for {local} ranks here of {threads} threads (OMP_NUM_THREADS)"
    if int(threads) * local > available:
        return Finding("warning", f"{what}: more threads than processors", fix)
    return Finding("ok", what)


_COLORS = {"ok": "green", "warning": "yellow", "error": "red", "n/a": "dim"}
_RANK = """
import datetime, sys, torch, torch.distributed as dist
from lightning_dist.base.private import destroy_group
rank, store, seconds = sys.argv[1:]
timeout = datetime.timedelta(seconds=float(seconds))
dist.init_process_group("gloo", f"file://{store}", timeout, world_size=2, rank=int(rank))
total = torch.tensor([int(rank) + 1])
dist.all_reduce(total)
assert total.item() == 3, f"1 + 2 was {total.item()}"
destroy_group()
"""


@reported
def doctor(
    as_json: Json = False,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Start two ranks that exchange a tensor.")
    ] = True,
) -> None:
    """Diagnose this environment, and suggest fixes.

    Checks what distributed training needs. Run it on every node with the environment of the
    training: under torchrun, or in the job script. Exit code 1 if there is an error; warnings
    do not change it.

    \b
      lightning-dist doctor
      srun --nodes 4 --ntasks-per-node 1 lightning-dist doctor --json
    """
    ranks = " and starting two ranks" if run else ""
    typer.echo(f"Checking this environment{ranks}; this takes several seconds.", err=True)
    findings = {name: Finding("ok", version) for name, version in versions().items()}
    findings |= {**features(), **devices(), "launcher variables": launcher(os.environ)}
    findings |= {**network(os.environ), **limits(), **machine(os.environ)}
    if run:
        findings["2 ranks here"] = two_ranks(os.environ)
    else:
        findings["2 ranks here"] = Finding("n/a", "skipped by --no-run")
    raise typer.Exit(show(findings, as_json=as_json))


def show(findings: Mapping[str, Finding], *, as_json: bool) -> int:
    """Print the findings by the names of their checks. Exit code of the command."""
    states = [finding.state for finding in findings.values()]
    errors, warnings = states.count("error"), states.count("warning")
    if as_json:
        rows = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        print_json(findings=rows)
        return int(errors > 0)
    cells = [
        (Text(finding.state, _COLORS[finding.state]), name, finding.what)
        for name, finding in findings.items()
    ]
    print_table(("state", "check", "result"), cells, fold=("result",))
    if not errors + warnings:
        typer.echo("\nNo problems.")
        return 0
    typer.echo(f"\nerrors: {errors}, warnings: {warnings}\nSuggested fixes:")
    for name, result in findings.items():  # outside of the table, where no line is folded
        if result.fix:
            typer.echo(f"  # {name}\n  {result.fix}")
    return int(errors > 0)


def two_ranks(environ: Mapping[str, str], *, timeout: float = 60.0) -> Finding:
    """Two processes with these variables form a gloo group and add two numbers."""
    fix = "GLOO_SOCKET_IFNAME=lo lightning-dist doctor  # does it work on loopback?"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(rank), f"{folder}/store", str(timeout / 2)],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for rank in range(2)
        ]
        try:
            for rank, process in enumerate(ranks):
                remaining = max(0.0, begin + timeout - time.monotonic())
                output, _ = process.communicate(timeout=remaining)
                if process.returncode:
                    last = (output.strip() or f"exit code {process.returncode}").splitlines()[-1]
                    return Finding("error", f"rank {rank}: {last}", fix)
        except subprocess.TimeoutExpired:
            return Finding("error", f"no connection between them within {timeout:.0f} s", fix)
        finally:
            for process in ranks:
                with process:
                    process.kill()
    return Finding("ok", f"gloo works; {time.monotonic() - begin:.1f} s")
