"""What members of a group do that a profile measures: send, receive, meet, and end it."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor

_PLACE = re.compile(r"^\[[^]]*\] ")


def send(tensor: Tensor, *, to: int, group: dist.ProcessGroup) -> None:
    """Return when it is on its way. ``to`` counts within the group; nobody else takes part.

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


def meet(group: dist.ProcessGroup, device: torch.device | str) -> None:
    """Return when all members have come, and ``device`` has done all it was given. Collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    finish(device)


def finish(device: torch.device | str) -> None:
    """Return when ``device`` has done all it was given."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def end_group(group: dist.ProcessGroup) -> None:
    """Let go of the connections of ``group``, which nobody uses any more. Collective.

    They are closed when the caller forgets the group too.

    Raises:
        RuntimeError: of gloo: a member is gone or late; the group stays.
    """
    dist.barrier(group)  # a member that is still on its way would be cut off
    dist.destroy_process_group(group)


def first_sentence(error: RuntimeError) -> str:
    """What gloo says, without where in gloo it was."""
    return _PLACE.sub("", str(error)).partition(". ")[0]
