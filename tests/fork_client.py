"""Stands for ``python``: ``python -IS fork_client.py SOCKET[:SOCKET...] WORDS...`` does what
``python WORDS...`` does, in a fork of ``fork_server.py``, and ends as that ended. Ranks take turns
at the sockets.

Whoever kills this process ends that fork too.
"""

import json
import os
import signal
import socket
import sys


def main(paths: list[str], words: list[str]) -> None:
    path = paths[int(os.environ.get("RANK", "0")) % len(paths)]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    names = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt")]
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *names])
    answer = server.recv(100)
    if not answer:
        sys.exit("the fork server is gone; its own errors are in the output of the tests")
    code = int(answer)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1].split(os.pathsep), sys.argv[2:])
