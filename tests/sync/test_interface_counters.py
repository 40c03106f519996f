"""Counted bytes are the bytes that leave the node, and that stay, by the interfaces' counters."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.launch import Layout
from benchmarks.harness.testbed import Testbed, TestbedUnavailable

FLAT = ("flat/none", "flat/bf16", "flat/int8")
BOTH_FORMS = ("hierarchical/none", "hierarchical/int8", "leader/none", "leader/int8")
ROWS = {
    "2x1": FLAT,
    "3x1": FLAT,
    "2x2": (*FLAT, *BOTH_FORMS, "fsdp/int8"),
    "3+1": ("flat/int8", "leader/none", "leader/int8", "leader/topk"),
}
"""What the nodes of a layout are asked to do."""
SLOW = ("3x1", "3+1")

SCRIPT = Path(__file__).with_name("count_bytes.py")
HEADERS = 1 + 2 * 66 / 1448
"""Bytes on the link for one of payload, at most: a frame of headers for every segment sent, and one
that acknowledges a segment received, of which there are as many. Fewer where the kernel hands over
larger segments and acknowledges several at once, as it does while nobody waits for a core."""
EXTRA = 20_000  # flags and barriers
INT8 = 1 + 2 / 256
"""Bytes of an element, with those of its block's scale."""
OF_SHARDS = "payload", "elements"

Printed = dict[str, dict[str, int]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(layout, marks=pytest.mark.slow) if layout in SLOW else layout
        for layout in ROWS
    ],
)
def nodes(
    request: pytest.FixtureRequest, quick_python: list[str]
) -> tuple[str, list[list[Printed]]]:
    """(layout, what every rank of every node printed)."""
    layout = Layout.parse(request.param)
    try:
        with Testbed(hosts=layout.hosts, link_mbit=None) as testbed:
            argv = [*quick_python, str(SCRIPT), *ROWS[request.param]]
            printed = testbed.launch(argv, ranks_per_host=layout.ranks_per_host, timeout_s=100)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    ranks = iter(json.loads(text.strip().splitlines()[-1]) for text in printed)
    return request.param, [[next(ranks) for _ in range(count)] for count in layout.counts]


@pytest.mark.root
def test_bytes_between_hosts_are_what_the_link_sent(nodes: tuple[str, list[list[Printed]]]) -> None:
    layout, printed = nodes
    for row in ROWS[layout]:
        for node in printed:
            counted = sum(rank[row]["inter_bytes"] for rank in node)
            sent = max(rank[row]["link"] for rank in node)  # every rank reads the same counter
            assert counted <= sent <= HEADERS * counted + EXTRA, row
            if row == "fsdp/int8":  # 2 (R-1)/R n/S elements of every rank, on S ranks and R = 2
                payload, elements = (max(rank[row][k] for rank in node) for k in OF_SHARDS)
                assert payload == pytest.approx(INT8 * elements, rel=0.03)


@pytest.mark.root
def test_bytes_inside_a_host_are_what_its_loopback_sent(
    nodes: tuple[str, list[list[Printed]]],
) -> None:
    layout, printed = nodes
    for row in {*ROWS[layout]} - {"fsdp/int8"}:  # FSDP's own bytes are not counted
        for node in printed:
            counted = sum(rank[row]["intra_bytes"] for rank in node)
            sent = max(rank[row]["lo"] for rank in node)
            assert counted <= sent <= HEADERS * counted + EXTRA, row
            if len(node) == 1:
                assert counted == 0
