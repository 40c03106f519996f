"""Several hosts on one machine: network namespaces, joined by a bridge, with a limited link each.

    host0 [eth0]====[h0]  switch  [h1]====[eth0] host1        ==== a veth pair, tc tbf on both ends

Every namespace has a name of its own (pid and a random suffix) and nothing is created in the root
namespace. What one host sends to another passes its `eth0`, is shaped there, and is counted by the
interface. Ranks on one host reach each other over the loopback of their namespace, which is neither
shaped nor counted. No latency is added: a link here is slow, not far.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness.launch import Layout, RankFunction, RankGroup, rank_command

INTERFACE = "eth0"
_PREFIX = "ldist"
_FIRST_PORT = 29500
_SUBNET = "10.77.0.0/24"
_COMMAND_TIMEOUT_S = 30.0
_BURST_S = 0.010
_BURST_MBIT = 105.0
"""Least rate whose bytes of that time pass at once: 128 KiB in 10 ms."""
_QUEUE_LATENCY_MS = 1000


class TestbedUnavailable(RuntimeError):
    """This machine cannot hold the test-bed; the message says what is missing."""

    __test__ = False  # pytest takes every class called Test... for a test


class CommandFailed(RuntimeError):
    """A command for the network failed; the message holds it and what it printed."""


class Testbed:
    """A context manager: `hosts` network namespaces joined by a switch.

    link_mbit: rate of each host's link in each direction, in Mbit/s (10^6 bit/s); None: not shaped.
    congestion_control: of TCP between hosts, such as "cubic"; None: the machine's own.
    burst_s: seconds of its rate that a link passes at once after a pause; little of it makes the
    rate exact where ranks send, compute and send again, and takes more of the machine.

    Raises `TestbedUnavailable` on entry where root, `ip`, `tc` or the kernel's support is missing.
    On exit, also by an exception, SIGINT, SIGTERM or SIGHUP, every process in the namespaces is
    killed and the namespaces are removed. What is left behind is removed by the next entry.
    """

    __test__ = False

    def __init__(
        self,
        hosts: int = 2,
        *,
        link_mbit: float | None = 200.0,
        congestion_control: str | None = None,
        burst_s: float = _BURST_S,
    ) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"hosts must be between 1 and 200, got {hosts}")
        if link_mbit is not None and not 1 <= link_mbit <= 10_000:
            raise ValueError(f"link_mbit must be 1 to 10000 Mbit/s, or None, got {link_mbit}")
        self.hosts = hosts
        self.link_mbit = link_mbit
        self.congestion_control, self._burst_s = congestion_control, burst_s
        self._name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{self._name}-sw"
        self._stack = contextlib.ExitStack()
        self._groups: list[RankGroup] = []
        self._output_root = Path()

    def __enter__(self) -> Testbed:
        with contextlib.ExitStack() as stack:
            stack.enter_context(exit_on_signals())
            self._output_root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                for name in _namespaces(rf"{_PREFIX}-(\d+)-"):  # of test-beds that were killed
                    if not Path(f"/proc/{name.split('-')[1]}").exists():
                        with contextlib.suppress(CommandFailed):  # another may be faster
                            _remove_namespace(name)
                stack.callback(self._remove)
                self._create_network()
            except CommandFailed as error:
                why = f"no test-bed on this machine, which takes root and iproute2: {error}"
                raise TestbedUnavailable(why) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def address(self, host: int) -> str:
        """The IPv4 address of a host's link."""
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._name}-h{host}"

    @property
    def shaped(self) -> list[tuple[str, str]]:
        """Namespace and device of both ends of every link; a rank may shape them too."""
        hosts = range(self.hosts)
        return [
            *((self._switch, f"h{host}") for host in hosts),
            *((self.namespace(host), INTERFACE) for host in hosts),
        ]

    def set_link(self, link_mbit: float | None) -> None:
        """Change the rate of all links, in Mbit/s, while ranks run; None: not shaped."""
        for namespace, device in self.shaped:
            shape(namespace, device, rate_mbit=link_mbit, burst_s=self._burst_s)
        self.link_mbit = link_mbit

    def tx_bytes(self, host: int) -> int:
        """Bytes this host has sent over its link, from the interface's own counter.

        Headers and acknowledgements count; a segment the kernel hands over unsplit (GSO, up to
        64 KB) counts one header. The shaper charges every 1,514-byte frame, so that TCP payload can
        reach 1448 / 1514 = 95.6 % of the rate.
        """
        text = _run(f"ip -n {self.namespace(host)} -j -s link show {INTERFACE}")
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])

    def start(self, argv: Sequence[str], *, ranks_per_host: int | Sequence[int] = 1) -> RankGroup:
        """Start `argv` once per rank with torchrun's environment variables; does not wait.

        ranks_per_host: one number for all hosts, or one for each.
        """
        each = ranks_per_host
        counts = (each,) * self.hosts if isinstance(each, int) else tuple(each)
        assert len(counts) == self.hosts, counts
        launch = len(self._groups)
        group = RankGroup(
            argv,
            self._output_root / f"launch{launch}",
            layout=Layout(counts),
            port=_FIRST_PORT + launch,
            interface=INTERFACE,
            address=self.address(0),
            prefix=lambda host: ("ip", "netns", "exec", self.namespace(host)),
        )
        self._groups.append(group)
        return group

    def launch(
        self,
        argv: Sequence[str],
        *,
        ranks_per_host: int | Sequence[int] = 1,
        timeout_s: float = 300.0,
    ) -> list[str]:
        """Run `argv` once per rank and return what each rank printed.

        Raises `RankFailed` when a rank exits with an error, and after `timeout_s` seconds; all
        ranks are killed then.
        """
        return self.start(argv, ranks_per_host=ranks_per_host).wait(timeout_s=timeout_s)

    def run(
        self,
        function: RankFunction,
        *,
        ranks_per_host: int | Sequence[int] = 1,
        timeout_s: float = 300.0,
        echo: bool = True,
        on_result: Callable[[Any], None] = lambda result: None,
        **settings: Any,
    ) -> list[list[Any]]:
        """Call a function on every rank, in a gloo group, and return what each has yielded.

        on_result: called with each result of rank 0 when it comes.
        """
        group = self.start(rank_command(function, settings), ranks_per_host=ranks_per_host)
        group.wait(timeout_s=timeout_s, echo=echo, on_result=on_result)
        return group.results()

    def _create_network(self) -> None:
        # Without an address of IPv6, whose link-local chatter would show in the counters.
        switch, up = self._switch, "addrgenmode none up"
        _run(f"""
            ip netns add {switch}
            ip -n {switch} link add br0 type bridge stp_state 0 mcast_snooping 0
            ip -n {switch} link set br0 {up}""")
        for host in range(self.hosts):
            name, port, address = self.namespace(host), f"h{host}", self.address(host)
            _run(f"""
                ip netns add {name}
                ip -n {name} link set lo up
                ip link add {port} netns {switch} type veth peer name {INTERFACE} netns {name}
                ip -n {switch} link set {port} master br0
                ip -n {name} addr add {address}/24 dev {INTERFACE}
                ip -n {switch} link set {port} {up}
                ip -n {name} link set {INTERFACE} {up}""")
            if self.congestion_control is not None:  # some kernels allow it for a route only
                _run(
                    f"ip -n {name} route change {_SUBNET} dev {INTERFACE} proto kernel scope link "
                    f"src {address} congctl {self.congestion_control}"
                )
        self.set_link(self.link_mbit)

    def _remove(self) -> None:
        for group in self._groups:
            group.kill()
        for name in _namespaces(f"{self._name}-"):
            _remove_namespace(name)


