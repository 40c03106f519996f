"""What a rank of `on_ranks` does: the tests that it is told, one after the other.

    torchrun --nproc-per-node=N rank_loop.py SOCKET

Each test has a default group of its own. The rank answers with ``("passed", "")``, ``("failed",
traceback)`` or ``("skipped", reason)`` and the number of its threads. It ends when the other end
of the socket is closed.
"""

import faulthandler
import gc
import importlib.util
import marshal
import os
import pickle
import random
import socket
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Call:
    """A test, for all ranks.

    Args:
        path, module: file of the test, and the name that pytest has imported it by.
        code: of the module with pytest's assertions, as of `marshal`.
        function: its name there.
        arguments: pickled, for they may be of the module.
        limit: seconds until a rank that has not come to its end tells where it is, and exits.
        hosts: on which the ranks are, by name; 0: they have the name of this machine.
        environment: variables for this test.
    """

    path: str
    module: str
    code: bytes
    function: str
    arguments: bytes
    limit: float
    hosts: int
    environment: dict[str, str]

    def __call__(self) -> None:
        module = sys.modules.get(self.module) or self._load()
        getattr(module, self.function)(**pickle.loads(self.arguments))

    def _load(self) -> types.ModuleType:
        sys.path[:0] = [os.path.dirname(self.path)]
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        assert spec is not None
        module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
        try:
            exec(marshal.loads(self.code), vars(module))
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def meet(store: dist.Store, rank: int, size: int, *, timeout: timedelta = TIMEOUT) -> None:
    """Make the default group, and wait until all of its ranks have it."""
    # Of groups that could not be made: the store has the number in its keys.
    _world.group_count = 0
    if "torch.distributed.tensor" in sys.modules:  # it keeps meshes of groups that are gone
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # not in torch 2.7
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    # Each pair is connected by its two ends on their own: who gives the group up at once closes
    # what another rank is still waiting for, and that one fails.
    dist.barrier()


@contextmanager
def as_at_the_start(call: Call) -> Iterator[None]:
    """What tests share of a process: seeds, variables, the default dtype, the folder."""
    import numpy as np

    before, folder = dict(os.environ), os.getcwd()
    os.environ.update(call.environment)
    if call.hosts:
        host = int(before["RANK"]) * call.hosts // int(before["WORLD_SIZE"])
        os.environ["LIGHTNING_DIST_HOSTNAME"] = f"host{host}"
    if hits := sys.modules.get("lightning_dist._hits"):  # campaigns.mutants.hits
        hits.begin(os.environ["HITS_TEST"])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


def answer(call: Call, store: dist.Store, groups: list[dist.ProcessGroup]) -> tuple[str, str]:
    """How the test has ended; ``groups``: gets those that it has left."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with as_at_the_start(call):
            meet(store, rank, size)
            try:
                call()
                return "passed", ""
            finally:
                groups.extend(dist.distributed_c10d._world.pg_map)
                if dist.is_initialized():
                    dist.destroy_process_group()
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except (Exception, pytest.fail.Exception):
        return "failed", traceback.format_exc()


def main(path: str) -> None:
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        told = Connection(client.detach())
    size = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # The agent of torchrun serves it.
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=60))
    told.send(int(os.environ["RANK"]))
    gc.freeze()  # what is imported stays
    number = 0
    # Before torch 2.13 groups always wait so: those of a test are given up after the next one.
    kept: deque[list[dist.ProcessGroup]] = deque(
        maxlen=0 if hasattr(dist, "all_gather_single") else 1
    )
    while True:
        try:
            call: Any = told.recv()
        except EOFError:
            return
        number += 1
        faulthandler.dump_traceback_later(call.limit, exit=True)
        groups: list[dist.ProcessGroup] = []
        answered = answer(call, dist.PrefixStore(f"test {number}", store), groups)
        # DDP in circles of references must not be the last to give a group up: it waits for threads
        # with the interpreter's lock, which they need to free the tensors of a last collective.
        gc.collect()
        kept.append([*groups])
        groups.clear()
        told.send((answered, len(os.listdir("/proc/self/task"))))
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
