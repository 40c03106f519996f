"""Pictures of a profile in docs/figures/: its page (PNG) and its summary in a terminal (SVG).

    python -m benchmarks.screenshots            # or `make figures`

Trains `examples/profile_ddp.py` with int8 on two hosts of `harness/testbed.py`. Needs root,
iproute2 and Chromium. Unlike the figures of `docs_tables`, the pictures are of a new run each time.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.testbed import Testbed
from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.terminal import print_summary
from lightning_dist.profiling.run import read_run, run_folder
from lightning_dist.profiling.whatif.predict import read_costs, with_whatif

FIGURES = REPOSITORY / "docs" / "figures"
LINK_MBIT = 200.0
_COLUMNS = 110
_PAGE = {"width": 1180, "height": 1240}
_SCALE = 0.75
_LIMIT_MS = 60_000
_AMBER = [(0xA8, 0x5F, 0x00)] * 8  # all that a summary has beside black
_THEME = TerminalTheme((255, 255, 255), (27, 31, 36), _AMBER, _AMBER)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory), steps)
        folder = run_folder(directory)
        run = read_run(folder)
        summary = with_whatif(summarize(run), run, lambda observed: read_costs(folder))
        (FIGURES / "summary.svg").write_text(terminal(summary))
        photograph(Path(folder) / "report.html", FIGURES / "profile.png")


def train(folder: Path, steps: int) -> None:
    """Write a profile of a training on two hosts."""
    script = str(REPOSITORY / "examples" / "profile_ddp.py")
    command = [sys.executable, script, "int8", "--steps", str(steps), "--folder", str(folder)]
    with Testbed(hosts=2, link_mbit=LINK_MBIT) as testbed:
        testbed.launch(command, timeout_s=300)


def terminal(summary: Summary) -> str:
    """The summary as a terminal shows it, as SVG."""
    console = Console(record=True, file=io.StringIO(), width=_COLUMNS, highlight=False)
    print_summary(summary, console)
    title = "lightning-dist profile report"
    text = console.export_svg(title=title, theme=_THEME, unique_id="summary")
    text = re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)  # fetched from elsewhere
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def photograph(page: Path, picture: Path) -> None:
    """The top of a page, in a light browser window."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        sys.exit("benchmarks.screenshots needs chromium: apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        window = browser.new_page(viewport=_PAGE, color_scheme="light", device_scale_factor=_SCALE)
        window.goto(page.as_uri(), timeout=_LIMIT_MS)
        window.wait_for_selector(".js-plotly-plot .main-svg", timeout=_LIMIT_MS)
        window.screenshot(path=picture, timeout=_LIMIT_MS)
        browser.close()


if __name__ == "__main__":
    main()
