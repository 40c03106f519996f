"""One tensor from one rank to another, counted within a group; nobody else takes part."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def send(tensor: Tensor, *, to: int, group: dist.ProcessGroup) -> None:
    """Return when it is on its way.

    Raises:
        RuntimeError: of gloo: the rank is gone, or did not receive within the group's timeout.
    """
    group.send([tensor], to, 0).wait()


def receive(tensor: Tensor, *, source: int, group: dist.ProcessGroup) -> None:
    """Return when ``tensor`` holds what ``source`` has sent.

    Raises:
        RuntimeError: of gloo: the rank is gone, or did not send within the group's timeout.
    """
    group.recv([tensor], source, 0).wait()
