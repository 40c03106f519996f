"""Runs the tests on the simulated accelerator, each file in a process of its own; see README.md."""

from pathlib import Path

import pytest
from processes import run

from simulated_device.device import build, can_build

HERE = Path(__file__).parent
LIMIT = 600
LIMIT_OF_BUILDING = 900


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + LIMIT_OF_BUILDING)
@pytest.mark.skipif(not can_build(), reason="needs g++")
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("cases_*.py")))
@pytest.mark.parametrize(
    "tier",
    [
        pytest.param("not exhaustive", id="ci"),
        pytest.param("exhaustive", marks=pytest.mark.exhaustive),
    ],
)
def test_cases(file: str, tier: str, quick_python: list[str]) -> None:
    if file == "cases_tables.py":
        pytest.importorskip("triton")
    build()
    command = [*quick_python, "-m", "pytest", HERE / file, "-p", "no:cacheprovider"]
    done = run([*command, "-m", tier], limit=LIMIT)
    if tier != "exhaustive" or done.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
        done.require_success()
