"""Texts that renderers made once, kept in ``kept/snapshots``.

``UPDATE_SNAPSHOTS=1`` writes them anew: look at the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

KEPT = Path(__file__).with_name("kept") / "snapshots"


def assert_snapshot(name: str, text: str) -> None:
    path = KEPT / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
