"""One launch for many tests: importing Lightning costs seconds per process."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import with_seeds
from processes import torchrun
from results import Results

RUNNER = Path(__file__).with_name("run_scenarios.py")
OF_TWO = ("local_steps", "delayed")
OF_THREE = ("local_hosts",)
LIMIT = 170.0


@pytest.fixture(scope="session")
def two(
    tmp_path_factory: pytest.TempPathFactory, quick_python: list[str], torch_python: list[str]
) -> Results:
    """What every scenario of two ranks left behind. Their hash seeds are different ones."""
    folder = tmp_path_factory.mktemp("two_ranks")
    python = with_seeds(quick_python, torch_python)
    finished = torchrun(RUNNER, folder, *OF_TWO, ranks=2, limit=LIMIT, python=python)
    return Results(folder, finished, ranks=2)


@pytest.fixture(scope="session")
def three(two: Results, quick_python: list[str]) -> Results:
    """Scenarios of three ranks, in the folder of the two: they take over its checkpoints."""
    finished = torchrun(RUNNER, two.folder, *OF_THREE, ranks=3, limit=LIMIT, python=quick_python)
    return Results(two.folder, finished, ranks=3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for a launch waits for it."""
    for item in items:
        if {"two", "three", "launched", "slurm"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(2 * LIMIT + 20))
