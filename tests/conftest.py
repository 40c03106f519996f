"""What every test needs: one thread, and nothing left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() == dtype, "a test changed the default dtype"


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    left = {
        t.name for t in set(threading.enumerate()) - threads if t.name.startswith("lightning_d")
    }
    assert not left, f"reducers not closed: {left}"
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
