"""Rank 0 sends to rank 1; it prints from when to when, in nanoseconds, and how many bytes."""

import json
import os
import socket
import time

SENT = 2_000_000
TIMEOUT_S = 30.0


def main() -> None:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            server.settimeout(TIMEOUT_S)
            peer, _ = server.accept()
            with peer:
                begin = time.monotonic_ns()
                peer.sendall(bytes(SENT))
                peer.recv(1)  # all is there
            print(json.dumps([begin, time.monotonic_ns(), SENT]))
        return
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            peer = socket.create_connection(address, timeout=TIMEOUT_S)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
    with peer:
        left = SENT
        while left:
            left -= len(peer.recv(1 << 16))
        peer.sendall(b"\0")


if __name__ == "__main__":
    main()
