"""What a user reads when something is wrong. Messages are part of the product: tested whole.

Each says the rule, the value received, and what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_dist
from lightning_dist.codecs import Int8, resolve_codec
from lightning_dist.settings import Settings


def message(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the callers compare the whole text)
        call(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("codec", ["int7", "", 8, None])
def test_unknown_codec(codec: Any) -> None:
    assert message(resolve_codec, codec) == (
        "codec must be one of 'none', 'fp16', 'bf16', 'int8', 'int4', 'fp8', 'sign', 'qsgd', "
        "'terngrad', 'topk', 'dgc', 'randomk', 'threshold', 'powersgd', with options as in "
        "'int8:block_size=128', or a codec object such as lightning_dist.Int8(block_size=128), "
        f"got {codec!r}" + ("; did you mean 'int8' or 'int4'?" if codec == "int7" else "")
    )


@pytest.mark.parametrize("block_size", [3, 0, -16, 17, 65552])
def test_block_size(block_size: int) -> None:
    assert message(Int8, block_size=block_size) == (
        f"int8: block_size must be a multiple of 16 from 16 to 65536, got {block_size}; 256 is the "
        "default"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            {"error_feedback": "yes"},
            "error_feedback must be True, False or 'auto', got 'yes'",
        ),
        (
            {"hierarchical": "yes"},
            "hierarchical must be 'auto', True, False or 'leader', got 'yes'",
        ),
        (
            {"min_compress_numel": -1},
            "min_compress_numel must be 0 (compress every tensor) or more elements, got -1",
        ),
        ({"start_step": -5}, "start_step must be 0 or more synchronised steps, got -5"),
        (
            {"compile_kernels": "always"},
            "compile_kernels must be True, False or 'auto', got 'always'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_out_of_range(setting: dict[str, Any], text: str) -> None:
    assert message(Settings.check, **setting) == text


def test_settings_at_their_edges_are_taken() -> None:
    settings = Settings.check(min_compress_numel=0, start_step=0, hierarchical=False)
    assert (settings.min_compress_numel, settings.start_step) == (0, 0)
    assert (Int8(16).block, Int8(65536).block) == (16, 65536)


PRIVATE = re.compile(r"\b(told|said|is there|let them meet)\b", re.IGNORECASE)


def test_strings_that_users_read_have_no_private_words() -> None:
    """Of the package all but docstrings; of the command line these too, which are its help."""
    for path in Path(lightning_dist.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        documents = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.Constant) and ("cli" in path.parts or node not in documents):
                assert not PRIVATE.search(str(node.value)), f"{path}: {node.value}"


def test_every_placeholder_of_an_error_is_filled_in() -> None:
    """A string that is split over lines needs its ``f`` on each of them."""
    left = re.compile(r"\{(f'|[a-z_][\w.()\[\]]*(![rs])?\})")
    for path in Path(lightning_dist.__file__).parent.rglob("*.py"):
        raises = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise))
        for node in (each for one in raises for each in ast.walk(one)):
            text = node.value if isinstance(node, ast.Constant) else ""
            assert not left.search(str(text)), f"{path}: {text}"
