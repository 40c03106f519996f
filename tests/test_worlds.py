"""Worlds of threads give back what they have used."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from processes import port
from worlds import Rank, run_threads


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_world_whose_ranks_left_a_collective_keeps_no_connection() -> None:
    """The rank that waits fails at once, and not after the timeout of its group."""
    before, waits = descriptors(), []

    def body(rank: Rank) -> None:
        group = rank.group("some")
        group.allreduce([torch.ones(1)]).wait()
        if rank.rank:
            waits.append(group.allreduce([torch.ones(1)]))

    run_threads(body, 3)
    for work in waits:
        with pytest.raises(RuntimeError, match=r"Connection closed by peer|Socket closed"):
            work.wait()
    of_device, end = 4, time.monotonic() + 60
    while descriptors() > before + of_device:  # a thread of gloo closes them
        assert time.monotonic() < end


def test_a_port_costs_no_descriptor() -> None:
    port()
    before = descriptors()
    found = {port() for _ in range(50)}
    assert len(found) == 50
    with socket.socket() as mine:
        mine.bind(("", port()))
    assert descriptors() <= before + 1
