"""What the campaign takes from the tests: their jobs, their training, and their account of it."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "integrations")]

import elastic_jobs  # noqa: E402
import elastic_runs  # noqa: E402
import loop_runs  # noqa: E402
import processes  # noqa: E402

__all__ = ["elastic_jobs", "elastic_runs", "loop_runs", "processes"]
