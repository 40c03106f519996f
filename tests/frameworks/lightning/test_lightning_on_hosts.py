"""The demo's model through Lightning on two nodes of two ranks, real or declared."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, torchrun

from benchmarks.harness.testbed import Testbed, TestbedUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.ranks(4)]
SCRIPT = Path(__file__).with_name("train_demo.py")
LIMIT = 110.0
GROUPS = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
"""Intra- and inter-group of every rank."""

Printed = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _the_model_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))


def printed(outputs: list[str]) -> Printed:
    lines = [line for text in outputs for line in text.splitlines() if line.startswith('{"digest"')]
    return [json.loads(line) for line in lines]


def require_hierarchical(ranks: Printed) -> None:
    assert len({rank["digest"] for rank in ranks}) == 1, "replicas differ"
    assert all(rank["val_loss"] < 4.5 for rank in ranks), "a guess at 256 bytes has 5.5"
    assert [rank["topology"] for rank in ranks] == ["2 nodes x 2 ranks"] * 4
    found = sorted(ranks, key=lambda rank: (rank["groups"][0], rank["local_rank"]))
    assert [rank["groups"] for rank in found] == GROUPS
    assert [rank["local_rank"] for rank in found] == [0, 1, 0, 1]


@pytest.mark.root
@pytest.mark.timeout(LIMIT + 20)
def test_two_hosts_train_with_nothing_set(quick_python: list[str]) -> None:
    try:
        with Testbed(hosts=2, link_mbit=200) as testbed:
            argv = [*quick_python, str(SCRIPT), "2", "2", "{}"]
            outputs = testbed.launch(argv, ranks_per_host=2, timeout_s=LIMIT)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    ranks = printed(outputs)
    require_hierarchical(ranks)
    said = "2 nodes x 2 ranks, between nodes: int8 on 1/2 of the gradient per rank"
    assert [said in text for text in outputs] == [True, False, False, False]
    for rank in ranks:  # half a gradient in int8, of one and a half in float32
        assert rank["inter_bytes"] == pytest.approx(rank["raw_bytes"] / 3 / 4, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT + 20)
def test_declared_hosts_train_everywhere(quick_python: list[str]) -> None:
    settings = json.dumps({"ranks_per_node": 2, "codec": {"intra": "bf16", "inter": "int4"}})
    finished = torchrun(
        SCRIPT, "1", "4", settings, ranks=4, limit=LIMIT, python=quick_python
    ).require_success()
    ranks = printed([finished.output])
    assert len(ranks) == 4
    require_hierarchical(ranks)
    assert "inside: bf16, between nodes: int4 on 1/2 of the gradient" in finished.output
    assert all(0 < rank["inter_bytes"] < rank["raw_bytes"] / 8 for rank in ranks)
