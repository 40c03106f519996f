"""The page "Write your own codec" is run: its codecs, in a package outside of the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from processes import run

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("own_codec.py")
PAGE = TESTS.parent / "docs/write-your-own-codec.md"


def code_of(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, mark
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with ``own_package``, as it is before it is installed."""
    home = tmp_path / "own_package"
    home.mkdir()
    (home / "__init__.py").touch()
    (home / "codecs.py").write_text("".join(map(code_of, ("example", "memory", "exchange"))))
    return tmp_path


def install(folder: Path, entry_points: str, *, package: str = "own_package") -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning_dist.codecs]\n{entry_points}\n")


LISTED = """
import sys
from lightning_dist.codecs import CODECS
from lightning_dist.integrations.strategies.registration import NAMES
assert {"compressed_ddp_rowint8", "compressed_ddp_int8_decay"} <= set(NAMES)
assert {"rowint8", "int8_decay"} <= set(CODECS)
assert "own_package" not in sys.modules
CODECS["rowint8"]
assert "own_package" in sys.modules
print("all is well")
"""


def run_script(python: list[str], folder: Path, *words: str | Path) -> None:
    paths = [str(path) for path in (folder, TESTS, TESTS / "reducer")]
    done = run([*python, *words], limit=110, PYTHONPATH=os.pathsep.join(paths))
    assert "all is well" in done.require_success().output


def test_a_codec_that_is_registered(package: Path, quick_python: list[str]) -> None:
    run_script(quick_python, package, SCRIPT, "registered")


@pytest.mark.slow
def test_a_codec_that_a_package_brings(package: Path, torch_python: list[str]) -> None:
    names = {"rowint8": "RowInt8", "int8_decay": "DecayInt8", "int8_broadcast": "BroadcastInt8"}
    install(package, "\n".join(f"{k} = own_package.codecs:{v}" for k, v in names.items()))
    run_script(torch_python, package, "-c", LISTED)
    run_script(torch_python, package, SCRIPT, "installed")


def test_the_example_is_short() -> None:
    lines = [line for line in code_of("example").splitlines() if line.strip()]
    assert len(lines) <= 27
