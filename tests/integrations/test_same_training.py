"""Lightning, Fabric, Accelerate and plain DDP train to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import torchrun
from results import Results, require_equal

pytest.importorskip("accelerate")

RUNNER = Path(__file__).with_name("run_scenarios.py")
WAYS = ("by_accelerate", "by_fabric", "by_lightning")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Results:
    folder = tmp_path_factory.mktemp("same_training")
    finished = torchrun(RUNNER, folder, "same_training", ranks=2, limit=100, python=quick_python)
    return Results(folder, finished, ranks=2)


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1"])
@pytest.mark.parametrize("way", WAYS)
def test_the_parameters_after_20_steps_are_the_same_bits(
    pair: Results, codec: str, way: str
) -> None:
    first, second = pair("same_training")
    expected = first[codec]["by_plain_ddp"]
    require_equal(first[codec][way], expected)
    require_equal(second[codec][way], expected)
    for name, value in expected.items():
        assert not torch.equal(value, first["start"][name]), "it has trained"
    different = [not torch.equal(v, first["none"]["by_plain_ddp"][n]) for n, v in expected.items()]
    assert any(different), "and the codec took part"
