"""Files of settings: what is read is what was written, and what is wrong is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.configuration import read, write

COUNTS = st.integers(0, 10**12)
SWITCH = st.one_of(st.booleans(), st.just("auto"))
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "codec": st.sampled_from(["none", "int8", "topk:ratio=0.01,values=int8"])
        | st.just({"intra": "bf16", "inter": "int4:hadamard=true"}),
        "error_feedback": SWITCH,
        "hierarchical": SWITCH | st.just("leader"),
        "ranks_per_host": st.none() | st.integers(1, 99),
        "rank_groups": st.none() | st.just([[0, 1], [2, 3]]) | st.just([[[0], [1]], [[2]]]),
        "min_compress_numel": st.none() | COUNTS,
        "start_step": COUNTS,
        "compile_kernels": SWITCH,
    },
)


@given(options=OPTIONS)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("x") / "new" / "lightning_dist.yaml"
    write(path, options)
    assert read(path) == options
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_nothing_is_set(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert read(path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "- int8",
            "must be a YAML mapping, lines of key: value such as 'codec: int8'; it is a lis",
        ),
        ("int8", "must be a YAML mapping"),
        ("codec: [", "is not valid YAML"),
        ("codec: int8\n---\ncodec: int4", "is not valid YAML"),
        ("codec: int8\ncodec: int4", r"'codec' is given twice; keep one .*, line 2,"),
        ("start_step: 0\n\ncodec: int8: 4", r"mapping values are not allowed here .*, line 3,"),
        (
            "start_step: 0\ncodec: 'int8\n",
            r"while scanning a quoted scalar .*, line 2, .*, line 3,",
        ),
        ("start_step: 0\ncodec: \x01", r"special characters are not allowed"),
        ("codec: 2026-13-01", r"is not valid YAML \(key: value\): month must be in 1\.\.12"),
        ("!!python/object:os.system {}", "is not valid YAML"),
        ("codek: int8", r"did you mean 'codec'\?"),
        ("num_processes: 2", "Unknown setting 'num_processes' in "),
        ("1: 2", "Unknown setting '1'"),
        ("codec:", "got None in "),
        ("start_step: 1e3", "got '1e3'"),
        ("codec: {intra: bf16, inter: 4}", "codec must be"),
        ("rank_groups: [[0, 1], [a]]", "rank_groups must be"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r".") as error:
        read(path)
    assert re.search(said, str(error.value))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "<unicode string>" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"start_step: 0\ncodec: \xff\xfe")
    with pytest.raises(ValueError, match=r"is not valid YAML .*#x00ff: invalid start byte"):
        read(tmp_path / "x.yaml")


def test_what_is_wrong_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write(path, {"codec": "int4"})
    with pytest.raises(ValueError, match="start_step must be"):
        write(path, {"start_step": -1})
    assert read(path) == {"codec": "int4"}
