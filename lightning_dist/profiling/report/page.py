"""``report.html``: one file that opens without a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.profiling.analysis.metrics import METRICS
from lightning_dist.profiling.analysis.parts import PARTS, Summary, Timeline
from lightning_dist.profiling.report import figures, tables


def write_report(path: str | Path, summary: Summary, timelines: Sequence[Timeline]) -> None:
    """Write the page; equal arguments give equal bytes. ``timelines``: the steps to choose from."""
    replace_file(path, page(summary, timelines).encode())


def page(summary: Summary, timelines: Sequence[Timeline]) -> str:
    """The text of the page."""
    environment = Environment(
        loader=PackageLoader("lightning_dist.profiling", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    views = (
        figures.steps_over_time(summary),
        tables.parts_table(summary),
        figures.timeline(summary, timelines),
        tables.ranks_table(summary),
        figures.waits_over_time(summary),
        tables.whatif_table(summary),
        tables.links_table(summary),
        tables.buckets_table(summary),
        tables.run_table(summary),
    )
    drawn = {each.id: list(each.figures.values()) for each in views if each.figures}
    script = Path(str(summary.run.get("script") or "")).name
    started = str(summary.run.get("started") or "").replace("T", " ").replace("+00:00", " UTC")
    return environment.get_template("page.html").render(
        summary=summary,
        origin=", ".join(filter(None, (script, started and f"started {started}"))),
        facts=tables.facts(summary),
        views=views,
        unavailable=[
            (METRICS[key].label if key in METRICS else key, reason)
            for key, reason in sorted(summary.unavailable.items())
        ],
        metrics=[each for each in METRICS.values() if each.meaning and each.key not in PARTS],
        figures=to_json_plotly(drawn),  # in which nothing can end the script
        plotly=get_plotlyjs() if drawn else "",
    )


def _code(text: str) -> Markup:
    """Text with what is between backticks as code; all else of it is only text."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
