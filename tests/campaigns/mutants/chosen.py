"""The tests that are named in a file, and no others: a pytest plugin."""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the order of the files on the command line."""
    chosen = set(Path(os.environ["CHOSEN_TESTS"]).read_text().splitlines())
    order = {file: number for number, file in enumerate(config.args)}
    wanted = [item for item in items if item.nodeid in chosen]
    items[:] = sorted(wanted, key=lambda item: order[item.nodeid.partition("::")[0]])
