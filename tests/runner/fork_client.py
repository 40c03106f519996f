"""Stands for ``python``: ``python -IS fork_client.py SOCKET[:SOCKET...] WORDS...`` does what
``python WORDS...`` does, in a fork of ``fork_server.py``, and ends as that ended. Ranks take turns
at the sockets.

Signals that a program may handle are passed on to that fork; whoever kills this process ends it.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(paths: list[str], words: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a fork to pass them on to
    path = paths[int(os.environ.get("RANK", "0")) % len(paths)]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    names = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    request["client"] = os.getpid()
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *names])
    fork = answer(server)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: pass_on(fork, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = answer(server)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def pass_on(fork: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(fork, number)


def answer(server: socket.socket) -> int:
    told = server.recv(100)
    if not told:
        sys.exit("the fork server is gone; its own errors are in the output of the tests")
    return int(told)


if __name__ == "__main__":
    main(sys.argv[1].split(os.pathsep), sys.argv[2:])
