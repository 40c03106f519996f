"""A real browser, for pages; tests that want it are skipped where there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LIMIT_MS = 60_000  # for a browser that hangs


@contextmanager
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium")
    with api.sync_playwright() as play:
        started = play.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=LIMIT_MS
        )
        yield started
        started.close()
