"""``report.html``: one file that opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from lightning_dist.profiling.analysis.parts import Summary, Timeline
from lightning_dist.profiling.report.facts import facts
from lightning_dist.profiling.report.figures_errors import errors_over_time
from lightning_dist.profiling.report.figures_links import links_between_hosts, links_of_groups
from lightning_dist.profiling.report.figures_steps import steps_over_time
from lightning_dist.profiling.report.figures_timeline import timelines_of
from lightning_dist.profiling.report.figures_waits import waits_over_time
from lightning_dist.profiling.report.files import replace_file
from lightning_dist.profiling.report.tables import (
    buckets_table,
    parts_table,
    ranks_table,
    run_table,
)
from lightning_dist.profiling.report.view import Listing, Picture, View
from lightning_dist.profiling.report.whatif import whatif_views
from lightning_dist.profiling.report.words import DEFINITIONS


def write_report(path: str | Path, summary: Summary, timelines: Sequence[Timeline]) -> None:
    """Write the page; what was there is replaced when all of the new one is on disk.

    Equal arguments give equal bytes.

    Args:
        timelines: the steps to show in detail, in this order.

    Raises:
        OSError: it cannot be written.
    """
    # Text from a damaged file may hold half characters, which no encoding knows.
    replace_file(path, page(summary, timelines).encode(errors="replace"))


def page(summary: Summary, timelines: Sequence[Timeline]) -> str:
    """The text of the page."""
    environment = Environment(
        loader=PackageLoader("lightning_dist.profiling", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["coded"] = _coded
    views = _views(summary, timelines)
    figures = {each.id: each.figure for each in views if isinstance(each, Picture) and each.figure}
    return environment.get_template("page.html").render(
        summary=summary,
        origin=_origin(summary),
        facts=facts(summary),
        views=views,
        definitions=DEFINITIONS,
        figures=_inside_a_script(figures),
        plotly=get_plotlyjs() if figures else "",
    )


def _origin(summary: Summary) -> str:
    """Which program it is of, and when that ran."""
    script = Path(str(summary.run.get("script") or "")).name
    started = str(summary.run.get("started") or "").replace("T", " ").replace("+00:00", " UTC")
    return ", ".join(filter(None, (script, started and f"started {started}")))


def _views(summary: Summary, timelines: Sequence[Timeline]) -> list[View]:
    groups = links_of_groups(summary)
    reasons = [f"{name}: {reason}" for name, reason in sorted(summary.reasons.items())]
    return [
        steps_over_time(summary),
        parts_table(summary),
        *whatif_views(summary),
        *timelines_of(summary, timelines),
        waits_over_time(summary),
        ranks_table(summary),
        links_between_hosts(summary),
        *([groups] if groups else []),
        errors_over_time(summary),
        buckets_table(summary),
        run_table(summary),
        Listing("notes", "Notes", "Notes", summary.notes, "Nothing is missing or odd."),
        Listing("reasons", "N/a, and why", "N/a", reasons, "Nothing."),
    ]


def _coded(text: str) -> Markup:
    """What is between backticks as code; all else of it is only text."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _inside_a_script(content: object) -> str:
    """JSON that cannot end the script that it is in."""
    text = json.dumps(content, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c")
