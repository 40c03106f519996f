"""A process that hangs where Python handlers do not run; its watchdog ends it.

Usage: hanging.py WAY. It prints ``hangs`` before it does.
"""

import ctypes
import os
import socket
import sys

from lightning_dist.elastic.process import watchdog as module
from lightning_dist.elastic.process.watchdog import Watchdog


def last_words(reason: str) -> None:
    print(f"last words: {reason}", flush=True)
    if way == "nobody reads":
        module._PATIENCE = 0.2  # for what comes next
    if way == "words fail":
        raise OSError("no space left on device")
    if way == "words hang":
        here, _there = socket.socketpair()
        here.recv(1)


def train_a_step() -> None:
    print("hangs", flush=True)
    if way == "nobody reads":
        _read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(write, True)
        os.dup2(write, 2)
    if way == "stderr closed":
        sys.stderr.close()
    watchdog.start()  # only here: on a busy machine it may be faster than the lines before
    if way == "told":
        watchdog.rest()
        watchdog.end_within(0.1, "SIGTERM, and the grace period is over")
    ctypes.CDLL(None).pause()


way = sys.argv[1]
if way == "words hang":
    module._PATIENCE = 2.0
watchdog = Watchdog(0.2, last_words=last_words)
train_a_step()
