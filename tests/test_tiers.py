"""The list of tiers names tests that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment_of
from tiers import listed

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_line_of_the_list_names_a_test() -> None:
    """With the parameters that it has; files that need what is not installed have none."""
    tiers = listed()
    assert set(tiers.values()) == {"slow", "exhaustive"}
    files = sorted({test.partition("::")[0] for test in tiers})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of({}), capture_output=True, text=True, timeout=100
    )
    found = {line for line in done.stdout.splitlines() if "::" in line}
    found |= {test.partition("[")[0] for test in found}
    files = {test.partition("::")[0] for test in found}
    assert [t for t in tiers if t not in found and t.partition("::")[0] in files] == []
