"""docs/elastic.md says what ElasticRestart takes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lightning_dist import ElasticRestart

DOCUMENT = Path(__file__).parents[2] / "docs" / "elastic.md"


def test_the_table_has_every_argument_with_its_default() -> None:
    section = DOCUMENT.read_text().partition("## Arguments")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:`(.*?)`|required) \|", section, re.MULTILINE)
    arguments = dict(inspect.signature(ElasticRestart).parameters)
    del arguments["saving"]
    expected = {
        name: "" if each.default is each.empty else repr(each.default).replace("'", '"')
        for name, each in arguments.items()
    }
    assert dict(rows) == expected
