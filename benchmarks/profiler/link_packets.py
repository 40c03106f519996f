"""What the link of every host has carried and when, from the packets that its interface has sent.

    python -m benchmarks.profiler.link_packets FOLDER

on each host, by itself beside the ranks, until it is killed. The kernel shows every packet that
leaves the shaper, with the time; all hosts of harness/testbed.py share its clock. Counters of
the interface, read every millisecond, are too coarse: a collective of 264 KB is over in 2 ms at
1 Gbit/s, and a tenth of its bytes seemed to travel before or after it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.launch import RankFailed
from benchmarks.harness.testbed import INTERFACE, Testbed

_PERIOD_S = 0.005
_PACKET = struct.Struct("<2q")
_HEADERS = 66
"""Bytes of Ethernet, IPv4 and TCP with timestamps; a packet that the kernel hands over unsplit has
them once, and an acknowledgement is nothing else."""
_ALL_SEEN = 0.999
_PATIENCE_S = 10.0
_ETH_P_ALL = 3
_TIMESTAMPS, _BUFFER = 35, 33  # SO_TIMESTAMPNS and SO_RCVBUFFORCE, which the module socket lacks
_TIMESPEC = struct.Struct("@2l")
_BUFFER_BYTES = 1 << 26  # a packet that waits to be read takes all its bytes


@dataclass(frozen=True)
class LinkPackets:
    """Packets that a host has sent.

    Args:
        times: in nanoseconds.
        payload: bytes of TCP payload of each.
    """

    times: np.ndarray
    payload: np.ndarray

    def between(self, begin: int, end: int) -> int:
        """Bytes that were sent from ``begin`` to ``end``, in nanoseconds."""
        return int(self.payload[(begin < self.times) & (self.times <= end)].sum())


@contextmanager
def noted(testbed: Testbed, folder: Path) -> Iterator[None]:
    """Until the block is left the packets of all hosts are noted; ``packets_of`` reads them.

    Raises:
        RankFailed: the counter of an interface has more bytes than the packets that were seen.
    """
    paths = [_path(folder, host) for host in range(testbed.hosts)]
    group = testbed.start([sys.executable, "-m", "benchmarks.profiler.link_packets", str(folder)])

    def wait_until(done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise RankFailed(f"packets of the hosts: {what}\n{group.tail()}")
            time.sleep(_PERIOD_S)

    def counted() -> np.ndarray:
        return np.array([testbed.tx_bytes(host) for host in range(testbed.hosts)])

    def seen() -> np.ndarray:
        return np.array([_packets(path)[:, 1].sum() for path in paths])

    try:
        wait_until(lambda: all(path.exists() for path in paths), "nothing looks at them")
        before = counted()
        yield
        wait_until(
            lambda: bool((seen() >= _ALL_SEEN * (counted() - before)).all()),
            "they are fewer bytes than an interface has counted",
        )
    finally:
        group.kill()


def packets_of(folder: Path, *, hosts: int) -> list[LinkPackets]:
    """Of every host."""
    of_hosts = [_packets(_path(folder, host)) for host in range(hosts)]
    return [LinkPackets(each[:, 0], np.maximum(each[:, 1] - _HEADERS, 0)) for each in of_hosts]


def _path(folder: Path, host: int) -> Path:
    return folder / f"host{host}.packets"


def _packets(path: Path) -> np.ndarray:
    """Nanoseconds and bytes of each; the last may be cut short, where the process was killed."""
    content = path.read_bytes()
    whole = len(content) // _PACKET.size * _PACKET.size
    return np.frombuffer(content[:whole], dtype="<i8").reshape(-1, 2)


def main() -> None:
    folder, host = Path(sys.argv[1]), int(os.environ["RANK"])
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as link:
        link.setsockopt(socket.SOL_SOCKET, _BUFFER, _BUFFER_BYTES)
        link.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        link.bind((INTERFACE, _ETH_P_ALL))
        link.setblocking(False)
        with _path(folder, host).open("wb", buffering=0) as file:  # from here on all are seen
            while True:
                file.write(b"".join(_sent(link)))
                time.sleep(_PERIOD_S)


def _sent(link: socket.socket) -> Iterator[bytes]:
    """What has left since the last call."""
    ahead = time.time_ns() - time.monotonic_ns()
    start, space = bytearray(1), socket.CMSG_SPACE(_TIMESPEC.size)
    while True:
        try:
            nbytes, notes, _, address = link.recvmsg_into([start], space, socket.MSG_TRUNC)
        except BlockingIOError:
            return
        if address[2] == socket.PACKET_OUTGOING:
            seconds, nanoseconds = _TIMESPEC.unpack(notes[0][2])
            yield _PACKET.pack(seconds * 1_000_000_000 + nanoseconds - ahead, nbytes)


if __name__ == "__main__":
    main()
