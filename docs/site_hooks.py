"""What `mkdocs build` needs to show the same files that are read on a code host.

There links lead anywhere in the repository. Files outside of docs/ that are linked get the path in
the site that they have in the repository, and links follow.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
PAGES = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/README.md",
    "examples/README.md",
)
"""Pages of the site that are not in docs/."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
ROLE = re.compile(r":(?:class|func|meth|data):<code>(?:~[\w.]*\.|\.)?([\w.]+)</code>")


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the pages outside of docs/, and every file that a page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in files.documentation_pages():
        source = Path(page.abs_src_path or "").relative_to(ROOT).as_posix()
        for _, target, _, _ in LINK.findall(page.content_string):
            path = _in_repository(source, target)
            if path is None or files.get_file_from_path(_in_site(path)) is not None:
                continue
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Let links lead to the places in the site."""
    source = Path(page.file.abs_src_path or "").relative_to(ROOT).as_posix()

    def moved(found: re.Match[str]) -> str:
        path = _in_repository(source, found[2])
        if path is None:
            return found[0]  # mkdocs says what is wrong with it
        here = posixpath.dirname(page.file.src_uri)
        return f"{found[1]}{posixpath.relpath(_in_site(path), here)}{found[3] or ''}{found[4]}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Sphinx's roles in docstrings, as mere names."""
    return ROLE.sub(r"<code>\1</code>", html)


def _in_repository(source: str, target: str) -> str | None:
    """The file that ``source`` links to, both from the root of the repository."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path if (ROOT / path).is_file() else None


def _in_site(path: str) -> str:
    return path.removeprefix(DOCS)
