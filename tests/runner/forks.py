"""Scripts that start in milliseconds: in forks of a process that has imported what they use."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from processes import environment_of

HERE = Path(__file__).parent
EVERYTHING = (
    *("lightning", "torch.distributed.run", "torch._dynamo", "accelerate", "lightning_dist"),
    *("lightning_dist.accelerate", "lightning_dist.fabric", "lightning_dist.cli"),
    *("omegaconf", "pytest"),  # of Lightning's hyperparameters, and of helpers of tests
    *("wandb", "wandb.apis.public", "wandb.sdk.launch"),  # of its first run
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
TORCH = (
    *("torch.distributed.run", "torch._dynamo", "torchmetrics"),  # most of Lightning's imports
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)


@contextmanager
def fork_server(*modules: str, at_once: bool = False) -> Iterator[list[str]]:
    """Words to use in the place of ``sys.executable``.

    All forks of a server have its hash seed: see `with_seeds`.

    Args:
        modules: imported with all of their public names before the first fork.
        at_once: start the server now; False: when the words are first used.
    """
    with ExitStack() as stack:
        path = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "socket")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(path)
        listener.listen()  # clients may come while it still imports
        end, ended = os.pipe()
        # A test may replace sys.executable before the server starts.
        words = [sys.executable, str(HERE / "fork_server.py"), str(listener.fileno()), *modules]
        starts = threading.Thread(target=_serve, args=(listener, end, words, at_once), daemon=True)
        starts.start()
        stack.callback(os.close, end)
        stack.callback(starts.join)
        stack.callback(os.close, ended)
        yield [sys.executable, "-IS", str(HERE / "fork_client.py"), path]


def _serve(listener: socket.socket, end: int, words: Sequence[str], at_once: bool) -> None:
    """Until the other end of the pipe ``end`` is closed."""
    if not at_once and end in select.select([listener, end], [], [])[0]:
        return
    with subprocess.Popen(
        words,
        env=environment_of({}),
        stdin=subprocess.PIPE,  # its end, however this process ends, is that of the server
        pass_fds=[listener.fileno()],
        start_new_session=True,
    ) as server:
        with open(os.pidfd_open(server.pid)) as ended:
            select.select([end, ended], [], [])
        listener.close()  # or those who came to a server that failed would wait


def with_seeds(*servers: list[str]) -> list[str]:
    """Words for ranks of which neighbours have different hash seeds, those of these servers.

    So that two of them go through a set in different orders.
    """
    *words, _ = servers[0]
    return [*words, os.pathsep.join(path for *_, path in servers)]
