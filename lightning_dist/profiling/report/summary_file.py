"""``summary.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.report.files import replace_file


def write_summary(path: str | Path, summary: Summary) -> None:
    """Write it.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, to_json(summary.as_dict()).encode() + b"\n")


def to_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader takes: what is no finite number (lost gradients) is null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
