"""Counted bytes are the bytes that leave the host, by the interface's own counter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed, TestbedUnavailable

CODECS = ("none", "bf16", "int8")
SCRIPT = Path(__file__).with_name("count_bytes.py")


@pytest.fixture(scope="module", params=[(2, 1), (2, 2), (3, 1)], ids=lambda p: f"{p[0]}x{p[1]}")
def ranks(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, dict[str, int]]]]:
    """(ranks per host, what every rank printed)."""
    hosts, per_host = request.param
    try:
        with Testbed(hosts=hosts, link_mbit=None) as testbed:
            argv = [sys.executable, str(SCRIPT), *CODECS]
            printed = testbed.launch(argv, ranks_per_host=per_host, timeout_s=100)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    return per_host, [json.loads(text.strip().splitlines()[-1]) for text in printed]


@pytest.mark.root
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_between_hosts_are_what_the_interface_sent(
    codec: str, ranks: tuple[int, list[dict[str, dict[str, int]]]]
) -> None:
    per_host, found = ranks
    for first in range(0, len(found), per_host):
        host = [rank[codec] for rank in found[first : first + per_host]]
        counted = sum(rank["inter_bytes"] for rank in host)
        sent = max(rank["interface"] for rank in host)  # every rank reads the same counter
        # On top of the payload: headers, and flags and barriers of a few KB.
        assert counted <= sent <= 1.03 * counted + 40_000
    if per_host == 1:
        assert all(rank[codec]["intra_bytes"] == 0 for rank in found)
