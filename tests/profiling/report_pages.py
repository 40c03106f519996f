"""What is on the page of a report."""

from __future__ import annotations

import json
import re
from typing import Any

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.report.html import page


def figures_of(summary: Summary, *timelines: Timeline) -> dict[str, Any]:
    (content,) = re.findall(r'id="figures">(.*?)</script>', page(summary, timelines))
    assert "<" not in content, "a tag could end the script"
    figures = json.loads(content)
    assert isinstance(figures, dict)
    return figures


def body_of(summary: Summary, *timelines: Timeline) -> str:
    return page(summary, timelines).partition("<script")[0]
