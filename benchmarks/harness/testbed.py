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
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.harness import network
from benchmarks.harness.launch import Layout, RankGroup, RanksPerHost, rank_environment

INTERFACE = "eth0"
_PREFIX = "ldist"
_FIRST_PORT = 29500
_SUBNET = "10.77.0.0/24"


class TestbedUnavailable(RuntimeError):
    """This machine cannot hold the test-bed; the message says what is missing."""

    __test__ = False  # pytest takes every class called Test... for a test


class Testbed:
    """A context manager: `hosts` network namespaces joined by a switch.

    link_mbit: rate of each host's link in each direction, in Mbit/s (10^6 bit/s); None: not shaped.
    congestion_control: of TCP between hosts, such as "cubic"; None: the machine's own.

    Raises `TestbedUnavailable` on entry where root, `ip`, `tc` or the kernel's support is missing.
    On exit, also by an exception, SIGINT, SIGTERM or SIGHUP, every process in the namespaces is
    killed and the namespaces are removed. What a SIGKILL left behind is removed by the next entry.
    """

    __test__ = False

    def __init__(
        self,
        hosts: int = 2,
        *,
        link_mbit: float | None = 200.0,
        congestion_control: str | None = None,
    ) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"hosts must be between 1 and 200, got {hosts}")
        _check_link(link_mbit)
        self.hosts = hosts
        self.link_mbit = link_mbit
        self.congestion_control = congestion_control
        self._name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{self._name}-sw"
        self._stack = contextlib.ExitStack()
        self._groups: list[RankGroup] = []
        self._output_root = Path()

    def __enter__(self) -> Testbed:
        if missing := network.missing_requirement():
            raise TestbedUnavailable(f"no test-bed on this machine: {missing}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(exit_on_signals())
            self._output_root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.callback(self._remove_network)
            stack.callback(self._kill_ranks)
            try:
                _remove_stale()
                self._create_network()
            except network.CommandFailed as error:
                raise TestbedUnavailable(f"no test-bed on this machine: {error}") from error
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
        ends = [
            [(self._switch, f"h{h}"), (self.namespace(h), INTERFACE)] for h in range(self.hosts)
        ]
        return [end for of_host in ends for end in of_host]

    def set_link(self, link_mbit: float | None) -> None:
        """Change the rate of all links, in Mbit/s, while ranks run; None: not shaped."""
        _check_link(link_mbit)
        for namespace, device in self.shaped:
            network.shape(namespace, device, rate_mbit=link_mbit)
        self.link_mbit = link_mbit

    def tx_bytes(self, host: int) -> int:
        """Bytes this host has sent over its link, from the interface's own counter.

        Headers and acknowledgements count; a segment the kernel hands over unsplit (GSO, up to
        64 KB) counts one header. The shaper charges every 1,514-byte frame, so that TCP payload can
        reach 1448 / 1514 = 95.6 % of the rate.
        """
        return network.tx_bytes(self.namespace(host), INTERFACE)

    def start(
        self,
        argv: Sequence[str],
        *,
        ranks_per_host: RanksPerHost = 1,
        env: Mapping[str, str] | None = None,
    ) -> RankGroup:
        """Start `argv` once per rank with torchrun's environment variables; does not wait.

        ranks_per_host: one number for all hosts, or one for each.
        """
        layout = Layout.of(ranks_per_host, hosts=self.hosts)
        launch = len(self._groups)
        group = RankGroup(self._output_root / f"launch{launch}")
        self._groups.append(group)
        for rank in range(layout.world_size):
            environment = rank_environment(
                rank,
                layout=layout,
                interface=INTERFACE,
                master_address=self.address(0),
                master_port=_FIRST_PORT + launch,
                extra=env,
            )
            in_host = ["ip", "netns", "exec", self.namespace(layout.place(rank)[0])]
            group.start([*in_host, *argv], env=environment)
        return group

    def launch(
        self,
        argv: Sequence[str],
        *,
        ranks_per_host: RanksPerHost = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        echo: bool = False,
    ) -> list[str]:
        """Run `argv` once per rank and return what each rank printed.

        Raises `RankFailed` when a rank exits with an error and `RanksTimedOut` after `timeout_s`
        seconds; both kill all ranks and carry the end of their output. echo: show rank 0's output.
        """
        group = self.start(argv, ranks_per_host=ranks_per_host, env=env)
        return group.wait(timeout_s=timeout_s, echo=echo)

    def run(self, module: str, settings: Any, *, echo: bool = True, **options: Any) -> list[Any]:
        """Run ``python -m module`` with its settings as JSON, and return what each rank has sent.

        A rank sends with `benchmarks.harness.launch.send_result`. options: of `launch`.
        """
        self.launch([sys.executable, "-m", module, json.dumps(settings)], echo=echo, **options)
        return self._groups[-1].results()

    def _create_network(self) -> None:
        # Without an address of IPv6, whose link-local chatter would show in the counters.
        switch, up = self._switch, "addrgenmode none up"
        network.run(f"""
            ip netns add {switch}
            ip -n {switch} link add br0 type bridge stp_state 0 mcast_snooping 0
            ip -n {switch} link set br0 {up}""")
        for host in range(self.hosts):
            name, port, address = self.namespace(host), f"h{host}", self.address(host)
            network.run(f"""
                ip netns add {name}
                ip -n {name} link set lo up
                ip link add {port} netns {switch} type veth peer name {INTERFACE} netns {name}
                ip -n {switch} link set {port} master br0
                ip -n {name} addr add {address}/24 dev {INTERFACE}
                ip -n {switch} link set {port} {up}
                ip -n {name} link set {INTERFACE} {up}""")
            if self.congestion_control is not None:  # some kernels allow it for a route only
                network.run(
                    f"ip -n {name} route change {_SUBNET} dev {INTERFACE} proto kernel scope link "
                    f"src {address} congctl {self.congestion_control}"
                )
        self.set_link(self.link_mbit)

    def _kill_ranks(self) -> None:
        for group in self._groups:
            group.kill()

    def _remove_network(self) -> None:
        for name in network.namespaces():
            if name.startswith(f"{self._name}-"):
                network.remove_namespace(name)


def _check_link(link_mbit: float | None) -> None:
    if link_mbit is not None and not 1 <= link_mbit <= 10_000:
        raise ValueError(f"link_mbit must be between 1 and 10000 Mbit/s, or None, got {link_mbit}")


def _remove_stale() -> None:
    """Remove the namespaces of test-beds whose process is no more."""
    for name in network.namespaces():
        owner = re.match(rf"{_PREFIX}-(\d+)-", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            # Another test-bed that starts now may be faster.
            with contextlib.suppress(network.CommandFailed):
                network.remove_namespace(name)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception and ignore those that follow.

    Ignoring them until the block is left keeps an impatient second Ctrl-C out of the clean-up.
    A signal that the process was started to ignore stays ignored. For the main thread only.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.getsignal(each) for each in caught}
    previous = {each: old for each, old in previous.items() if old is not signal.SIG_IGN}
    for each in previous:
        signal.signal(each, handler)
    try:
        yield
    finally:
        for each, old in previous.items():
            signal.signal(each, old)
