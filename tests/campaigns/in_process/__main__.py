"""Entry of the campaign; `campaign.py` says what it does."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the campaign, in a process that finds the helpers of the tests as pytest does."""
    if importlib.util.find_spec("recovering_loops") is None:
        paths = [str(_TESTS.parent), str(_TESTS), str(_TESTS / "integrations")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", __spec__.parent, *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    from tests.campaigns.in_process import campaign

    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
