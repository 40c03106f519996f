"""Log messages and warnings with the prefix ``[lightning_dist]``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import MutableMapping
from typing import Any


def prefixed(text: str) -> str:
    return f"[lightning_dist] {text}"


def warn(text: str) -> None:
    """Issue ``text`` as a warning, located at the caller of the calling function."""
    warnings.warn(prefixed(text), stacklevel=3)


class _Log(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return prefixed(msg), kwargs


def get_logger(name: str) -> _Log:
    """The logger ``name``, whose messages get the prefix."""
    return _Log(logging.getLogger(name))
