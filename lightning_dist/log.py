"""Log messages with the prefix ``[lightning_dist]``."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


def prefixed(text: str) -> str:
    return f"[lightning_dist] {text}"


class _Log(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return prefixed(msg), kwargs


def get_logger(name: str) -> _Log:
    """The logger ``name``, whose messages get the prefix."""
    return _Log(logging.getLogger(name))
