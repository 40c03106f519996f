"""The world that a training is in: a launcher's, or that of `on_ranks`."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

Facts = dict[str, Any]
"""Tensors and plain values of a training."""
TIMEOUT = timedelta(seconds=30)


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 2))  # launchers other than torchrun: always two


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    handler, found = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("lightning_dist")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
