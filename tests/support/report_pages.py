"""What is on the page of a report and on the terminal, and texts that were made once."""

import html
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.report.figures import page
from lightning_dist.profiling.report.terminal import print_summary

KEPT = Path(__file__).with_name("kept") / "snapshots"


def figures_of(summary: Summary, *timelines: Timeline) -> dict[str, Any]:
    """The figures by id; of several to choose from the first."""
    return {name: choices[0] for name, choices in choices_of(summary, *timelines).items()}


def choices_of(summary: Summary, *timelines: Timeline) -> dict[str, list[Any]]:
    (content,) = re.findall(r'id="figures">(.*?)</script>', page(summary, timelines))
    assert "<" not in content, "a tag could end the script"
    figures = json.loads(content)
    assert isinstance(figures, dict)
    return figures


def body_of(summary: Summary, *timelines: Timeline) -> str:
    return page(summary, timelines).partition("<script")[0]


def text_of(summary: Summary, *timelines: Timeline) -> str:
    """Text of the page, a row of a table in a line."""
    body = body_of(summary, *timelines).partition("</style>")[2]
    body = (
        re.sub(r"\s+", " ", body).replace("</td> <td", "</td> | <td").replace("</th> <th", "| <th")
    )
    lines = re.sub(r"</?(div|dl|dt|dd|h\d|li|option|p|section|tr|ul)\b[^>]*>", "\n", body)
    text = html.unescape(re.sub(r"<[^>]*>", "", lines))
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"


def assert_snapshot(name: str, text: str) -> None:
    """``UPDATE_SNAPSHOTS=1`` writes it anew: look at the difference before it is committed."""
    path = KEPT / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def printed(summary: Summary, *, width: int = 200, color: bool = False) -> str:
    file = io.StringIO()
    print_summary(summary, Console(file=file, width=width, force_terminal=color))
    return file.getvalue()
