"""Processes that host a store of torch and may stop."""

import os
import signal
from contextlib import AbstractContextManager

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported silently


class StoreHost(AbstractContextManager["StoreHost"]):
    """A fork that hosts a store at ``port``."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            signal.pause()
        self._pid, self.port = pid, int(os.read(reading, 16))
        os.close(reading)
        os.close(writing)

    def stop(self) -> None:
        """From now on it does not answer."""
        os.kill(self._pid, signal.SIGSTOP)
        os.waitpid(self._pid, os.WUNTRACED)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