def _run(commands: str) -> str:
    """Run a command, or one in each line, and return what they printed.

    They are out of reach of the terminal's Ctrl-C.
    """
    printed = []
    for command in filter(None, map(str.split, commands.splitlines())):
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                start_new_session=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise CommandFailed(f"the program `{command[0]}` is not installed") from error
        if result.returncode != 0:
            reason = result.stderr.strip() or f"exit status {result.returncode}"
            raise CommandFailed(f"`{' '.join(command)}`: {reason}")
        printed.append(result.stdout)
    return "".join(printed)


def shape(
    namespace: str, device: str, *, rate_mbit: float | None, burst_s: float = _BURST_S
) -> None:
    """Limit what the device sends to `rate_mbit` Mbit/s (10^6 bit/s), Ethernet headers included.

    None: no limit. A limit that is already there is replaced.
    """
    discipline = "noqueue"
    if rate_mbit is not None:
        rate_bit = int(rate_mbit * 1e6)
        burst_bytes = int(max(_BURST_MBIT, rate_mbit) * 1e6 / 8 * burst_s)
        discipline = f"tbf rate {rate_bit}bit burst {burst_bytes}b latency {_QUEUE_LATENCY_MS}ms"
    _run(f"tc -n {namespace} qdisc replace dev {device} root {discipline}")


def _namespaces(pattern: str) -> list[str]:
    """The names of network namespaces of this machine that begin so."""
    names = [line.split()[0] for line in _run("ip netns list").splitlines() if line]
    return [name for name in names if re.match(pattern, name)]


def _remove_namespace(name: str) -> None:
    """Kill whatever runs in the namespace, then remove it."""
    for pid in _run(f"ip netns pids {name}").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run(f"ip netns del {name}")


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block with an exception, as SIGINT does.

    A signal that the process was started to ignore stays ignored. For the main thread only.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each, old in previous.items():
        signal.signal(each, signal.SIG_IGN if old is signal.SIG_IGN else leave)
    try:
        yield
    finally:
        for each, old in previous.items():
            signal.signal(each, old)
