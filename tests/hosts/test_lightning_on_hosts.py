"""The demo's model through Lightning on two hosts of two ranks, real or declared."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import torchrun

from benchmarks.testbed import Testbed, TestbedUnavailable

SCRIPT = Path(__file__).with_name("train_demo.py")
LIMIT = 110.0
GROUPS = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
"""Intra- and inter-group of every rank."""

Printed = list[dict[str, Any]]


def printed(outputs: list[str]) -> Printed:
    lines = [line for text in outputs for line in text.splitlines() if line.startswith('{"digest"')]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def on_hosts() -> dict[str, Printed]:
    """A flat and a hierarchical run on two namespaces with a link of 200 Mbit/s."""
    runs: dict[str, Mapping[str, Any]] = {"flat": {"hierarchical": False}, "auto": {}}
    try:
        with Testbed(hosts=2, link_mbit=200) as testbed:
            found = {}
            for name, settings in runs.items():
                argv = [sys.executable, str(SCRIPT), "2", "2", json.dumps(settings)]
                found[name] = testbed.launch(argv, ranks_per_host=2, timeout_s=LIMIT)
            assert (
                "2 hosts x 2 ranks, between hosts: int8 on 1/2 of the gradient per rank"
                in (found["auto"][0])
            )
            return {name: printed(outputs) for name, outputs in found.items()}
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))


def require_hierarchical(ranks: Printed) -> None:
    assert len({rank["digest"] for rank in ranks}) == 1, "replicas differ"
    assert [rank["topology"] for rank in ranks] == ["2 hosts x 2 ranks"] * 4
    found = sorted(ranks, key=lambda rank: (rank["groups"][0], rank["local_rank"]))
    assert [rank["groups"] for rank in found] == GROUPS
    assert [rank["local_rank"] for rank in found] == [0, 1, 0, 1]


@pytest.mark.root
@pytest.mark.timeout(2 * LIMIT + 20)
def test_two_hosts_train_as_the_flat_exchange_does(on_hosts: dict[str, Printed]) -> None:
    flat, ranks = on_hosts["flat"], on_hosts["auto"]
    require_hierarchical(ranks)
    assert ranks[0]["val_loss"] == pytest.approx(flat[0]["val_loss"], rel=0.01)
    assert ranks[0]["norm"] == pytest.approx(flat[0]["norm"], rel=0.01)
    assert all(rank["groups"] == [None, None] for rank in flat)


@pytest.mark.root
def test_fewer_bytes_cross(on_hosts: dict[str, Printed]) -> None:
    """Flat, a host sends half of two payloads and a ring's 3/4 to the other; hierarchical, one."""
    flat, ranks = (sum(r["inter_bytes"] for r in of) for of in on_hosts.values())
    assert ranks / flat == pytest.approx(1 / 1.75, rel=0.01)


@pytest.mark.timeout(LIMIT + 20)
def test_declared_hosts_train_everywhere() -> None:
    settings = json.dumps({"ranks_per_host": 2, "codec": {"intra": "bf16", "inter": "int4"}})
    finished = torchrun(SCRIPT, "1", "4", settings, ranks=4, limit=LIMIT).require_success()
    ranks = printed([finished.output])
    assert len(ranks) == 4
    require_hierarchical(ranks)
    assert "inside: bf16, between hosts: int4 on 1/2 of the gradient" in finished.output
    assert all(0 < rank["inter_bytes"] < rank["raw_bytes"] / 8 for rank in ranks)
