"""Connections of the process groups of a generation, among others of the process."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from lightning_dist.elastic.recovery.groups import GenerationGroups, init_alone


@pytest.fixture
def groups() -> Iterator[GenerationGroups]:
    yield GenerationGroups()
    dist.destroy_process_group()


def test_connections_of_other_threads_stay_open(groups: GenerationGroups) -> None:
    """They may be opened while groups are made."""
    limit = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    elsewhere = socket.create_server(("127.0.0.1", 0))

    def connect() -> Store:
        return TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)

    with elsewhere, groups.made(connect, port=server.port, number=0, rank=0, world_size=1):
        other = socket.create_connection(elsewhere.getsockname())
        peer, _ = elsewhere.accept()
    with other, peer:
        kept = {each.getpeername()[1] for each in groups._sockets}
        assert server.port in kept
        assert kept.isdisjoint((other.getsockname()[1], peer.getsockname()[1]))
        groups.shut()
        other.sendall(b"x")
        assert peer.recv(1) == b"x"


def test_a_line_of_a_traceback_has_one_rank(
    groups: GenerationGroups, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the last generation; none before the first, when each process is alone."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    limit = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)

    def connect() -> Store:
        return TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)

    def printed() -> str:
        sys.excepthook(ValueError, ValueError("x"), None)
        return capsys.readouterr().err

    init_alone()
    assert printed() == "ValueError: x\n"
    for number in range(3):
        with groups.made(connect, port=server.port, number=number, rank=0, world_size=1):
            pass
        assert printed() == "[rank0]: ValueError: x\n"
