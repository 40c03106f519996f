"""Groups as ``torch.distributed`` makes them: any order of ranks, one reducer after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attach_groups import CASES
from processes import torchrun

SCRIPT = Path(__file__).with_name("attach_groups.py")
LIMIT = 90.0  # seconds; about 10 are needed on an idle machine


@pytest.fixture(scope="module")
def attached(
    tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]
) -> list[dict[str, object]]:
    """What every rank has got of each case before the end, or before the launch hung."""
    folder = tmp_path_factory.mktemp("attached")
    torchrun(SCRIPT, folder, ranks=4, limit=LIMIT, python=quick_python)
    files = [folder / str(rank) for rank in range(4)]
    return [dict(map(json.loads, file.read_text().splitlines())) for file in files]


@pytest.mark.parametrize("case", [case for case, _ in CASES])
def test_every_rank_has_the_mean(attached: list[dict[str, object]], case: str) -> None:
    """In any order of groups and ranks; also where ranks have made different numbers of groups."""
    assert [found.get(case, "it hung") for found in attached] == [0.0] * 4
