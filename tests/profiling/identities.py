"""What holds for the parts of any step."""

from __future__ import annotations

from lightning_dist.profiling.analysis.breakdown import Analysed
from lightning_dist.profiling.analysis.parts import PARTS


def check_identities(parts: Analysed) -> None:
    assert tuple(parts.parts) == PARTS
    assert sum(parts.parts.values()) == parts.duration
    assert min(parts.parts.values()) >= 0
    ns = parts.ns
    assert ns["hidden"] + ns["exposed_wait"] + ns["exposed_transfer"] == ns["exchange"]
