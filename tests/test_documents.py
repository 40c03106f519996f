"""The tables in the documents are those of the kept results, and the names in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import lightning_dist
from benchmarks import docs_tables
from lightning_dist import CODECS
from lightning_dist.codecs.options import parse_codec

ROOT = Path(__file__).resolve().parents[1]


def test_the_measured_tables_are_made_from_the_kept_results() -> None:
    for document in docs_tables.DOCUMENTS:
        text = (ROOT / document).read_text()
        fresh = docs_tables.render(text, docs_tables.load_results(ROOT / "benchmarks/results"))
        assert fresh == text, f"{document} is not up to date: make tables"


SUMS = {"allreduce": "by the network", "two_shot": "decoded", "gather": "all payloads gathered"}


def test_the_table_of_the_guide_is_that_of_the_codecs() -> None:
    """Options with their defaults, what is kept, and who adds."""
    rows = [line for line in (ROOT / "docs/guide.md").read_text().splitlines() if "| " in line]
    for name, make in CODECS.items():
        if not make.__module__.startswith("lightning_dist."):
            continue
        (row,) = [r for r in rows if re.search(rf"^\|[^|]*`{name}`", r)]
        _, options, _, keeps, sums = (cell.strip() for cell in row.strip("|").split("|"))
        codec = make()
        said = dict(re.findall(r"`(\w+)=([^`]*)`", options))
        inherited = vars(CODECS["topk"]()) if "`topk`'s" in options else {}
        for option in vars(codec):
            if option in said or option not in inherited:
                assert parse_codec(f"{name}:{option}={said[option]}", CODECS) == codec, name
        kept = " and ".join(codec.memory().kinds) or "nothing"
        assert keeps.startswith(kept), name
        assert sums.startswith(SUMS[codec.exchange]), name


def test_every_codec_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs/api/codecs.md").read_text()
    own = [make for make in CODECS.values() if make.__module__.startswith("lightning_dist.")]
    assert [m.__name__ for m in own if f"::: lightning_dist.{m.__name__}\n" not in page] == []


def test_public_names_are_documented() -> None:
    documents = ("guide", "choosing-a-codec", "write-your-own-codec", "checkpoints", "profiling")
    files = ("README.md", *(f"docs/{name}.md" for name in documents))
    text = "".join((ROOT / file).read_text() for file in files)
    own = {"CODECS", "Codec", "__version__", *(make.__name__ for make in CODECS.values())}
    assert [n for n in lightning_dist.__all__ if n not in own and n not in text] == []
